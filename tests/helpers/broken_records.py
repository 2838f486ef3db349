"""Broken prompt files, labels and plug-ins."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tests.helpers.broken_world import World, by_flags, case

NAN = float("nan")
GOOD = {"input": "1+1=", "label": "2"}


@case("a prompt file that is not there", "--prompt-data", "no such file", "Expected jsonl or parquet", "check the path")
def _(world: World) -> Sequence[str]:
    return ["--prompt-data", str(world.root / "trian.jsonl")]


@case("a directory without data", "--prompt-data", "no data set in this", "Expected jsonl or parquet", "check the path")
def _(world: World) -> Sequence[str]:
    (world.root / "empty").mkdir()
    return ["--prompt-data", str(world.root / "empty")]


@case("a prompt file that is a loop of links", "--prompt-data", "no such file", "Expected jsonl", "check the path")
def _(world: World) -> None:
    world.prompts.unlink()
    world.prompts.symlink_to(world.prompts)


@case("an empty prompt file", "--prompt-data", "no records there", "Expected at least one line", "check the file")
def _(world: World) -> None:
    world.prompts.write_text("")


@case("a slice with no records", "--prompt-data", "no records there", "Expected at least one line", "the slice")
def _(world: World) -> Sequence[str]:
    return ["--prompt-data", f"{world.prompts}@[5:9]"]


@case("a slice that cannot be read", "--prompt-data", "the slice cannot be read", "Expected path@[start:stop]")
def _(world: World) -> Sequence[str]:
    return ["--prompt-data", f"{world.prompts}@[a:b]"]


@case("a line that is not JSON", "train.jsonl:2", "not JSON", "Expected one JSON object a line")
def _(world: World) -> None:
    world.prompts.write_text(json.dumps(GOOD) + '\n{"input": \n')


@case("one JSON array over many lines", "train.jsonl:1", "not JSON", "Expected one JSON object a line", "on a line")
def _(world: World) -> None:
    world.prompts.write_text(json.dumps([GOOD], indent=1))


@case("a line that is a list", "train.jsonl:1", "got a JSON list", "expected an object", "Write one object a line")
def _(world: World) -> None:
    world.records([1])


@case("a CSV file", "train.jsonl:1", "not JSON", "got 'question,answer'", "Expected one JSON object a line")
def _(world: World) -> None:
    world.prompts.write_text("question,answer\n1+1,2\n")


@case("text that is not UTF-8", "train.jsonl", "not UTF-8", "Expected jsonl")
def _(world: World) -> None:
    world.prompts.write_bytes(b'{"input": "\xff\xfe"}\n')


@case("jsonl called parquet", "--prompt-data", "cannot be read as parquet", "Check the file")
def _(world: World) -> Sequence[str]:
    file = world.root / "train.parquet"
    file.write_text(json.dumps(GOOD))
    return ["--prompt-data", str(file)]


@case(
    "a record without the prompt's key",
    "train.jsonl:1",
    "no key 'input' (--input-key)",
    "has: label, question",
    "Fix the",
)
def _(world: World) -> None:
    world.records({"question": "1+1=", "label": "2"})


@case(
    "a record without the label's key", "train.jsonl:2", "no key 'label' (--label-key)", "has: input", "Fix the record"
)
def _(world: World) -> None:
    world.records(GOOD, {"input": "2+2="})


@case("a prompt that is a number", "train.jsonl:1", "the prompt is int", "expected text", "--apply-chat-template")
def _(world: World) -> None:
    world.records({"input": 3, "label": "2"})


@case(
    "messages without the template's flag", "train.jsonl:1", "the prompt is list", "expected text", "add --apply-chat"
)
def _(world: World) -> None:
    world.records({"input": [{"role": "user", "content": "1+1="}], "label": "2"})


@case("an empty prompt", "train.jsonl:2", "the prompt is empty text", "Expected a question", "remove the record")
def _(world: World) -> None:
    world.records(GOOD, {"input": "", "label": "2"})


@case(
    "a message without a role", "train.jsonl:1", "message 1 is", "expected an object with role and content", "Fix the"
)
def _(world: World) -> Sequence[str]:
    (world.model / "chat_template.jinja").write_text("{{ messages }}")
    world.records({"input": [{"content": "1+1="}], "label": "2"})
    return ["--apply-chat-template"]


@case("a chat template that is not there", "--apply-chat-template", "has no chat template", "Remove the flag")
def _(world: World) -> Sequence[str]:
    return ["--apply-chat-template"]


@case("metadata that is text", "train.jsonl:1", "'metadata' is str", "expected an object", "Fix the record or the flag")
def _(world: World) -> None:
    world.records({**GOOD, "metadata": "hard"})


@case("a list as label", "train.jsonl:1", "the label is list ['2']", "expected text or a number", "Fix the record")
def _(world: World) -> None:
    world.records({"input": "1+1=", "label": ["2"]})


@case("NaN as label", "train.jsonl:2", "the label is nan", "expected a finite number or text", "Fix the record")
def _(world: World) -> None:
    world.records(GOOD, {"input": "1+1=", "label": NAN})


@case("null as label", "train.jsonl:1", "the label is null", "expected text or a number", "Fix the record")
def _(world: World) -> None:
    world.records({"input": "1+1=", "label": None})


@case("an empty label", "train.jsonl:1", "the label is ''", "expected the text of the right answer", "Fix the record")
def _(world: World) -> None:
    world.records({"input": "1+1=", "label": ""})


@case(
    "an object as label, for math", "train.jsonl:1", "the label is dict", "expected text or a number", "--rm-type math"
)
def _(world: World) -> Sequence[str]:
    world.records({"input": "1+1=", "label": {"answer": 2}})
    return ["--rm-type", "math"]


@case(
    "a grader in a record that is none",
    *("train.jsonl:2", "metadata['rm_type'] is 'maths'", "expected one of exact_match", "Fix the record"),
)
def _(world: World) -> None:
    world.records(GOOD, {**GOOD, "metadata": {"rm_type": "maths"}})


@case(
    "records of which not every one says its grader",
    *("no reward", "give --rm-type or --custom-rm-path", "1 of 2 records", "metadata['rm_type']", "train.jsonl:2"),
)
def _(world: World) -> None:
    del world.given["--rm-type"]
    world.records({**GOOD, "metadata": {"rm_type": "f1"}}, GOOD)


@case("a label that the record's own grader cannot compare", "the label is list", "rm_type math of its metadata")
def _(world: World) -> Sequence[str]:
    world.records({"input": "1+1=", "label": [2], "metadata": {"rm_type": "math"}})
    return ["--rm-type", "f1"]


@case("a dapo record without a reward key", "train.jsonl:1", "is 'dapo'", "Add --reward-key score")
def _(world: World) -> None:
    world.records({**GOOD, "metadata": {"rm_type": "dapo"}})


@case("a remote record without an address", "train.jsonl:1", "is 'remote_rm'", "needs --rm-url")
def _(world: World) -> None:
    world.records({**GOOD, "metadata": {"rm_type": "remote_rm"}})


@case(
    "a bad record of a set of --eval-config",
    *("eval.jsonl:1", "the label is list", "expected text or a number", "Fix the record"),
)
def _(world: World) -> Sequence[str]:
    (world.root / "eval.jsonl").write_text('{"question": "1+1=", "answer": [2]}\n')
    sets = world.root / "sets.toml"
    sets.write_text('[[datasets]]\nname = "own"\npath = "eval.jsonl"\ninput_key = "question"\nlabel_key = "answer"\n')
    return ["--eval-interval", "1", "--eval-config", str(sets)]


@case("a set of --eval-config that needs an entry", "set own", "rm_type dapo", "Add --reward-key score")
def _(world: World) -> Sequence[str]:
    sets = world.root / "sets.toml"
    sets.write_text(f'[[datasets]]\nname = "own"\npath = "{world.prompts}"\nrm_type = "dapo"\n')
    return ["--eval-interval", "1", "--eval-config", str(sets)]


@case("a label that is compared and not named", "no --label-key is given", "have: input, label", "Name the key")
def _(world: World) -> Sequence[str]:
    del world.given["--label-key"]
    return []


@case("a thousand bad records", "train.jsonl:1", "the label is list", "997 more of its 1000 records", "Correct them")
def _(world: World) -> None:
    world.records(*[{"input": "1+1=", "label": [2]}] * 1000)


@case("an evaluation file that is not there", "--eval-prompt-data", "no such file", "Expected jsonl", "check the path")
def _(world: World) -> Sequence[str]:
    return ["--eval-interval", "1", "--eval-prompt-data", "held_out", str(world.root / "eval.jsonl")]


@case("an evaluation file without labels", "eval.jsonl:1", "no key 'label'", "has: input", "Fix the record")
def _(world: World) -> Sequence[str]:
    file = world.root / "eval.jsonl"
    file.write_text('{"input": "1"}\n')
    return ["--eval-interval", "1", "--eval-prompt-data", "held_out", str(file)]


def by_plugin(name: str, flag: str, code: str, *says: str, more: Sequence[str] = ()) -> None:
    def breaks(world: World) -> Sequence[str]:
        flags = [flag, world.plugin(code), *more]
        if flag == RM:
            del world.given["--rm-type"]
        return flags

    case(name, *says)(breaks)


RM = "--custom-rm-path"
by_plugin(
    "a plug-in with a syntax error", RM, "x = 1\ndef rm(args, sample:\n", RM, "is not Python", ":2)", "Correct that"
)
by_plugin(
    "a plug-in whose import fails", RM, "\nimport no_such_pkg\n", "no_such_pkg", "not installed", ":2)", "Install it"
)
by_plugin("a plug-in that raises at import", RM, "x = {}\ny = x['a']\n", RM, "KeyError", ":2)", "Correct that line")
by_plugin("a plug-in that exits", RM, "import sys\nsys.exit(1)\n", RM, "SystemExit", ":2)", "Correct that line")
by_plugin(
    "a plug-in without the function", RM, "def reward(args, sample): ...\n", "no 'rm'", "it has reward", "Name one"
)
by_plugin(
    "a plug-in with other parameters", RM, "def rm(sample):\n    return 1\n", "cannot be called as", "Give it these"
)
by_plugin("a plug-in that is a number", RM, "rm = 1\n", RM, "got int 1", "expected a function", "Name a callable")
by_plugin("a reward that yields", RM, "def rm(args, sample):\n    yield 1\n", RM, "is a generator", "Return one value")
by_plugin(
    "a filter that is awaited by nobody",
    "--dynamic-sampling-filter-path",
    "async def rm(args, samples):\n    return True\n",
    *("--dynamic-sampling-filter-path", "async def", "it is not awaited", "Write `def`"),
)
by_plugin(
    "a data source without its methods",
    "--data-source-path",
    "class rm:\n    def __init__(self, args): ...\n",
    *("--data-source-path", "the class has no get_samples", "A data source has"),
)
by_plugin(
    "a generate function that cannot resume",
    "--custom-generate-function-path",
    "async def rm(args, sample, sampling_params):\n    return sample\n",
    *("--custom-generate-function-path", "does not declare that it can continue", "set `resumes = True`"),
    more=("--partial-rollout", "--mask-offpolicy-in-partial-rollout"),
)


@case("a plug-in file that is not there", RM, "there is no file", "Expected path/to/file.py:name", "check the path")
def _(world: World) -> Sequence[str]:
    del world.given["--rm-type"]
    return [RM, f"{world.root / 'reward.py'}:rm"]


by_flags(
    "a plug-in module that is not there",
    f"{RM} my_rewards.rm",
    RM,
    "no module 'my_rewards'",
    "PYTHONPATH",
    without="--rm-type",
)
by_flags(
    "a plug-in without a name",
    f"{RM} rewards",
    RM,
    "expected package.module.name or path/to/file.py:name",
    without="--rm-type",
)
