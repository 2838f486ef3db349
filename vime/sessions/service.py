"""Sessions of agents: who may ask, what was said, and the samples that come out of it. No HTTP here."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import msgspec

from vime.sessions.recording import Turn, row_samples
from vime.sessions.splice import ChatTokenizer, Message, continuation
from vime.sessions.store import Budget, Entry, Reply, Session, SessionStore, State
from vime.types import Sample, SampleStatus, VersionSpan, VimeError
from vime.utils.waits import waiting

MOST_RESUMPTIONS = 64
"""How often one completion may be aborted by a pause of the engines and continued."""


class Completed(Protocol):
    """What is read of `vime.rollout.exchanges.Completion`."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def log_probs(self) -> Sequence[float]: ...
    @property
    def versions(self) -> Sequence[VersionSpan]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def cached_tokens(self) -> int: ...


class Generates(Protocol):
    """What is used of `vime.rollout.engine_client.EngineClient`."""

    async def generate(
        self, token_ids: Sequence[int], sampling_params: Mapping[str, object], *, n: int = 1, session_id: str = ""
    ) -> Sequence[Completed]: ...


ReplyParser = Callable[[Sequence[int], Sequence[int], Sequence[Message]], Reply]
"""(prompt ids, completion ids, tools) -> what the completion says."""


