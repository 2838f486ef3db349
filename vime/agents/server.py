"""The server of sessions in a process that generates: on the rollout loop, one for all of its agents. On loopback, or
where --agent-listen says, for agents that run elsewhere: in mode streaming their sessions outlive the process."""

from __future__ import annotations

import asyncio
import base64
import contextvars
import hmac
import json
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.applications import Starlette

from vime.agents.task import AgentTask
from vime.backends.vllm_utils.reply_parser import make_reply_parser
from vime.config.agent_checks import host_and_port
from vime.config.deadlines import generate_deadline_s
from vime.config.parse import Args
from vime.protocols import SamplingParams
from vime.rollout.generation import engine_client, train_sampling_params
from vime.rollout.prompts import context_limit, load_tokenizer
from vime.rollout.request_priority import request_priority, set_request_priority
from vime.sessions.key_file import agent_key, key_path
from vime.sessions.offers import Offer, Offers
from vime.sessions.server import make_routes
from vime.sessions.service import Live, ReplyParser, Sessions, hash_of
from vime.sessions.splice import Message
from vime.sessions.store import AGENTS_ELSEWHERE, Budget, Call, Reply, SessionStore, State, keep_sessions
from vime.sessions.tokenizer import HfChatTokenizer
from vime.types import ConfigError, Sample
from vime.utils.http_server import HttpServer
from vime.utils.network import LOOPBACK
from vime.utils.waits import run_directory, waiting

logger = logging.getLogger(__name__)
DIRECTORY = AGENTS_ELSEWHERE.parent
"""Folder of a run with a SQLite file for each process that generates."""
KEPT_SESSIONS = 1024
"""How many sessions that have ended stay in the file at least; older ones are deleted."""
BACKLOG = 1024


