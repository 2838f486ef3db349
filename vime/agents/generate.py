"""The generate function of runs with an agent: a session, the agent, and the rows of what was sampled for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from vime.agents.environment import play
from vime.agents.server import AgentServer, agent_server
from vime.agents.task import AgentFailed, AgentTask, begin_function, run_command, run_function
from vime.config.deadlines import generate_function_deadline_s, rollout_deadline_s
from vime.config.parse import Args
from vime.protocols import SamplingParams
from vime.rollout.plugins import plugin
from vime.rollout.prompts import decode_response
from vime.rollout.sample_rows import TURNS
from vime.sessions.recording import parents
from vime.sessions.service import Live, Refused, member_samples, message_of
from vime.sessions.store import Budget, Entry, State
from vime.types import PendingText, Sample, SampleStatus
from vime.utils.waits import AGENT, waiting

logger = logging.getLogger(__name__)


async def generate(
    args: Args, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> list[Sample]:
    """Return the rows of the agent's session: one of a linear agent, one more for each branch; or the sample with
    status failed and the reason in its metadata. With --agent-listen a sample that no agent claims is returned as
    aborted: it is issued again.

    Waits for: with --agent-listen an agent that claims it, --rollout-timeout-secs; then the agent,
    --agent-timeout-secs. A reward is what the agent gave with `complete`, or what its function returned; without one
    the run's reward function is asked.
    """
    server = await agent_server(args)
    budget = Budget(turns=args.agent_max_turns, tokens=args.agent_max_tokens)
    live, task = await server.begin(sample, budget, sampling_params, evaluation=evaluation)
    agent = f"the agent of sample {sample.index}, group {sample.group_index}, to end"
    try:
        reward = None
        if args.agent_listen is None:
            reward = await _run(args, server, live, task, agent)
        elif await server.offer(live, task, evaluation=evaluation, deadline_s=rollout_deadline_s(args.config)):
            await _end_elsewhere(args, server, live, agent)
        else:
            await server.give_up(live, "no agent has claimed it")
            await server.retire(live)
            sample.status = SampleStatus.ABORTED
            return [sample]
        await _complete(server, live, reward)
    except (AgentFailed, Refused) as error:
        await server.give_up(live, str(error))
    except BaseException:
        await server.interrupt(live)
        raise
    rows = member_samples(live.session, live.entries, base=sample)
    for row in rows:
        if row.status is not SampleStatus.FAILED:
            decode = partial(decode_response, args.hf_checkpoint)
            row.set_pending_text(PendingText(row.tokens[row.prompt_length :], decode))
    if rows[-1].status is not SampleStatus.FAILED and (rows[-1].reward is None or args.group_rm):
        rows[-1].metadata[TURNS] = _turns(args, live.entries)
    await server.retire(live)
    return rows


def _turns(args: Args, entries: Sequence[Entry]) -> list[dict[str, object]]:
    """Return what was said in all rows of a session, in its order, as JSON. Each turn has the messages that are new
    since the turn that it goes on with, and all of its conversation when it goes on with none."""
    entries = sorted(entries, key=lambda entry: entry.turn.number)
    turns: list[dict[str, object]] = []
    for entry, parent in zip(entries, parents([entry.turn for entry in entries]), strict=True):
        before = None if parent is None else entries[parent]
        num_known = 0 if before is None or before.messages is None else len(before.messages) + 1  # and the reply
        reply = message_of(entry.reply)
        if entry.messages is None:  # it was asked as tokens
            reply["content"] = decode_response(args.hf_checkpoint, entry.turn.token_ids)
        turns.append(
            {
                "number": entry.turn.number,
                "continues": None if before is None else before.turn.number,
                "messages": (entry.messages or [])[num_known:],
                "reply": reply,
                "finish_reason": entry.turn.finish_reason,
                "num_tokens": len(entry.turn.token_ids),
                "versions": entry.versions,
            }
        )
    return turns


async def _run(args: Args, server: AgentServer, live: Live, task: AgentTask, wait: str) -> float | None:
    timeout_s = args.agent_timeout_secs
    if args.agent_command:
        with waiting(wait, AGENT, deadline_s=timeout_s):
            await run_command(args.agent_command, task, timeout_s=timeout_s)
            return None
    function, environment = plugin(args, "agent_function"), plugin(args, "environment")
    if environment is not None:
        function = partial(play, environment)
    assert function is not None, "check_agents wants one of the four"
    # half of what is left: the function itself, and what follows it, must end before the deadline of this one
    patience_s = (generate_function_deadline_s(args.config) - timeout_s) / 2
    call = await begin_function(function, task, patience_s=patience_s)
    server.sessions.begin_again(live)
    with waiting(wait, AGENT, deadline_s=timeout_s):
        return await run_function(call, timeout_s=timeout_s)


async def _end_elsewhere(args: Args, server: AgentServer, live: Live, wait: str) -> None:
    """Wait until the agent that claimed the session ends it; AgentFailed after --agent-timeout-secs."""
    timeout_s = args.agent_timeout_secs
    try:
        with waiting(wait, AGENT, deadline_s=timeout_s):
            async with asyncio.timeout(timeout_s):
                await live.ended.wait()
    except TimeoutError:
        if live.ended.is_set():  # at the last moment: its agent was told that it counts
            return
        session, idle_s = live.session, server.sessions.idle_for(live)
        reason = (
            f"its agent did not end it within {timeout_s:g} s (--agent-timeout-secs), and asked nothing for the last "
            f"{idle_s:.0f} s"
        )
        logger.warning("session %s, sample %d of group %d: %s", session.id, session.index, session.group_index, reason)
        raise AgentFailed(reason) from None


async def _complete(server: AgentServer, live: Live, reward: float | None) -> None:
    """End the session of an agent that has ended; it may have said its reward itself."""
    await server.turns_of(live)
    session = live.session
    if session.state is State.FAILED:
        raise AgentFailed(session.reason or "it said that it failed")
    if session.state is State.OPEN or reward is not None:
        await server.sessions.complete(live, reward)
