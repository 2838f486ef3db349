"""Evaluation: held-out prompts, their own sampling parameters, no effect on the training data."""

from __future__ import annotations

import asyncio
import logging
import time

from vime.config.deadlines import rollout_deadline_s
from vime.config.eval_sets import EvalSet, eval_sets
from vime.config.graders import IN_RECORD
from vime.config.parse import Args
from vime.rollout.data_source import new_sample
from vime.rollout.generation import eval_sampling_params
from vime.rollout.group_worker import UNUSABLE, generate_and_rm_group
from vime.rollout.loops import raise_first
from vime.rollout.metrics import pass_metrics, sample_metrics
from vime.rollout.progress import BOARD, RoundProgress
from vime.rollout.prompts import Prompt, Prompts, read_prompts
from vime.rollout.reward_errors import check_evaluation
from vime.types import EngineError, RolloutFnEvalOutput, Sample, SampleStatus, WaitTimeoutError
from vime.utils.waits import waiting

logger = logging.getLogger(__name__)

_PROMPTS: dict[tuple[str, ...], Prompts] = {}
"""Files read so far, by path and the flags that decide how they are read. Owner: the rollout loop."""


def eval_data_sets(args: Args) -> list[tuple[EvalSet, Prompts]]:
    """Return the prompts of each set of --eval-prompt-data and --eval-config; DataError when one cannot be used."""
    return [(one, _prompts_of(one)) for one in eval_sets(args.config)]


def _prompts_of(one: EvalSet) -> Prompts:
    args = one.config.flat
    keys = (args.input_key, args.label_key, args.metadata_key, args.tool_key, args.apply_chat_template)
    key = (one.path, args.hf_checkpoint, *map(str, (*keys, args.multimodal_keys)))
    if key not in _PROMPTS:
        _PROMPTS[key] = read_prompts(args, one.path, flag=one.flag)
    return _PROMPTS[key]


async def evaluate_all(args: Args, rollout_id: int) -> RolloutFnEvalOutput:
    """Run the evaluation sets one after the other; samples in the order of the file, completions of a prompt side by
    side.

    Waits for generation and rewards; unblocked by --rollout-timeout-secs, for all sets together.
    """
    data: dict[str, list[Sample]] = {}
    metrics: dict[str, float] = {}
    ends = asyncio.get_running_loop().time() + rollout_deadline_s(args.config)
    for one, prompts in eval_data_sets(args):
        started = time.monotonic()
        groups = await _evaluate(one, rollout_id, prompts, ends)
        data[one.name], of_set = judged(one, prompts, groups, time.monotonic() - started)
        metrics |= of_set
    return RolloutFnEvalOutput(data=data, metrics=metrics)


def judged(
    one: EvalSet, prompts: Prompts, groups: list[list[Sample]], seconds: float
) -> tuple[list[Sample], dict[str, float]]:
    """Return samples and metrics of one set. Groups whose reward failed (--on-reward-error drop) are left out and
    counted, RewardError when they are too many; groups with a sample that has failed (its agent broke, say) are left
    out, counted and named in the log. EngineError when no group is left, or a sample came back without an end."""
    own, name = one.config.flat, one.name
    scored = check_evaluation(own, name, groups)
    failed = {id(group): sample for group in scored for sample in group if sample.status is SampleStatus.FAILED}
    for sample in failed.values():
        reason = sample.metadata.get("session_reason", "its generate function says so")
        logger.warning(
            "evaluation %s: prompt %d is left out, a sample has failed: %s", name, sample.group_index, reason
        )
    played = [group for group in scored if id(group) not in failed]
    samples = [sample for group in played for sample in group]
    unusable = [sample for sample in samples if sample.status in UNUSABLE]
    if unusable or not samples:
        what = f"{len(unusable)} samples ended {unusable[0].status}" if unusable else "a sample of every prompt failed"
        raise EngineError(f"evaluation {name}: {what}, expected completions.")
    prefix = f"eval/{name}"
    metrics = sample_metrics(own, samples, prefix) | pass_metrics(own, samples, prefix) | {f"{prefix}/time": seconds}
    if prompts.num_too_long:
        metrics[f"{prefix}/prompts_too_long"] = float(prompts.num_too_long)
    if len(scored) < len(groups):
        metrics[f"{prefix}/reward_errors"] = float(len(groups) - len(scored))
    if failed:
        metrics[f"{prefix}/failed"] = float(len(failed))
    return samples, metrics


def mark_failed(samples: list[Sample], reason: str) -> None:
    """Mark a prompt one of whose samples has failed elsewhere."""
    for sample in samples:
        sample.status = SampleStatus.FAILED
        sample.metadata = {**sample.metadata, "session_reason": reason}


def eval_groups(one: EvalSet, prompts: Prompts, rollout_id: int) -> list[list[Sample]]:
    """Return a group of new samples for each prompt of a set. DataError when an image has changed since the start: the
    others would be a different evaluation."""
    groups = [_group(one, prompt, number) for number, prompt in enumerate(prompts)]
    for group in groups:
        for sample in group:
            sample.rollout_id = rollout_id
    return groups


def _group(one: EvalSet, prompt: Prompt, number: int) -> list[Sample]:
    """Return new samples of a prompt. As in slime the set's choice of reward overrides that of its records."""
    size = one.config.flat.n_samples_per_eval_prompt
    images = None if prompt.images is None else prompt.images.inputs()
    indices = range(number * size, (number + 1) * size)
    group = [new_sample(prompt, images, group_index=number, index=index) for index in indices]
    if one.rm_type is not None:
        for sample in group:
            sample.metadata[IN_RECORD] = one.rm_type
    return group


async def _evaluate(one: EvalSet, rollout_id: int, prompts: Prompts, ends: float) -> list[list[Sample]]:
    """Return the completed group of each prompt. `ends` is a time of the running loop."""
    args, name = one.config.flat, one.name
    params, groups = eval_sampling_params(args), eval_groups(one, prompts, rollout_id)
    started, finished, num_tokens = time.monotonic(), 0, 0
    results: list[list[Sample]] = [[] for _ in groups]

    async def work(number: int) -> None:
        nonlocal finished, num_tokens
        results[number] = await generate_and_rm_group(args, groups[number], params, evaluation=True)
        finished += 1
        num_tokens += sum(sample.response_length for sample in results[number])
        BOARD.post(
            RoundProgress(
                name=f"evaluation {name} before round {rollout_id}",
                kept_groups=finished,
                wanted_groups=len(groups),
                in_flight_groups=len(groups) - finished,
                dropped_groups=0,
                response_tokens=num_tokens,
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
            rollout_deadline_s(args.config),
            "vLLM engines and reward function",
            "Raise --rollout-timeout-secs or take a slice of the data (PATH@[0:64]).",
        ) from error
    except BaseExceptionGroup as failures:
        raise_first(failures)
    return results