class AgentServer:
    """Made on the rollout loop by `agent_server`. Mode streaming with --agent-listen: a session that an agent has
    claimed goes on after the death of the process that served it, when its group is issued again."""

    def __init__(self, args: Args, parse: ReplyParser) -> None:
        arguments = json.loads(args.apply_chat_template_kwargs or "{}")
        tokenizer = HfChatTokenizer(load_tokenizer(args.hf_checkpoint), arguments)
        self._outlives = args.agent_listen is not None and args.config.queue.has_ledger
        self.path = _run() / AGENTS_ELSEWHERE if self._outlives else _new_file()
        if self._outlives:
            keep_sessions(self.path)  # the driver has looked at versions, but a worker may start again without it
        self.sessions = Sessions(
            SessionStore(self.path),
            engine_client(args),
            tokenizer,
            parse,
            context_length=context_limit(args),
            sampling_params=train_sampling_params(args),
            idle_s=args.agent_timeout_secs,
        )
        self._timeout_s = generate_deadline_s(args.config)
        self._ended: deque[Live] = deque()  # claimed ones that may be needed after a restart
        self._ended_here: deque[Live] = deque()  # all others
        slots = args.rollout_batch_size * (1 + args.transferqueue_max_staleness)
        # one that has ended may wait for the others of its group, and is needed again after a restart
        self._most_ended = max(KEPT_SESSIONS, 2 * slots * args.n_samples_per_prompt)
        # of training, by group and sample: claimed ones without a group, and the newest of each sample
        self._kept: dict[tuple[int, int], Live] = {}
        self._newest: dict[tuple[int, int], Live] = {}
        model = Path(args.hf_checkpoint).name
        self.offers = Offers()
        if args.agent_listen is None:
            # nobody but this process makes sessions, so nobody is told the key that makes them
            self._admin_key = secrets.token_urlsafe(32)
            routes = make_routes(admin_key=self._admin_key, model=model)
            self._socket = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        else:
            self._admin_key = agent_key(key_path(args.config, _run()))
            routes = make_routes(admin_key=self._admin_key, model=model, offers=self.offers, claims_last=self._outlives)
            self._socket = _listening(args.agent_listen)
        app = Starlette(routes=routes)
        app.state.sessions = self.sessions
        self._root = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}"
        self._server = HttpServer(app, lifespan="off")
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read the sessions of an earlier process, which the driver has left in the file, and serve. Their agents may
        ask before their groups are issued."""
        await self.sessions.open()
        for live in self.sessions.recorded_sessions():
            session = live.session
            if session.key_hash != hash_of(self._key_of(session.id)):  # the agents' key is another one
                await self.sessions.delete(live)
                continue
            self._kept[session.group_index, session.index] = live
            live.context = _context_of(session.group_index)
            self.sessions.begin_again(live)  # its agent could not ask meanwhile
            self.offers.expect(live, patience_s=self.sessions.idle_s)
            if session.state is not State.OPEN:  # its group may be committed: then nobody asks for it again
                live.let_go()
                self._ended.append(live)
        # A context of its own: that of the group which happens to be the first would record every agent's requests as
        # its own, and end them when it ends.
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), context=contextvars.Context())

    async def begin(
        self, sample: Sample, budget: Budget, params: SamplingParams, *, evaluation: bool
    ) -> tuple[Live, AgentTask]:
        """Return a session for the sample, and what its agent is told: a new one, or the one that an agent elsewhere
        has claimed in an earlier attempt of the group."""
        if self._serving is not None and self._serving.done():
            self._serving.result()
        place = (sample.group_index, sample.index)
        live = None if evaluation else self._kept.get(place)
        if live is not None:
            await self.sessions.take_up(live)  # still kept, if this is cancelled meanwhile
            live = self._kept.pop(place, None)  # None: it became the oldest of many, and was deleted
        if live is None:
            session, key = await self.sessions.create(sample.group_index, sample.index, budget, self._key_of)
            live = self.sessions.by_id(session.id)
            live.context = _context_of(request_priority())
        else:
            self._ended = deque(each for each in self._ended if each is not live)
            session, key = live.session, self._key_of(live.session.id)
            logger.info(
                "session %s of sample %d, group %d goes on (%s, %d turns)",
                *(session.id, sample.index, sample.group_index, session.state, len(live.entries)),
            )
        if not evaluation:
            self._newest[place] = live
        live.sampling = dict(params)
        task = AgentTask(
            base_url=f"{self._root}/v1",
            anthropic_base_url=self._root,
            api_key=key,
            session_id=session.id,
            prompt=sample.prompt,
            label=sample.label,
            metadata=sample.metadata,
        )
        return live, task

    async def offer(self, live: Live, task: AgentTask, *, evaluation: bool, deadline_s: float) -> bool:
        """Return whether an agent elsewhere has claimed the session within `deadline_s`; the time in which the agent
        may ask nothing begins then."""
        budget = {
            "turns": live.session.budget.turns,
            "tokens": live.session.budget.tokens,
            "seconds": self.sessions.idle_s,
        }
        told = {
            "id": task.session_id,
            "key": task.api_key,
            "prompt": task.prompt,
            "label": task.label,
            "metadata": task.metadata,
            "evaluation": evaluation,
            "budget": budget,
        }
        offer = Offer(live, told, request_priority())
        if live.session.claim is None:
            is_claimed = await self.offers.offer(offer, deadline_s=deadline_s)
        else:
            await self.offers.renew(offer)
            is_claimed = True
        self.sessions.begin_again(live)
        return is_claimed

    def _key_of(self, session_id: str) -> str:
        """Return the session's key, which a claim that is repeated after a restart is told again: the file has its hash
        alone."""
        made = hmac.digest(self._admin_key.encode(), f"session {session_id}".encode(), "sha256")
        return base64.urlsafe_b64encode(made).decode().rstrip("=")

    async def turns_of(self, live: Live) -> None:
        """Wait until no turn of the session is under way: its agent may have ended without the last answer."""
        under_way = [known.task for known in live.asked if not known.task.done()]
        if under_way:
            with waiting("turns of an agent that has ended", "engine", deadline_s=self._timeout_s):
                await asyncio.wait(under_way, timeout=self._timeout_s)

    async def give_up(self, live: Live, reason: str) -> None:
        """Let the session fail, and end its turns under way."""
        for known in live.asked:
            known.task.cancel()
        await self.sessions.fail(live, reason, is_final=True)

    async def interrupt(self, live: Live) -> None:
        """Keep a session whose group was interrupted for the group's next attempt, when an agent has claimed it and it
        may outlive the attempt; else let it fail, also when the next attempt has begun already."""
        place = (live.session.group_index, live.session.index)
        if self._outlives and live.session.claim is not None and self._newest.get(place) is live:
            self._kept[place] = live
        else:
            await self.give_up(live, "its group is not wanted any more")
            await self.retire(live)

    async def retire(self, live: Live) -> None:
        """Note that the rows of the session were taken; the oldest of many is deleted."""
        live.let_go()
        ended, most = self._ended_here, KEPT_SESSIONS
        if self._outlives and live.session.claim is not None:
            ended, most = self._ended, self._most_ended
        ended.append(live)
        place = (live.session.group_index, live.session.index)
        if self._newest.get(place) is live:
            del self._newest[place]
        while len(ended) > most:
            oldest = ended.popleft()
            place = (oldest.session.group_index, oldest.session.index)
            if self._kept.get(place) is oldest:
                del self._kept[place]
            self.offers.forget(oldest)
            await self.sessions.delete(oldest)

    async def close(self) -> None:
        """End the server; what was recorded stays in its file."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        await self.sessions.close()


