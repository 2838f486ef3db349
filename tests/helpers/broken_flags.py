"""Flags that are misspelt, contradict each other or have impossible values; an environment that cannot work."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tests.helpers.broken_world import World, by_flags, case

by_flags(
    "a misspelt flag", "--rollout-bach-size 4", "--rollout-bach-size", "--rollout-batch-size", "See train.py --help"
)
by_flags("a flag that nobody knows", "--turbo 3", "--turbo", "See train.py --help")
by_flags("two flags that nobody knows", "--turbo 3 --warp 4", "--turbo", "See train.py --help")
by_flags("true behind a switch", "--use-kl-loss true", "true", "train.py --help")
by_flags("text for a number", "--rollout-batch-size many", "--rollout-batch-size", "'many'", "See train.py --help")
by_flags("a fraction for a whole number", "--num-rollout 1.5", "--num-rollout", "'1.5'", "See train.py --help")
by_flags("a flag without its value", "--lr", "--lr", "expected one argument", "See train.py --help")
by_flags("a choice that is none", "--advantage-estimator gropo", "--advantage-estimator", "'gropo'", "choose from")
by_flags(
    "no answers per prompt", "--n-samples-per-prompt 0", "--n-samples-per-prompt", "got 0", "at least 1", "Change the"
)
by_flags(
    "a negative batch", "--rollout-batch-size -2", "--rollout-batch-size", "got -2", "at least 1", "Change the flag"
)
by_flags("a learning rate that is no number", "--lr nan", "--lr", "got nan", "expected a number", "Change the flag")
by_flags("an infinite learning rate", "--lr inf", "--lr", "got inf", "expected a number", "Change the flag")
by_flags("a negative learning rate", "--lr -0.001", "--lr", "got -0.001", "expected at least 0", "Change the flag")
by_flags("a temperature of 0", "--rollout-temperature 0", "--rollout-temperature 0", "no learning signal", "above 0")
by_flags(
    "an infinite temperature", "--rollout-temperature inf", "--rollout-temperature", "got inf", "expected a number"
)
by_flags("truncated sampling", "--rollout-top-p 0.9", "--rollout-top-p 0.9", "would be biased", "Use --rollout-top-p 1")
by_flags("a share above 1", "--rollout-top-p 1.5", "--rollout-top-p", "got 1.5", "expected 0 to 1", "Change the flag")
by_flags(
    "a port that is none",
    "--vllm-router-port 99999",
    "--vllm-router-port",
    "got 99999",
    "1 to 65535",
    "Change the flag",
)
by_flags("no router at all", "--vllm-router-count 0", "--vllm-router-count", "got 0", "1 to 64", "Change the flag")
by_flags(
    "routers beyond the last port",
    "--vllm-router-port 65535 --vllm-router-count 3",
    "--vllm-router-port 65535 with --vllm-router-count 3",
    "ports up to 65537",
    "expected at most 65535",
    "Choose a port of at most 65533",
)
by_flags(
    "one port for the figures of two routers",
    "--router-prometheus-port 9000 --vllm-router-count 2",
    "--router-prometheus-port",
    "all routers would use this one port",
    "expected one for each",
    "Leave it out",
)
by_flags(
    "two routers and no engine",
    "--transferqueue-mode external --rollout-num-engines 0 --vllm-router-count 2",
    "--vllm-router-count 2: no effect here",
    "a --rollout-num-engines above 0",
    "Remove it",
)
by_flags(
    "an answer as long as the context", "--rollout-max-response-len 64", "leaves no token for a prompt", "Lower it"
)
by_flags(
    "a context beyond the model's", "--rollout-max-context-len 4096", "beyond the model's 64 positions", "Lower it"
)
by_flags(
    "a batch that does not divide", "--global-batch-size 3", "--global-batch-size 3", "round has 4", "Make them equal"
)
by_flags("a coefficient without a KL loss", "--kl-loss-coef 0.1", "--kl-loss-coef", "--use-kl-loss")
by_flags(
    "a flag that nothing reads",
    "--max-reward-error-share 0.2",
    "no effect here",
    "with --on-reward-error drop",
    "Remove it",
)
by_flags("a device that is not there", "--device cuda", "--device cuda", "shows no CUDA device", "Use --device cpu")
by_flags("tensor parallelism beyond the ranks", "--tensor-model-parallel-size 2", "1 trainer ranks", "multiple of 2")
by_flags(
    "a staleness that train_async needs", "--update-weights-interval 3", "--update-weights-interval 3", "Raise it to 2"
)
by_flags("two modes at once", "--debug-rollout-only --debug-train-only", "leave nothing to run", "Keep one of the two")
by_flags("two lengths of the run", "--num-epoch 1", "--num-rollout and --num-epoch", "are both given", "Keep one")
by_flags("no length of the run", "", "neither --num-rollout nor --num-epoch", "Say how long", without="--num-rollout")
by_flags("no prompts", "", "no prompts", "give --prompt-data FILE", without="--prompt-data")
by_flags("no reward", "", "no reward", "give --rm-type or --custom-rm-path", without="--rm-type")
by_flags(
    "no model",
    "",
    "--hf-checkpoint is not given",
    "expected a Hugging Face model",
    "Name one",
    without="--hf-checkpoint",
)
by_flags("a reward that is none", "--rm-type exact", "--rm-type", "'exact'", "choose from")
by_flags(
    "a buffer's filter where the ledger decides",
    "--transferqueue-mode streaming --over-sampling-batch-size 4 --buffer-filter-path filters.newest",
    *("--buffer-filter-path", "In mode streaming the ledger says which group is next", "--stale-policy", "Remove it"),
)
by_flags(
    "a box where the grader looks elsewhere",
    "--rm-type boxed_dapo",
    *("boxed_dapo", "looks for a line", "Say --rm-type boxed_math or boxed_exact_match"),
)
by_flags(
    "a remote reward without an address", "--rm-type remote_rm", "--rm-type remote_rm, which needs --rm-url", "Add it"
)
by_flags("an address that is none", "--rm-type remote_rm --rm-url localhost", "--rm-url localhost", "expected http://")
by_flags(
    "evaluation pairs that are none", "--eval-interval 1 --eval-prompt-data x", "expected NAME PATH pairs", "Give each"
)
by_flags(
    "an exporter without a place for the round", "--save-interval 1 --save-hf out", "--save-hf", "expected {rollout_id}"
)
by_flags("another engine", "--rollout-backend sglang", "--rollout-backend sglang", "Only vllm generates", "Remove")
by_flags(
    "a stop token beyond the vocabulary",
    "--rollout-stop-token-ids 9999",
    "--rollout-stop-token-ids 9999",
    "ids 0 to 47",
)
by_flags(
    "a field that is carried anyway",
    "--transfer-queue-extra-data-fields tokens",
    "tokens: is always stored",
    "Remove it",
)
by_flags(
    "a field with a name that is none",
    "--transfer-queue-extra-data-fields a-b",
    "'a-b'",
    "Expected an attribute of the",
)
by_flags(
    "a queue that contradicts itself",
    "--enable-vime-transfer-queue --transferqueue-mode off",
    "contradicts",
    "Remove one",
)
by_flags(
    "an engine module that is not there", "--debug-engine-module no.such", "there is no such module", "Check the name"
)
by_flags(
    "an unknown router flag",
    "--router-polcy random",
    "--router-polcy",
    "has no flag --polcy",
    "Did you mean --router-policy",
)
by_flags(
    "a router flag of the run",
    "--router-policy random",
    "--router-policy",
    "decides the router's --policy itself",
    "Use",
)
by_flags(
    "a negative number of retries", "--router-retry-max-retries -3", "got -3", "expected at least 0", "Change the flag"
)
by_flags(
    "a router that never waits", "--router-request-timeout-secs 0", "got 0", "expected at least 1", "Change the flag"
)
by_flags(
    "a log level that is none", "--router-log-level loud", "got 'loud'", "expected one of debug", "Change the flag"
)
by_flags(
    "true behind a router's switch", "--router-disable-retries true", "expects no value", "got 'true'", "Remove it"
)
by_flags(
    "an engine flag of the run",
    "--vllm-dtype float16",
    "--vllm-dtype",
    "decides the engine's --dtype itself",
    "Use --bf16",
)
by_flags(
    "a directory of weights at no interval", "--save-hf x_{rollout_id}", "--save-hf", "needs --save-interval", "Add it"
)
by_flags(
    "arguments of a template that are not JSON",
    "--apply-chat-template-kwargs {",
    "--apply-chat-template-kwargs",
    "not JSON",
)


@case(
    "several things at once",
    "problems",
    "no tokenizer there",
    "train.jsonl:1",
    "--router-polcy",
    "no module 'my_rewards'",
)
def _(world: World) -> Sequence[str]:
    (world.model / "tokenizer.json").unlink()
    world.records({"question": "1"})
    del world.given["--rm-type"]
    return ["--router-polcy", "x", "--custom-rm-path", "my_rewards.rm"]


@case(
    "contradicting flags and a broken file", "problems", "neither --num-rollout", "train.jsonl:2", "no tokenizer there"
)
def _(world: World) -> None:
    (world.model / "tokenizer.json").unlink()
    world.prompts.write_text('{"input": "1", "label": "2"}\n{\n')
    del world.given["--num-rollout"]


@case(
    "an unknown flag and broken files",
    *("3 problems", "unknown flag --turbo", "no tokenizer there", "train.jsonl:2", "See train.py --help"),
)
def _(world: World) -> Sequence[str]:
    (world.model / "tokenizer.json").unlink()
    world.prompts.write_text('{"input": "1", "label": "2"}\n{\n')
    return ["--turbo", "3"]


@case("a choice that is none does not make the records wrong", "--rm-type", "'exact'", "choose from")
def _(world: World) -> Sequence[str]:
    world.given["--rm-type"] = "exact"
    world.records({"input": "1", "label": [3]})  # which no known reward is said to compare
    return []


by_flags(
    "settings of verl",
    "data.train_batch_size=64 trainer.total_epochs=3",
    *("data.train_batch_size=64 trainer.total_epochs=3", "settings of verl", "docs/migrating.md says"),
)


@case("a failpoint that is none", "VIME_FAILPOINTS='no_such_point=kill'", "needs VIME_FAILPOINTS_DIR", "Set it")
def _(world: World) -> None:
    world.environment["VIME_FAILPOINTS"] = "no_such_point=kill"


@case("a run directory that cannot be written", "--run-dir", "cannot be made", "Expected a directory", "choose another")
def _(world: World) -> Sequence[str]:
    (world.root / "taken").write_text("")
    return ["--run-dir", str(world.root / "taken" / "run")]


@case("--save into a file", "--save", "cannot be written", "Expected a directory", "choose another")
def _(world: World) -> Sequence[str]:
    return ["--save", str(world.prompts)]


@case("a run directory of an earlier run", "--run-dir", "holds an earlier run", "Choose another directory", "--load")
def _(world: World) -> Sequence[str]:
    earlier = world.root / "earlier"
    earlier.mkdir()
    (earlier / "config.json").write_text("{}")
    (earlier / "metrics.jsonl").write_text('{"rollout_id": 0}\n')
    return ["--run-dir", str(earlier)]


@case(
    "a run directory of a run that is alive",
    "--run-dir",
    f"pid {os.getpid()}",
    "Choose another directory",
    "stop that run",
)
def _(world: World) -> Sequence[str]:
    from vime.observability.run_dir import claim, sign

    sign(claim(world.root / "alive", "--run-dir"), world.root / "alive")
    return ["--run-dir", str(world.root / "alive")]
