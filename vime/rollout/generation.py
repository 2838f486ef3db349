"""One prompt -> its completions, as samples with log-probabilities and version spans.

`generate` is what a custom generate function calls. `generate_group` asks for a whole group in one request; under
--reference-mode each completion is a request of its own, with its own seed. Both run on the rollout loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TypeVar

from vime.config.deadlines import generate_deadline_s, request_deadline_s
from vime.config.parse import Args
from vime.protocols import SamplingParams
from vime.rollout.abort_scope import is_aborting
from vime.rollout.engine_client import EngineClient
from vime.rollout.exchanges import Completion, PromptTokens
from vime.rollout.loops import raise_first, rollout_loop
from vime.rollout.partial import may_mix
from vime.rollout.prompts import context_limit, decode_response
from vime.rollout.routed_experts import join_routed_experts
from vime.rollout.seeds import request_seed
from vime.types import (
    FINISH_STATUS,
    KEY_HEADER,
    ConfigError,
    EngineError,
    PendingText,
    Sample,
    SampleStatus,
    WaitTimeoutError,
)

Number = TypeVar("Number", int, float)
_CLIENTS: dict[str, EngineClient] = {}
"""One client per address of a first router. Owner: the rollout loop; only its thread touches the dict."""
_engine_key = ""  # see `use_engine_key`


def train_sampling_params(args: Args) -> SamplingParams:
    """Return the sampling parameters of a training rollout, in vLLM's names; custom generate functions get them too."""
    return _sampling_params(
        args,
        temperature=args.rollout_temperature,
        top_p=args.rollout_top_p,
        top_k=args.rollout_top_k,
        max_tokens=args.rollout_max_response_len,
    )


def eval_sampling_params(args: Args) -> SamplingParams:
    """Return the same for evaluation; an empty --eval-* flag means the value of the rollout."""

    return _sampling_params(
        args,
        temperature=_either(args.eval_temperature, args.rollout_temperature),
        top_p=_either(args.eval_top_p, args.rollout_top_p),
        top_k=_either(args.eval_top_k, args.rollout_top_k),
        max_tokens=_either(args.eval_max_response_len, args.rollout_max_response_len),
    )


def _either(value: Number | None, fallback: Number) -> Number:
    return fallback if value is None else value


