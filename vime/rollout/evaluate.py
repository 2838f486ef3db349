"""Evaluation: held-out prompts, their own sampling parameters, no effect on the training data."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from vime.rollout.data_source import new_sample
from vime.rollout.generation import eval_sampling_params
from vime.rollout.groups import UNUSABLE, generate_and_rm_group
from vime.rollout.loops import raise_first
from vime.rollout.metrics import sample_metrics
from vime.rollout.progress import BOARD, RoundProgress
from vime.rollout.prompts import Prompt, read_prompts
from vime.types import EngineError, RolloutFnEvalOutput, Sample, WaitTimeoutError
from vime.utils.waits import waiting

_PROMPTS: dict[tuple[str, ...], list[Prompt]] = {}
"""Files read so far, by path and the flags that decide how they are read. Owner: the rollout loop."""


def eval_data_sets(args: Any) -> dict[str, list[Prompt]]:
    """The prompts of each NAME PATH pair of --eval-prompt-data; DataError when one cannot be used."""
    pairs = args.eval_prompt_data
    sets = {}
    for name, path in zip(pairs[::2], pairs[1::2], strict=True):
        key = (path, args.hf_checkpoint, args.input_key, str(args.label_key), str(args.apply_chat_template))
        if key not in _PROMPTS:
            _PROMPTS[key] = read_prompts(args, path, flag="--eval-prompt-data")
        sets[name] = _PROMPTS[key]
    return sets


async def evaluate_all(args: Any, rollout_id: int) -> RolloutFnEvalOutput:
    """Every evaluation set, one after the other; samples in the order of the file, answers of a prompt side by side.

    Waits for generation and rewards; unblocked by --rollout-timeout-secs, for all sets together.
    """
    data: dict[str, list[Sample]] = {}
    metrics: dict[str, float] = {}
    ends = asyncio.get_running_loop().time() + args.rollout_timeout_secs
    for name, prompts in eval_data_sets(args).items():
        started = time.monotonic()
        samples = await _evaluate(args, rollout_id, name, prompts, ends)
        data[name] = samples
        metrics |= sample_metrics(args, samples, f"eval/{name}")
        metrics[f"eval/{name}/time"] = time.monotonic() - started
    return RolloutFnEvalOutput(data=data, metrics=metrics)


async def _evaluate(args: Any, rollout_id: int, name: str, prompts: list[Prompt], ends: float) -> list[Sample]:
    """`ends` is a time of the running loop."""
    size, params = args.n_samples_per_eval_prompt, eval_sampling_params(args)
    groups = [
        [new_sample(prompt, group_index=number, index=number * size + offset) for offset in range(size)]
        for number, prompt in enumerate(prompts)
    ]
    started, finished = time.monotonic(), 0
    results: list[list[Sample]] = [[] for _ in groups]

    async def work(number: int) -> None:
        nonlocal finished
        for sample in groups[number]:
            sample.rollout_id = rollout_id
        results[number] = await generate_and_rm_group(args, groups[number], params)
        finished += 1
        BOARD.post(
            RoundProgress(
                name=f"evaluation {name} before round {rollout_id}",
                kept_groups=finished,
                wanted_groups=len(groups),
                in_flight_groups=len(groups) - finished,
                dropped_groups=0,
                response_tokens=sum(sample.response_length for group in results for sample in group),
                elapsed_s=time.monotonic() - started,
            )
        )

    try:
        with waiting(f"the prompts of evaluation {name}", deadline_s=ends - asyncio.get_running_loop().time()):
            async with asyncio.timeout_at(ends), asyncio.TaskGroup() as tasks:
                for number in range(len(groups)):
                    tasks.create_task(work(number))
    except TimeoutError as error:
        raise WaitTimeoutError(
            f"evaluation {name}: {finished} of {len(groups)} prompts done",
            args.rollout_timeout_secs,
            "vLLM engines and reward function",
            "Raise --rollout-timeout-secs or take a slice of the data (PATH@[0:64]).",
        ) from error
    except BaseExceptionGroup as failures:
        raise_first(failures)
    samples = [sample for group in results for sample in group]
    unusable = [sample for sample in samples if sample.status in UNUSABLE]
    if unusable:
        raise EngineError(f"evaluation {name}: {len(unusable)} samples ended {unusable[0].status}, expected answers.")
    return samples
