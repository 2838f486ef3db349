"""How far a bf16 trainer and a bf16 engine are apart, and each from fp32: nats a token, on tokens that the engine drew.

    .venv/bin/python benchmarks/bf16.py [--models tiny experts quickstart smollm2] [--answers 64] [--tokens 48]

Real vLLM samples with `--dtype bfloat16` and records log-probabilities as in a run. Then the same tokens are scored by
the engine in fp32 and by Vime's trainer in bf16 and in fp32, with either backend. `trainer - engine` is what
`train/train_rollout_logprob_abs_diff` shows and --train-rollout-diff-threshold bounds; `rounds` are its means over 16
answers, the smallest and the largest. `tiny` and `experts` are random models of two layers with sharp answers
(weights drawn with 0.2, not 0.02), `wide experts` has eight layers with 16 experts, four a token.
"""

import argparse
import json
import os
import random
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ROUND = 16  # answers
SAMPLES = 4  # answers of a prompt
PROMPT = 24  # tokens of a random one
WIDE_EXPERTS = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "initializer_range": 0.08,
}
LETTERS = string.ascii_lowercase
Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = list(MODELS)
    parser.add_argument("--models", nargs="+", choices=names, default=[name for name in names if name != "smollm2"])
    parser.add_argument("--answers", type=int, default=64, help="answers of a model (default: 64)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer (default: 48)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vime-bf16-") as scratch:
        directory = Path(scratch)
        job = directory / "job.json"
        models = {name: str(MODELS[name](directory / name.replace(" ", "-"))) for name in options.models}
        prompts = {name: make_prompts(name, model, options.answers // SAMPLES) for name, model in models.items()}
        job.write_text(json.dumps({"models": models, "prompts": prompts, "tokens": options.tokens}))
        found: dict[str, dict[str, Rows]] = {name: {} for name in models}
        for side in ("engine", "megatron", "fsdp"):
            for name, answers in in_a_process(side, job).items():
                found[name] |= answers
    for name in models:
        report(name, found[name])


def make_experts(directory: Path) -> Path:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**WIDE_EXPERTS)).save_pretrained(directory)
    return directory


def make_tiny(kind: str) -> Any:
    def make(directory: Path) -> Path:
        from tests.helpers import tiny_models

        found: Path = getattr(tiny_models, f"make_{kind}")(directory)
        return found

    return make


def make_smollm2(_: Path) -> Path:
    model = ROOT / "models" / "smollm2-135m"
    data = ["--data-dir", str(ROOT / "data" / "smollm2")]
    script = [sys.executable, str(ROOT / "examples/smollm2/prepare.py"), "--model-dir", str(model), *data]
    subprocess.run(script, cwd=ROOT, check=True)
    return model


MODELS = {
    "tiny": make_tiny("qwen3"),
    "experts": make_tiny("qwen3_moe"),
    "wide experts": make_experts,
    "quickstart": lambda _: ROOT / "examples" / "quickstart" / "model",
    "smollm2": make_smollm2,
}


def make_prompts(name: str, model: str, count: int) -> list[list[int]]:
    """Tokens of the task that the model has learned; random ones for a random model."""
    draw = random.Random(0)
    if name == "quickstart":
        texts = [f"{draw.randint(1, 8)}:{''.join(draw.choices(LETTERS, k=8))}=" for _ in range(count)]
    elif name == "smollm2":
        lines = (ROOT / "data" / "smollm2" / "train.jsonl").read_text().splitlines()[:count]
        texts = [json.loads(line)["input"] for line in lines]
    else:
        vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        return [[draw.randrange(4, vocab_size) for _ in range(PROMPT)] for _ in range(count)]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(text)["input_ids"] for text in texts]


def in_a_process(side: str, job: Path) -> dict[str, dict[str, Rows]]:
    """Engine and backends do not share a process: each changes how torch computes there."""
    from vime.backends.vllm_utils.launch import DEFAULT_ENV, DEFAULT_ENV_CPU, REQUIRED_ENV_CPU

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if side == "engine":
        environment = {**environment, **DEFAULT_ENV, **DEFAULT_ENV_CPU, **REQUIRED_ENV_CPU}
    answer = job.with_name(f"{side}.json")
    code = f"from benchmarks.bf16 import SIDES; SIDES[{side!r}]({str(job)!r}, {str(answer)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side}: {done.stderr[-4000:]}")
    found: dict[str, dict[str, Rows]] = json.loads(answer.read_text())
    return found