async def generate(args: Args, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Add one completion to `sample.tokens`, in place. Custom generate functions are built on this."""
    (sample,) = await generate_group(args, [sample], sampling_params)
    return sample


async def generate_group(args: Args, samples: list[Sample], sampling_params: SamplingParams) -> list[Sample]:
    """Generate one completion for each sample, in place.

    Samples with equal tokens share one request, but not in --reference-mode. A "seed" among the sampling parameters is
    sent as it is. A sample of status aborted is continued: the tokens that it has count against max_tokens. While
    generation is being aborted (vime/rollout/abort_scope.py) samples come back aborted, with their tokens.
    """
    budgets = [_budget(args, sample, sampling_params) for sample in samples]
    first = samples[0].tokens
    # vLLM refuses n > 1 with greedy sampling: the n completions would be equal.
    may_share = len(samples) > 1 and sampling_params["temperature"] > 0 and not args.reference_mode
    may_share = may_share and len(set(budgets)) == 1 and budgets[0] > 0
    parts: list[list[Completion]] = [[] for _ in samples]
    images = samples[0].multimodal_inputs
    if may_share and all(sample.tokens == first and sample.multimodal_inputs == images for sample in samples):
        params, session_id = {**sampling_params, "max_tokens": budgets[0]}, samples[0].session_id
        client = engine_client(args)
        completions = await client.generate(first, params, n=len(samples), session_id=session_id, images=images)
        parts = [[completion] for completion in completions]
    copies = [sum(other.index == s.index for other in samples[:place]) for place, s in enumerate(samples)]
    await _in_parallel(
        [
            _finish(args, sample, part, {**sampling_params, "max_tokens": budget}, copy=copy)
            for sample, part, budget, copy in zip(samples, parts, budgets, copies, strict=True)
        ]
    )
    return samples


def _budget(args: Args, sample: Sample, sampling_params: SamplingParams) -> int:
    """Return how many tokens the completion may still get; not positive when there is no space for one."""
    done = sample.response_length if sample.status is SampleStatus.ABORTED else 0
    return min(int(sampling_params["max_tokens"]) - done, context_limit(args) - len(sample.tokens))


def use_engine_key(key: str) -> None:
    """Set the key that this process sends to the engines of its run. It is not kept in the configuration, which is
    written to files, nor in the environment, which programs started by a reward would inherit."""
    global _engine_key
    _engine_key = key


def engine_headers() -> dict[str, str]:
    """Return the headers that a plug-in's own HTTP request to the router needs; `engine_client` sends them by
    itself."""
    return {KEY_HEADER: _engine_key} if _engine_key else {}


def engine_client(args: Args) -> EngineClient:
    """Return the client of this run's routers; call it on the rollout loop."""
    ports = args.config.engine.router_ports
    if args.vllm_router_ip is None or not ports:
        raise ConfigError(
            "no router address: --vllm-router-ip and --vllm-router-port are empty. Start the engines first."
        )
    url, *others = (f"http://{args.vllm_router_ip}:{port}" for port in ports)
    if url not in _CLIENTS:
        per_engine = 1 if args.reference_mode else args.vllm_server_concurrency
        num_requests = per_engine * (args.rollout_num_engines or 1)
        _CLIENTS[url] = EngineClient(
            url,
            others=others,
            max_in_flight=-(-num_requests // args.num_rollout_workers),  # of each process that generates
            timeout_s=request_deadline_s(args.config),
            key=_engine_key,
        )
    return _CLIENTS[url]


def take_prompt_tokens() -> PromptTokens:
    """Return the prompt tokens of this process's requests since the last call. Any thread."""
    whole = PromptTokens()
    for client in _CLIENTS.values():
        taken, client.prompts = client.prompts, PromptTokens()
        whole.add(taken)
    return whole


def close_clients(timeout_s: float = 10.0) -> None:
    """Close the connections to every router; call it from outside the rollout loop."""
    rollout_loop().run(_close_clients(), name="connections to the router to close", timeout_s=timeout_s)


async def _close_clients() -> None:
    while _CLIENTS:
        _, client = _CLIENTS.popitem()
        await client.aclose()


async def _in_parallel(coroutines: Sequence[Coroutine[object, None, None]]) -> None:
    """Run all; the first failure cancels the others and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for coroutine in coroutines:
                tasks.create_task(coroutine)
    except BaseExceptionGroup as group:
        raise_first(group)


async def _finish(
    args: Args, sample: Sample, parts: list[Completion], params: SamplingParams, *, copy: int = 0
) -> None:
    """Ask until the engine ends the completion itself or generation is aborted, then write it into the sample.

    A weight update with --pause-mode abort ends requests early. Their tokens are kept and continued by the new weights
    when two versions in one completion are allowed; otherwise the completion is sampled again.
    """
    if params["max_tokens"] < 1:
        sample.status = SampleStatus.TRUNCATED
        return
    deadline_s = generate_deadline_s(args.config)
    try:
        async with asyncio.timeout(deadline_s if parts else None):
            while (not parts or parts[-1].finish_reason == "abort") and not is_aborting():
                if not may_mix(args):
                    parts.clear()
                parts.append(await _continue(args, sample, parts, params, copy=copy))
    except TimeoutError as error:
        raise WaitTimeoutError(
            f"sample {sample.index} to be finished after an abort", deadline_s, "vLLM", "Raise --generate-timeout-secs."
        ) from error
    if args.use_rollout_routing_replay:
        before = sample.rollout_routed_experts if sample.status is SampleStatus.ABORTED else None
        sample.rollout_routed_experts = join_routed_experts(parts, before)
    for part in parts:
        if part.token_ids:
            sample.append_response_tokens(part.token_ids, part.log_probs, versions=part.versions)
    sample.status = _status(parts[-1]) if parts else SampleStatus.ABORTED
    text = PendingText(sample.tokens[sample.prompt_length :], partial(decode_response, args.hf_checkpoint))
    sample.set_pending_text(text)


async def _continue(
    args: Args, sample: Sample, parts: list[Completion], params: SamplingParams, *, copy: int
) -> Completion:
    done = [token for part in parts for token in part.token_ids]
    rest = params["max_tokens"] - len(done)
    if rest < 1:
        return Completion(token_ids=(), log_probs=(), versions=(), finish_reason="length")
    prompt, params = [*sample.tokens, *done], {**params, "max_tokens": rest}
    if args.reference_mode and "seed" not in params:
        num_tokens = sample.response_length + len(done)
        params["seed"] = request_seed(args.rollout_seed, sample, num_tokens=num_tokens, copy=copy)
    images = sample.multimodal_inputs
    (completion,) = await engine_client(args).generate(prompt, params, session_id=sample.session_id, images=images)
    return completion


def _status(completion: Completion) -> SampleStatus:
    if completion.finish_reason not in FINISH_STATUS:
        raise EngineError(
            f"the engine ended a completion with {completion.finish_reason!r}, expected one of {sorted(FINISH_STATUS)}."
        )
    return FINISH_STATUS[completion.finish_reason]


def _sampling_params(args: Args, *, temperature: float, top_p: float, top_k: int, max_tokens: int) -> SamplingParams:
    params: SamplingParams = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    if top_k > 0:
        params["top_k"] = top_k
    if args.rollout_stop:
        params["stop"] = list(args.rollout_stop)
    if args.rollout_stop_token_ids:
        params["stop_token_ids"] = list(args.rollout_stop_token_ids)
    return params
