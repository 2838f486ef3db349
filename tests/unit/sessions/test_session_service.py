"""Retries, budgets, aborts and expiry of sessions, without HTTP and with an engine that is a list of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.helpers.chat_tokenizers import make_chat_tokenizer
from tests.helpers.converted import trained_rows
from tests.helpers.rollout_setup import make_args
from tests.helpers.session_server import plain_parser
from vime.rollout.exchanges import Completion
from vime.sessions.server import make_app
from vime.sessions.service import Ask, Refused, Sessions, member_samples
from vime.sessions.store import Budget, SessionStore, State
from vime.sessions.tokenizer import HfChatTokenizer
from vime.types import EngineLostError, SampleStatus, VersionSpan

TOKENIZER = HfChatTokenizer(make_chat_tokenizer("chatml"))
ASK = Ask(messages=[{"role": "user", "content": "q"}])


def completion(text: str, version: int = 0, reason: str = "stop") -> Completion:
    ids = TOKENIZER.encode(text)
    spans = (VersionSpan(version, 0, len(ids)),) if ids else ()
    return Completion(token_ids=ids, log_probs=[-0.5] * len(ids), versions=spans, finish_reason=reason)


class Engine:
    """Answers from a list; an error in it is raised. While `gate` is clear, requests wait."""

    def __init__(self, *answers: Completion | Exception) -> None:
        self.answers = list(answers)
        self.prompts: list[list[int]] = []
        self.limits: list[object] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(
        self, token_ids: Sequence[int], sampling_params: Mapping[str, object], *, n: int = 1, session_id: str = ""
    ) -> list[Completion]:
        self.prompts.append(list(token_ids))
        self.limits.append(sampling_params["max_tokens"])
        answer = self.answers.pop(0)
        await self.gate.wait()
        if isinstance(answer, Exception):
            raise answer
        return [answer]


def run(
    path: Path, story: Callable[[Sessions, Engine], Awaitable[None]], *answers: Completion | Exception, now: list[float]
) -> None:
    async def play() -> None:
        engine = Engine(*answers)
        sessions = Sessions(
            SessionStore(path / "sessions.sqlite"),
            engine,
            TOKENIZER,
            plain_parser(TOKENIZER, "<|im_end|>"),
            context_length=200,
            sampling_params={"temperature": 1.0, "max_tokens": 20},
            idle_s=100,
            clock=lambda: now[0],
        )
        await sessions.open()
        try:
            await story(sessions, engine)
        finally:
            await sessions.close()

    asyncio.run(asyncio.wait_for(play(), 60))


def test_an_aborted_completion_goes_on_where_it_was_and_keeps_both_versions(tmp_path: Path) -> None:
    async def story(sessions: Sessions, engine: Engine) -> None:
        session, _ = await sessions.create(0, 0, Budget())
        live = sessions.by_id(session.id)
        entry = await sessions.ask(live, ASK, digest="a")
        assert TOKENIZER.decode(entry.turn.token_ids) == "ab<|im_end|>"
        assert entry.turn.versions == (VersionSpan(1, 0, 1), VersionSpan(2, 1, 3))
        assert engine.prompts[1] == [*engine.prompts[0], *TOKENIZER.encode("a")]
        assert engine.limits == [20, 19]

    run(tmp_path, story, completion("a", 1, "abort"), completion("b<|im_end|>", 2), now=[0.0])


def test_retries_of_two_equal_requests_whose_answers_were_lost_get_one_each(tmp_path: Path) -> None:
    async def story(sessions: Sessions, engine: Engine) -> None:
        session, _ = await sessions.create(0, 0, Budget())
        live = sessions.by_id(session.id)
        engine.gate.clear()
        lost = [asyncio.create_task(sessions.ask(live, ASK, digest="a")) for _ in range(2)]
        while len(engine.prompts) < 2:
            await asyncio.sleep(0)
        for task in lost:
            task.cancel()  # the connections are gone, the turns are not
        again = [asyncio.create_task(sessions.ask(live, ASK, digest="a", retry_count=1)) for _ in range(2)]
        await asyncio.sleep(0)
        engine.gate.set()
        entries = await asyncio.gather(*again)
        assert sorted(entry.reply.content for entry in entries) == ["x", "y"]
        assert len(engine.prompts) == 2

    run(tmp_path, story, completion("x<|im_end|>"), completion("y<|im_end|>"), now=[0.0])


def test_an_engine_error_records_nothing_and_the_retry_samples(tmp_path: Path) -> None:
    async def story(sessions: Sessions, engine: Engine) -> None:
        session, _ = await sessions.create(0, 0, Budget(turns=1))
        live = sessions.by_id(session.id)
        with pytest.raises(EngineLostError):
            await sessions.ask(live, ASK, digest="a")
        entry = await sessions.ask(live, ASK, digest="a", retry_count=1)
        assert (entry.reply.content, len(live.entries)) == ("x", 1)

    run(tmp_path, story, EngineLostError("gone"), completion("x<|im_end|>"), now=[0.0])


def test_a_session_that_asks_nothing_has_failed_after_its_idle_time_also_for_a_new_process(tmp_path: Path) -> None:
    now = [0.0]
    made: list[str] = []

    async def story(sessions: Sessions, _: Engine) -> None:
        session, _key = await sessions.create(0, 0, Budget())
        made.append(session.id)
        await sessions.ask(sessions.by_id(session.id), ASK, digest="a")
        now[0] = 100.0
        assert await sessions.expire() == []
        now[0] = 100.5
        assert await sessions.expire() == [session.id]

    async def later(sessions: Sessions, _: Engine) -> None:
        live = sessions.by_id(made[0])
        assert (live.session.state, live.session.reason) == (State.FAILED, "it asked nothing for 100 s")
        with pytest.raises(Refused, match="asked nothing"):
            await sessions.ask(live, ASK, digest="b")
        (sample,) = member_samples(live.session, live.entries)
        assert (sample.status, sample.reward) == (SampleStatus.FAILED, None)

    run(tmp_path, story, completion("x<|im_end|>"), now=now)
    run(tmp_path, later, now=now)


def test_the_idle_time_of_a_session_begins_at_its_newest_turn_also_for_a_new_process(tmp_path: Path) -> None:
    now, made = [0.0], list[str]()

    async def story(sessions: Sessions, _: Engine) -> None:
        session, _key = await sessions.create(0, 0, Budget())
        made.append(session.id)
        for now[0] in (50.0, 80.0):
            await sessions.ask(sessions.by_id(session.id), ASK, digest=f"{now[0]}")

    async def later(sessions: Sessions, _: Engine) -> None:
        now[0] = 180.0  # 100 s after the turn at 80
        assert await sessions.expire() == []
        now[0] = 180.5
        assert await sessions.expire() == made

    run(tmp_path, story, completion("x<|im_end|>"), completion("y<|im_end|>"), now=now)
    run(tmp_path, later, now=now)


def test_budgets_of_tokens_and_seconds_end_a_session_and_cut_the_last_completion(tmp_path: Path) -> None:
    now = [0.0]

    async def story(sessions: Sessions, engine: Engine) -> None:
        session, _ = await sessions.create(0, 0, Budget(tokens=3))
        live = sessions.by_id(session.id)
        await sessions.ask(live, ASK, digest="a")
        assert engine.limits == [3]
        with pytest.raises(Refused, match="budget of 3 tokens"):
            await sessions.ask(live, ASK, digest="b")
        # What was recorded is answered all the same.
        assert (await sessions.ask(live, ASK, digest="a", retry_count=1)).turn.number == 0
        other, _ = await sessions.create(0, 1, Budget(seconds=5))
        now[0] = 5.0
        with pytest.raises(Refused, match="budget of 5 seconds"):
            await sessions.ask(sessions.by_id(other.id), ASK, digest="a")

    run(tmp_path, story, completion("abc", reason="length"), now=now)


def test_turns_that_run_at_the_same_time_share_the_budget_of_tokens(tmp_path: Path) -> None:
    async def story(sessions: Sessions, engine: Engine) -> None:
        session, _ = await sessions.create(0, 0, Budget(tokens=30))
        live = sessions.by_id(session.id)
        engine.gate.clear()
        asks = [asyncio.create_task(sessions.ask(live, ASK, digest=f"{number}")) for number in range(4)]
        while len(engine.prompts) < 2:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert engine.limits == [20, 10]  # 20 of the run; 10 are left, and nothing for the others until one ends
        engine.gate.set()
        done = await asyncio.gather(*asks, return_exceptions=True)
        # the first two used 20 and 5, so 5 came back for the third; the fourth waited in vain
        assert engine.limits == [20, 10, 5]
        assert [len(entry.turn.token_ids) for entry in live.entries] == [20, 5, 5]
        assert isinstance(done[3], Refused)
        assert (done[3].status, done[3].code, session.stopped) == (403, "budget_tokens", "budget of 30 tokens")
        assert live.reserved == {}

    answers = [completion("a" * length, reason="length") for length in (20, 5, 5)]
    run(tmp_path, story, *answers, now=[0.0])


def test_a_turn_that_fails_gives_back_what_it_had_reserved(tmp_path: Path) -> None:
    async def story(sessions: Sessions, engine: Engine) -> None:
        session, _ = await sessions.create(0, 0, Budget(tokens=20))
        live = sessions.by_id(session.id)
        engine.gate.clear()
        failing, waiting = [asyncio.create_task(sessions.ask(live, ASK, digest=digest)) for digest in "ab"]
        while not engine.prompts:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert engine.limits == [20]
        engine.gate.set()
        with pytest.raises(EngineLostError):
            await failing
        assert (await waiting).reply.content == "x"
        assert engine.limits == [20, 20]

    run(tmp_path, story, EngineLostError("gone"), completion("x<|im_end|>"), now=[0.0])


def test_branches_of_a_session_are_rows_of_one_sample_with_its_reward(tmp_path: Path) -> None:
    async def story(sessions: Sessions, _: Engine) -> None:
        for index, reward in ((2, 0.25), (1, 1.25)):
            session, _key = await sessions.create(4, index, Budget())
            live = sessions.by_id(session.id)
            await sessions.ask(live, ASK, digest="a")
            if index == 2:
                await sessions.ask(live, Ask(messages=[{"role": "user", "content": "search"}]), digest="b")
            await sessions.complete(live, reward)
        rows = sessions.samples(4)
        assert [(row.index, row.reward) for row in rows] == [(1, 1.25), (2, 0.25), (2, 0.25)]
        assert [row.metadata["session_row"] for row in rows] == [0, 0, 1]
        # two samples, rewards 1.25 and 0.25: deviations +-1/2, standard deviation sqrt(1/2)
        trained = trained_rows(make_args(), [rows], 0)[0]
        assert [row.reward for row in trained] == pytest.approx([0.5**0.5, -(0.5**0.5), -(0.5**0.5)], rel=1e-5)

    run(tmp_path, story, *(completion(f"{text}<|im_end|>") for text in "xyz"), now=[0.0])


def test_a_session_that_asks_nothing_is_ended_by_its_server_and_stays_failed_after_a_restart(tmp_path: Path) -> None:
    path, now = tmp_path / "sessions.sqlite", [0.0]

    async def made() -> Sessions:
        parse = plain_parser(TOKENIZER, "<|im_end|>")
        return Sessions(
            SessionStore(path), Engine(), TOKENIZER, parse,
            context_length=200, sampling_params={}, idle_s=0.05, clock=lambda: now[0],
        )  # fmt: skip

    async def play() -> None:
        app = make_app(made, admin_key="admin", model="tiny")
        async with app.router.lifespan_context(app):
            session, _key = await app.state.sessions.create(0, 0, Budget())
            now[0] = 1.0
            while session.state is State.OPEN:
                await asyncio.sleep(0.01)
        store = SessionStore(path)
        [(stored, _turns)] = await store.load()
        await store.close()
        assert (stored.state, stored.reason) == (State.FAILED, "it asked nothing for 0.05 s")

    asyncio.run(asyncio.wait_for(play(), 60))


def test_the_samples_of_two_members_are_a_group_that_can_be_stored(tmp_path: Path) -> None:
    async def story(sessions: Sessions, _: Engine) -> None:
        for index, reward in enumerate((0.0, 1.0)):
            session, _key = await sessions.create(7, index, Budget())
            live = sessions.by_id(session.id)
            first = await sessions.ask(live, ASK, digest="a")
            said = {"role": "assistant", "content": first.reply.content}
            more = [*(ASK.messages or []), said, {"role": "user", "content": "r"}]
            await sessions.ask(live, Ask(messages=more), digest="b")
            await sessions.complete(live, reward)
        rows = trained_rows(make_args(), [sessions.samples(7)], 0)[0]
        # Rewards 0 and 1: deviations -+1/2, standard deviation sqrt(1/2).
        assert [row.reward for row in rows] == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
        assert [int(row.loss_mask.sum()) for row in rows] == [4, 4]  # two turns of a letter and the end

    answers = [completion(f"{text}<|im_end|>") for text in "wxyz"]
    run(tmp_path, story, *answers, now=[0.0])