class Refused(VimeError):
    """A request that is answered with an HTTP status and a code; SDKs repeat 408, 409, 429 and 5xx, no others."""

    def __init__(self, status: int, code: str, message: str, details: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.details = status, code, dict(details or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request of any dialect: a conversation, or the tokens themselves."""

    messages: list[dict[str, object]] | None = None
    token_ids: tuple[int, ...] = ()
    tools: list[dict[str, object]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    follows: int | None = None  # the number of the turn whose conversation comes before `messages`
    inherits_tools: bool = False  # those of that turn are meant, and not sent again


@dataclass(slots=True)
class Asked:
    """A request whose turn is under way or recorded, as retries look for it."""

    digest: str
    idempotency_key: str
    claimed: int
    task: asyncio.Future[Entry]
    is_lost: bool = False  # its client went away before it had the whole answer, and nobody has asked again


@dataclass(slots=True)
class Live:
    session: Session
    entries: list[Entry] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    next_number: int = 0
    sampling: dict[str, object] | None = None  # of this session; None: as all
    context: contextvars.Context | None = None  # of its turns; None: that of the first who asks
    reserved: dict[asyncio.Future[None], int] = field(default_factory=dict)  # what each turn under way may sample
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # set when the session is not open any more
    taken: tuple[int, int] | None = None  # turns and sampled tokens of one that holds its entries no longer

    def counts(self) -> tuple[int, int]:
        """Return how many turns and sampled tokens it has."""
        return self.taken or (len(self.entries), sum(len(entry.turn.token_ids) for entry in self.entries))

    def let_go(self) -> None:
        """Hold what was said no longer, of a session that has ended and whose rows nobody asks for. Its file has it."""
        self.taken = self.counts()
        self.entries, self.asked = [], []

    def tokens_left(self) -> int | None:
        """Return what neither a recorded turn nor one under way has of the budget; None: there is no limit."""
        limit = self.session.budget.tokens
        if limit is None:
            return None
        return limit - sum(len(entry.turn.token_ids) for entry in self.entries) - sum(self.reserved.values())


class Sessions:
    """The sessions of one server, made on its event loop by `open`. `idle_s`: a session that asks nothing for so long
    has failed. `sampling_params` are the run's: a request may shorten a completion and give stop strings, nothing
    else, because the trainer's log-probabilities assume the run's temperature."""

    def __init__(
        self,
        store: SessionStore,
        engine: Generates,
        tokenizer: ChatTokenizer,
        parse: ReplyParser,
        *,
        context_length: int,
        sampling_params: Mapping[str, object],
        idle_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._engine, self._tokenizer, self._parse = store, engine, tokenizer, parse
        self._context_length, self._sampling, self._clock = context_length, dict(sampling_params), clock
        self.idle_s = idle_s
        self._live: dict[str, Live] = {}
        self._by_key: dict[str, Live] = {}
        self._tasks: set[asyncio.Task[Entry]] = set()

    async def open(self) -> None:
        """Read what an earlier process recorded."""
        for session, entries in await self._store.load():
            live = Live(session, entries, next_number=max((entry.turn.number + 1 for entry in entries), default=0))
            for entry in entries:
                done: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()
                done.set_result(entry)
                live.asked.append(Asked(entry.digest, entry.idempotency_key, entry.claimed, done, entry.is_lost))
            if session.state is not State.OPEN:
                live.ended.set()
            self._live[session.id] = self._by_key[session.key_hash] = live

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._store.close()

    async def create(
        self, group_index: int, index: int, budget: Budget, key_of: Callable[[str], str] | None = None
    ) -> tuple[Session, str]:
        """Return a new session and its key, which is kept as a hash only. `key_of`: the key of a session by its id;
        None: a random one."""
        session_id, now = secrets.token_hex(8), self._clock()
        key = secrets.token_urlsafe(32) if key_of is None else key_of(session_id)
        session = Session(
            id=session_id,
            key_hash=hash_of(key),
            group_index=group_index,
            index=index,
            budget=budget,
            created=now,
            last_asked=now,
        )
        await self._store.put_session(session)
        self._live[session.id] = self._by_key[session.key_hash] = Live(session)
        return session, key

    async def take_up(self, live: Live) -> None:
        """Hold again what was said in a session that was let go."""
        if live.taken is not None:
            live.entries, live.taken = await self._store.turns(live.session.id), None

    def recorded_sessions(self) -> list[Live]:
        """Return every session, in the order in which they were made."""
        return sorted(self._live.values(), key=lambda live: live.session.created)

    async def note_claim(self, live: Live, key: str) -> None:
        """Note which request an agent elsewhere got the session with, before it is told. Each repeat writes again: an
        earlier write may have failed, or not be done."""
        if live.session.claim is None:
            live.session.claim = key
        await self._store.put_session(live.session)

    def by_key(self, key: str) -> Live:
        live = self._by_key.get(hash_of(key))
        if live is None:
            raise Refused(401, "unknown_key", "no session has this key. POST /v1/sessions gives one.")
        return live

    def by_id(self, session_id: str) -> Live:
        live = self._live.get(session_id)
        if live is None:
            raise Refused(404, "unknown_session", f"there is no session {session_id[:40]!r}")
        return live

    async def ask(self, live: Live, ask: Ask, *, digest: str, retry_count: int = 0, idempotency_key: str = "") -> Entry:
        """Return the turn that answers this request, of a caller who does not go away."""
        asked = await self.find(live, ask, digest=digest, retry_count=retry_count, idempotency_key=idempotency_key)
        return await self.answer(live, asked)

    async def find(
        self, live: Live, ask: Ask, *, digest: str, retry_count: int = 0, idempotency_key: str = ""
    ) -> Asked:
        """Return the request whose turn answers this one: a recorded one, one under way, or a new one.

        A retry (`retry_count` at least 1) is answered with the newest turn of the same body that no retry of this count
        has had: two equal requests whose responses were both lost get one each. An answer that is known to be `lost`
        goes to the next request of the same body, whatever its headers say: nobody has seen that completion. A caller
        who goes away does not stop the turn: it will ask again.
        """
        known = self._recorded(live, digest, retry_count, idempotency_key)
        if known is None:
            before = (live.session.state, live.session.stopped)
            try:
                self._check(live)
            except Refused:
                if (live.session.state, live.session.stopped) != before:
                    await self._store.put_session(live.session)
                raise
            task = asyncio.create_task(self._turn(live, ask, digest, idempotency_key), context=live.context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            known = Asked(digest, idempotency_key, retry_count, task)
            live.asked.append(known)
        return known

    async def answer(self, live: Live, asked: Asked) -> Entry:
        """Return the turn when it is recorded."""
        try:
            entry = await asyncio.shield(asked.task)
        except Exception:
            if asked in live.asked:
                live.asked.remove(asked)  # nothing was recorded: a retry samples anew
            raise
        await self._note(live, asked, entry)
        return entry

    async def lose(self, live: Live, asked: Asked) -> None:
        """Note that the answer did not arrive whole."""
        asked.is_lost = True
        if asked.task.done() and not asked.task.cancelled() and asked.task.exception() is None:
            await self._note(live, asked, asked.task.result())  # else `answer` does it, which waits for the turn

    async def _note(self, live: Live, asked: Asked, entry: Entry) -> None:
        """Write what the turn's record does not say yet about those who asked for it."""
        known = (asked.claimed, asked.idempotency_key, asked.is_lost)
        if known != (entry.claimed, entry.idempotency_key, entry.is_lost) and live.session.id in self._live:
            entry.claimed, entry.idempotency_key, entry.is_lost = known
            await self._store.put_turn(live.session.id, entry)

    def _recorded(self, live: Live, digest: str, retry_count: int, idempotency_key: str) -> Asked | None:
        same = [known for known in live.asked if known.digest == digest]
        lost = [known for known in same if known.is_lost]
        found: list[Asked] = []
        if idempotency_key:
            found = [known for known in live.asked if known.idempotency_key == idempotency_key]
            if found and found[0].digest != digest:
                raise Refused(422, "idempotency_key_reused", "this Idempotency-Key came with another body")
        elif retry_count:
            found = lost or [known for known in same if known.claimed < retry_count] or same
        for known in (found or lost)[-1:]:
            known.claimed = max(known.claimed, retry_count)
            known.idempotency_key = idempotency_key or known.idempotency_key
            known.is_lost = False
            return known
        return None

    def _check(self, live: Live) -> None:
        """Refuse a new turn of a session that has ended or has used its budget."""
        session, budget = live.session, live.session.budget
        self._expire(live)
        if session.state is not State.OPEN:
            raise Refused(
                403, "session_ended", f"the session is {session.state}: {session.reason or 'it was completed'}"
            )
        num_turns = len(live.asked)
        num_tokens = sum(len(entry.turn.token_ids) for entry in live.entries)
        age_s = self._clock() - session.created
        for name, used, limit in (
            ("turns", num_turns, budget.turns),
            ("tokens", num_tokens, budget.tokens),
            ("seconds", age_s, budget.seconds),
        ):
            if limit is not None and used >= limit:
                raise self._used_up(live, name, limit)

    def _used_up(self, live: Live, name: str, limit: float) -> Refused:
        """Note in the session that this budget ended it, and return the refusal."""
        live.session.stopped = live.session.stopped or f"budget of {limit:g} {name}"
        return Refused(403, f"budget_{name}", f"the session has used its budget of {limit:g} {name}")

    def _expire(self, live: Live) -> None:
        session = live.session
        idle_s = self.idle_for(live)
        is_busy = any(not known.task.done() for known in live.asked)
        if session.state is State.OPEN and idle_s > self.idle_s and not is_busy:
            session.state, session.reason = State.FAILED, f"it asked nothing for {self.idle_s:g} s"
            live.ended.set()

    async def expire(self) -> list[str]:
        """End sessions that ask nothing any more; returns their ids."""
        ended = []
        for live in list(self._live.values()):
            was = live.session.state
            self._expire(live)
            if live.session.state is not was:
                await self._store.put_session(live.session)
                ended.append(live.session.id)
        return ended

    async def _turn(self, live: Live, ask: Ask, digest: str, idempotency_key: str) -> Entry:
        live.session.last_asked = self._clock()
        messages = ask.messages
        if messages is not None and ask.follows is not None:
            before = self.recorded(live, ask.follows)
            messages = [*(before.messages or []), message_of(before.reply), *messages]
            ask = replace(ask, tools=before.tools) if ask.inherits_tools else ask
        prompt = list(ask.token_ids) if messages is None else self._prompt(live, messages, ask.tools)
        async with self._reserved(live, self._most(live, prompt, ask)) as most:
            turn = await self._generate(live, prompt, ask, most)
            entry = Entry(
                turn=turn,
                digest=digest,
                idempotency_key=idempotency_key,
                messages=messages,
                tools=ask.tools,
                reply=Reply() if messages is None else self._parse(prompt, turn.token_ids, ask.tools),
                created=self._clock(),
            )
            if live.session.id not in self._live:
                raise Refused(404, "unknown_session", "the session was deleted")
            live.session.last_asked = entry.created
            await self._store.put_turn(live.session.id, entry)
            live.entries.append(entry)
        return entry

    @contextlib.asynccontextmanager
    async def _reserved(self, live: Live, most: int) -> AsyncIterator[int]:
        """Reserve the tokens that a turn may sample, and yield how many: `most`, or what is left of the budget.

        When other turns have reserved all that is left, it waits until one of them ends: they seldom use all of it.
        """
        while (left := live.tokens_left()) is not None and left < 1:
            if not live.reserved:
                refused = self._used_up(live, "tokens", live.session.budget.tokens or 0)
                await self._store.put_session(live.session)
                raise refused
            with waiting("tokens that other turns of the session have reserved", "engine", deadline_s=None):
                await asyncio.wait(list(live.reserved), return_when=asyncio.FIRST_COMPLETED)
        ended = asyncio.get_running_loop().create_future()
        live.reserved[ended] = most if left is None else min(most, left)
        try:
            yield live.reserved[ended]
        finally:
            del live.reserved[ended]
            ended.set_result(None)

    def recorded(self, live: Live, number: int) -> Entry:
        """Return a recorded turn that has messages."""
        for entry in live.entries:
            if entry.turn.number == number and entry.messages is not None:
                return entry
        raise unknown_response(number)

    def _prompt(self, live: Live, messages: list[dict[str, object]], tools: list[dict[str, object]]) -> list[int]:
        """Return the recorded tokens of the longest conversation that `messages` goes on with and what follows; or the
        rendered messages, which begin a branch."""
        asked = [canonical(message) for message in messages]
        best: Entry | None = None
        longest = 0
        for entry in reversed(live.entries):  # of equal ones the newest
            if entry.messages is None or not longest <= len(entry.messages) < len(asked) - 1 or entry.tools != tools:
                continue
            said = [canonical(message) for message in [*entry.messages, message_of(entry.reply)]]
            if asked[: len(said)] == said:
                best, longest = entry, len(said)
        if best is not None and best.turn.token_ids:
            new = messages[longest:]
            reply, last_id = message_of(best.reply), best.turn.token_ids[-1]
            following = continuation(self._tokenizer, messages[: longest - 1], reply, new, tools, last_id)
            if following is not None:
                return [*best.turn.sequence, *following]
        try:
            return self._tokenizer.encode(self._tokenizer.render(messages, tools, asks=True))
        except Exception as error:  # boundary: a chat template is a program of others and raises anything
            raise Refused(400, "template", f"the chat template refused the messages: {error}") from error

    def count(self, live: Live, ask: Ask) -> int:
        """Return how many tokens the prompt would have; nothing is recorded."""
        return len(self._prompt(live, ask.messages or [], ask.tools))

    def _most(self, live: Live, prompt: list[int], ask: Ask) -> int:
        """Return how many tokens the request, the run and the context allow; Refused when the context is full."""
        room = self._context_length - len(prompt)
        if room < 1:
            raise Refused(
                400, "context_length_exceeded", f"{len(prompt)} tokens; the context has {self._context_length}"
            )
        limits = [ask.max_tokens, self._sampling_of(live).get("max_tokens")]
        return max(1, min([room, *(cast("int", limit) for limit in limits if limit is not None)]))

    def _sampling_of(self, live: Live) -> dict[str, object]:
        return self._sampling if live.sampling is None else live.sampling

    async def _generate(self, live: Live, prompt: list[int], ask: Ask, most: int) -> Turn:
        """Generate until the completion ends for another reason than a pause of the engines."""
        sampling = self._sampling_of(live)
        ids: list[int] = []
        log_probs: list[float] = []
        spans: list[VersionSpan] = []
        cached: list[int] = []
        for _ in range(MOST_RESUMPTIONS):
            params = {**sampling, "max_tokens": most - len(ids)} | ({"stop": list(ask.stop)} if ask.stop else {})
            (part,) = await self._engine.generate([*prompt, *ids], params, session_id=live.session.id)
            spans += [VersionSpan(span.version, span.start + len(ids), span.end + len(ids)) for span in part.versions]
            ids += part.token_ids
            cached.append(part.cached_tokens)
            log_probs += part.log_probs
            if part.finish_reason != "abort" or len(ids) >= most:
                break
        else:
            raise Refused(503, "aborted", f"the engines aborted the completion {MOST_RESUMPTIONS} times")
        number, live.next_number = live.next_number, live.next_number + 1
        return Turn(
            number=number,
            prompt_ids=tuple(prompt),
            token_ids=tuple(ids),
            log_probs=tuple(log_probs),
            versions=tuple(spans),
            finish_reason="length" if part.finish_reason == "abort" else part.finish_reason,
            cached_tokens=cached[0],
        )

    async def complete(self, live: Live, reward: float | None) -> None:
        """End the session with its reward; None: somebody else will score it. The same again is accepted; another one
        is refused."""
        session = live.session
        self._expire(live)
        if session.state is State.COMPLETE and session.reward == reward:
            return
        if session.state is not State.OPEN:
            raise Refused(403, "session_ended", f"the session is {session.state} already")
        if any(not known.task.done() for known in live.asked):
            raise Refused(409, "turn_under_way", "a turn of this session is still under way")
        if not any(entry.turn.token_ids for entry in live.entries):
            raise Refused(403, "no_turns", "the session has no turn to reward; let it fail instead")
        session.state, session.reward = State.COMPLETE, reward
        live.ended.set()
        await self._store.put_session(session)

    async def fail(self, live: Live, reason: str, *, is_final: bool = False) -> None:
        """Let the session fail. `is_final`: also one that has its reward already, or another reason."""
        if live.session.state is State.COMPLETE and not is_final:
            raise Refused(403, "session_ended", "the session is complete already")
        live.session.state, live.session.reason = State.FAILED, reason
        live.ended.set()
        await self._store.put_session(live.session)

    def idle_for(self, live: Live) -> float:
        """Return for how many seconds the session has asked nothing."""
        return self._clock() - live.session.last_asked

    def begin_again(self, live: Live) -> None:
        """Count the time in which the session asks nothing from now on: only now has it an agent."""
        live.session.last_asked = self._clock()

    async def delete(self, live: Live) -> None:
        if live.session.state is State.OPEN:
            live.session.state, live.session.reason = State.FAILED, "it was deleted"
            live.ended.set()
        self._live.pop(live.session.id, None)
        self._by_key.pop(live.session.key_hash, None)
        await self._store.delete(live.session.id)

    def samples(self, group_index: int) -> list[Sample]:
        """Return the rows of a group as `member_samples` makes them, those of one session side by side: they have its
        index, and count as one sample."""
        members = [live for live in self._live.values() if live.session.group_index == group_index]
        members.sort(key=lambda live: live.session.index)
        return [row for live in members for row in member_samples(live.session, live.entries)]


def member_samples(session: Session, entries: Sequence[Entry], base: Sample | None = None) -> list[Sample]:
    """Return a sample for each branch of a finished session, all with its reward and index, and with prompt, label and
    metadata of `base`. A session that has failed gives one sample without a completion and reward, status FAILED: never
    a zero."""
    base = Sample() if base is None else Sample.from_dict(base.to_dict())
    base.group_index, base.index, base.session_id = session.group_index, session.index, session.id
    base.reward = session.reward
    if session.state is not State.COMPLETE:
        base.status, base.reward = SampleStatus.FAILED, None
        base.metadata["session_reason"] = session.reason or "it has not ended"
        return [base]
    rows = row_samples(sorted((entry.turn for entry in entries), key=lambda turn: turn.number), base)
    for row in rows:
        if session.stopped:
            row.status = SampleStatus.TRUNCATED
            row.metadata["session_reason"] = session.stopped
    return rows


def unknown_response(name: object) -> Refused:
    """What Anthropic's SDK answers with the whole conversation, because of the details."""
    message = f"the session has no recorded response {name!r:.60}"
    return Refused(404, "unknown_response", message, {"error_code": "thread_not_found"})


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def message_of(reply: Reply) -> dict[str, object]:
    """Return the reply as chat templates read it: arguments of calls are objects where they are JSON."""
    message: dict[str, object] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": parsed_arguments(call.arguments)},
            }
            for call in reply.calls
        ]
    return message


def parsed_arguments(text: object) -> object:
    """Return the arguments of a call as an object; text that is no JSON stays text, and so does what could not be
    recorded (NaN, halves of pairs of surrogates, integers of more than 64 bits)."""
    try:
        parsed: object = msgspec.json.decode(text) if isinstance(text, str) else text
        msgspec.msgpack.encode(parsed)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return text
    return parsed


def canonical(message: Mapping[str, object]) -> tuple[object, ...]:
    """Return what makes two messages the same for a client that sends them back: its reasoning may be gone. Calls as
    JSON: there 1 is another argument than true."""
    calls = cast("Sequence[Mapping[str, Mapping[str, object]]]", message.get("tool_calls") or ())
    made = [[call["function"]["name"], call["function"]["arguments"]] for call in calls]
    return (
        message.get("role"),
        message.get("content") or "",
        message.get("tool_call_id") or "",
        json.dumps(made, sort_keys=True) if made else "",
    )