def run_engine(job: str, answer: str) -> None:
    """By model: `rows` as sampled and recorded in bf16, and what the engine says of them in bf16 and fp32."""
    task, found = json.loads(Path(job).read_text()), {}
    for name, model in task["models"].items():
        with Engine(model, "bfloat16") as engine:
            rows = engine.sample(task["prompts"][name], task["tokens"])
            found[name] = {"rows": rows, "engine bf16, again": engine.score(rows)}
        with Engine(model, "float32") as engine:
            found[name]["engine fp32"] = engine.score(rows)
    Path(job).write_text(json.dumps({**task, "rows": {name: answers["rows"] for name, answers in found.items()}}))
    Path(answer).write_text(json.dumps(found))


class Engine:
    """vLLM with the settings that decide how a run's engine computes."""

    def __init__(self, model: str, dtype: str) -> None:
        from vllm import LLM

        self._llm = LLM(
            model, dtype=dtype, enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=1 << 28,
            skip_tokenizer_init=True, disable_log_stats=True, logprobs_mode="processed_logprobs",
        )  # fmt: skip

    def sample(self, prompts: list[list[int]], num_tokens: int) -> Rows:
        from vllm import SamplingParams

        params = SamplingParams(n=SAMPLES, max_tokens=num_tokens, logprobs=0, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [
            {
                "prompt": prompt,
                "response": list(one.token_ids),
                "recorded": [entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True)],
            }
            for prompt, output in zip(prompts, outputs, strict=True)
            for one in output.outputs
        ]

    def score(self, rows: Rows) -> list[list[float]]:
        from vllm import SamplingParams

        texts = [row["prompt"] + row["response"] for row in rows]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
        return [
            [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], text[1:], strict=True)][
                -len(row["response"]) :
            ]
            for output, text, row in zip(outputs, texts, rows, strict=True)
        ]

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        del self._llm
        cleanup_dist_env_and_memory()


def run_megatron(job: str, answer: str) -> None:
    from vime.backends.megatron_utils import initialize

    initialize.prepare_process("cpu")
    run_trainer(job, answer, "megatron")


def run_fsdp(job: str, answer: str) -> None:
    run_trainer(job, answer, "fsdp")


def run_trainer(job: str, answer: str, backend: str) -> None:
    """By model: what the trainer says of the rows in bf16 and fp32."""
    import torch

    from benchmarks.vime_side import make_worker, to_train_rows

    torch.set_num_threads(1)
    task, found = json.loads(Path(job).read_text()), {}
    for name, model in task["models"].items():
        rows = to_train_rows([{**row, "advantage": 0.0} for row in task["rows"][name]])
        found[name] = {}
        for dtype in ("bf16", "fp32"):
            flags = {"device": "cpu", "distributed_backend": "gloo", "train_backend": backend, "bf16": dtype == "bf16"}
            worker = make_worker(model, **flags, use_dynamic_batch_size=True, max_tokens_per_gpu=1024)
            found[name][f"{backend} {dtype}"] = [logp_R.tolist() for logp_R in worker.log_probs(rows)]
            worker.backend.close()
    Path(answer).write_text(json.dumps(found))


SIDES = {"engine": run_engine, "megatron": run_megatron, "fsdp": run_fsdp}


def report(name: str, found: dict[str, Any]) -> None:
    """One line a pair: mean, 99th percentile and largest |difference|, the mean difference, and means of rounds."""
    rows = found.pop("rows")
    sides = {"engine bf16": [row["recorded"] for row in rows], **found}
    pairs = [("engine bf16", "engine fp32"), ("engine bf16", "engine bf16, again"), ("engine fp32", "megatron fp32")]
    for backend in ("megatron", "fsdp"):
        pairs += [(f"{backend} bf16", "engine bf16"), (f"{backend} bf16", f"{backend} fp32")]
    nats = -sum(map(sum, sides["engine fp32"])) / sum(map(len, sides["engine fp32"]))
    print(f"\n{name}: {len(rows)} answers, {sum(map(len, sides['engine bf16']))} tokens, {nats:.2f} nats a token")
    print("| pair | mean | p99 | largest | signed mean | rounds |\n|---|---|---|---|---|---|")
    for one, other in pairs:
        signed = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(sides[one], sides[other], strict=True)]
        flat = sorted(abs(value) for row in signed for value in row)
        rounds = [mean([abs(value) for row in signed[at : at + ROUND] for value in row])
                  for at in range(0, len(signed), ROUND)]  # fmt: skip
        print(
            f"| {one} - {other} | {mean(flat):.2g} | {flat[int(0.99 * len(flat))]:.2g} | {flat[-1]:.2g} "
            f"| {mean([value for row in signed for value in row]):+.1g} | {min(rounds):.2g} to {max(rounds):.2g} |"
        )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