_SERVERS: list[AgentServer] = []
"""At most one. Owner: the rollout loop."""
_LOCK = asyncio.Lock()


async def agent_server(args: Args) -> AgentServer:
    """Return the server of this process; the first call starts it. Call it on the rollout loop."""
    async with _LOCK:
        if not _SERVERS:
            with ThreadPoolExecutor(1, thread_name_prefix="vime-agent-parser") as importing:
                parse = await asyncio.get_running_loop().run_in_executor(importing, _make_parser, args)
            server = AgentServer(args, parse)
            await server.open()
            _SERVERS.append(server)
        return _SERVERS[0]


def _context_of(priority: int) -> contextvars.Context:
    """Return the context of a session's turns. That of the caller has its group's record and abort scope."""
    context = contextvars.Context()
    context.run(set_request_priority, priority)
    return context


def _new_file() -> Path:
    """Return the path of a new file; files of processes of this machine that have ended are removed: a group that one
    of them had under way is generated again, by another agent."""
    directory, host = _run() / DIRECTORY, socket.gethostname()
    for old in directory.glob(f"{host}.*.sqlite"):
        pid = int(old.name.removeprefix(f"{host}.").split(".")[0])
        if not Path(f"/proc/{pid}").exists():
            for path in directory.glob(f"{old.name}*"):
                path.unlink(missing_ok=True)
    return directory / f"{host}.{os.getpid()}.{secrets.token_hex(3)}.sqlite"


def _run() -> Path:
    run = run_directory()
    assert run is not None, "every process of a run knows its directory"
    return run


def _listening(address: str) -> socket.socket:
    """Return the socket of --agent-listen."""
    host, port = host_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"--agent-listen {address}: cannot be listened on: {error}. Expected a free port of an address of the "
            "machine that generates. Choose another."
        ) from error


def _make_parser(args: Args) -> ReplyParser:
    """Return what reads completions. Without a parser of vLLM everything is content, and vLLM is not imported."""
    tokenizer = load_tokenizer(args.hf_checkpoint)
    if args.agent_tool_parser is None and args.agent_reasoning_parser is None:
        plain = HfChatTokenizer(tokenizer)
        return lambda _prompt, ids, _tools: Reply(content=plain.decode(ids, without_special=True))
    parse = make_reply_parser(tokenizer, tools=args.agent_tool_parser, reasoning=args.agent_reasoning_parser)

    def read(prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Sequence[Message]) -> Reply:
        found = parse(prompt_ids, token_ids, tools)
        calls = tuple(Call(id=number, name=name, arguments=given) for number, name, given in found.calls)
        return Reply(content=found.content, reasoning=found.reasoning, calls=calls)

    return read
