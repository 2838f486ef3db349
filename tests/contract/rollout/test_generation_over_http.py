"""Generation against a scripted engine over real HTTP: what is sent, what becomes of the answer, what is retried."""

import asyncio

import pytest

from tests.helpers.rollout_setup import make_args
from tests.helpers.scripted_engine import Failure, Hang, Held, Reply, ScriptedEngine
from vime.rollout import engine_client
from vime.rollout.abort_scope import AbortScope
from vime.rollout.engine_client import EngineClient
from vime.rollout.generation import close_clients, generate, generate_group, train_sampling_params
from vime.rollout.loops import rollout_loop
from vime.rollout.seeds import request_seed
from vime.types import EngineError, EngineLostError, Sample, SampleStatus, VersionSpan, WaitTimeoutError
from vime.utils.http import HttpFailure

A, B, EOS, THINK, END_THINK = 5, 6, 2, 3, 4


@pytest.fixture
def ask(model_dir, monkeypatch):
    """ask(engine, samples, *flags): run generate_group as a round would."""
    monkeypatch.setattr(engine_client, "LONGEST_BACKOFF_S", 0.01)

    def run(engine, samples, *flags, function=generate_group):
        args = make_args(
            "--hf-checkpoint", model_dir, "--vllm-router-ip", "127.0.0.1", "--vllm-router-port", engine.port,
            "--rollout-max-response-len", 8, "--generate-timeout-secs", 20, *flags,
        )  # fmt: skip
        return rollout_loop().run(
            function(args, samples, train_sampling_params(args)), name="test generation", timeout_s=30
        )

    yield run
    close_clients()


def prompt(index=0, tokens=(1, A)):
    return Sample(group_index=3, index=index, session_id="group-3", prompt="a", tokens=list(tokens))


def test_a_group_is_one_request_and_each_answer_becomes_a_whole_sample(ask):
    def script(request):
        return Reply(token_ids=[THINK, A, END_THINK, B, EOS], version="7", log_prob=-0.25 * (request.sample + 1))

    with ScriptedEngine(script) as engine:
        samples = ask(engine, [prompt(0), prompt(1)], "--rollout-stop-token-ids", 9)
        (body,) = engine.requests
    assert body["token_ids"] == [1, A]
    assert body["sampling_params"] == {
        "n": 2, "temperature": 1.0, "top_p": 1.0, "max_tokens": 8, "logprobs": 0, "detokenize": False,
        "stop_token_ids": [9],
    }  # fmt: skip
    assert "seed" not in body["sampling_params"]  # kills vLLM's CPU engine with chunked prefill
    for number, sample in enumerate(samples):
        assert sample.tokens == [1, A, THINK, A, END_THINK, B, EOS]
        assert (sample.response_length, sample.loss_mask, sample.status) == (5, [1] * 5, SampleStatus.COMPLETED)
        assert sample.rollout_log_probs == [-0.25 * (number + 1)] * 5
        assert sample.response == "<think>a</think>b"  # thinking stays, the end marker goes
        assert (sample.weight_versions, sample.policy_version) == ([7], 7)


def test_in_reference_mode_each_answer_is_a_request_with_its_own_seed_one_at_a_time(ask):
    samples, twins = [prompt(12), prompt(13)], [prompt(14), prompt(14)]
    flags = ("--reference-mode", "--rollout-seed", 42)
    with ScriptedEngine(lambda _: Reply(token_ids=[A, EOS]), answer_s=0.05) as engine:
        ask(engine, samples, *flags)
        ask(engine, [prompt(13)], *flags)  # the second one alone, as a custom generate function asks
        ask(engine, samples[:1], *flags)  # the first one goes on after its two tokens
        ask(engine, twins, *flags)
        assert engine.most_at_once == 1
    assert [body["sampling_params"]["n"] for body in engine.requests] == [1] * 6
    twelve, thirteen, again, turn, *drawn_apart = (body["sampling_params"]["seed"] for body in engine.requests)
    assert twelve == request_seed(42, prompt(12), num_tokens=0)
    assert thirteen == again == request_seed(42, prompt(13), num_tokens=0)
    assert len({twelve, thirteen, turn, *drawn_apart}) == 5


def test_a_seed_of_the_caller_is_sent_as_it_is(ask):
    async def with_seed(args, sample, params):
        return await generate(args, sample, {**params, "seed": 7})

    with ScriptedEngine(lambda _: Reply(token_ids=[EOS])) as engine:
        ask(engine, prompt(), "--reference-mode", function=with_seed)
    assert engine.requests[0]["sampling_params"]["seed"] == 7


def test_version_spans_are_kept_and_default_means_the_initial_weights(ask):
    spans = [("default", 0, 2), ("1", 2, 3)]
    with ScriptedEngine(lambda _: Reply(token_ids=[A, A, B], finish_reason="length", spans=spans)) as engine:
        (sample,) = ask(engine, [prompt()])
    assert sample.token_policy_versions == [VersionSpan(0, 0, 2), VersionSpan(1, 2, 3)]
    assert sample.status is SampleStatus.TRUNCATED


def test_stop_strings_ask_for_detokenization(ask):
    with ScriptedEngine(lambda _: Reply(token_ids=[B, EOS])) as engine:
        ask(engine, [prompt()], "--rollout-stop", "b", "##")
    params = engine.requests[0]["sampling_params"]
    assert (params["stop"], params["detokenize"]) == (["b", "##"], True)


def test_the_answer_never_asks_for_more_than_the_context_holds(ask):
    with ScriptedEngine(lambda _: Reply(token_ids=[EOS])) as engine:
        ask(engine, [prompt(tokens=[1] + [A] * 27)])  # 28 of 32 positions are taken
        full = ask(engine, [prompt(tokens=[1] + [A] * 31)])
    assert [body["sampling_params"]["max_tokens"] for body in engine.requests] == [4]
    assert full[0].status is SampleStatus.TRUNCATED


def test_samples_that_differ_are_asked_one_by_one(ask):
    with ScriptedEngine(lambda request: Reply(token_ids=[request.token_ids[-1], EOS])) as engine:
        samples = ask(engine, [prompt(0, (1, A)), prompt(1, (1, B))])
    assert [body["sampling_params"]["n"] for body in engine.requests] == [1, 1]
    assert [sample.response for sample in samples] == ["a", "b"]


def test_greedy_groups_are_asked_one_by_one_because_vllm_refuses_n(ask):
    with ScriptedEngine(lambda _: Reply(token_ids=[EOS])) as engine:
        ask(engine, [prompt(0), prompt(1)], "--rollout-temperature", 0)
    assert [body["sampling_params"]["n"] for body in engine.requests] == [1, 1]


def test_generate_continues_what_the_sample_already_holds(ask):
    async def two_turns(args, samples, params):
        sample = await generate(args, samples[0], params)
        sample.append_response_tokens([B], [0.0], trainable=False, versions=[VersionSpan(0, 0, 1)])
        return await generate(args, sample, params)

    with ScriptedEngine(lambda _: Reply(token_ids=[A, EOS])) as engine:
        sample = ask(engine, [prompt()], function=two_turns)
    assert sample.tokens == [1, A, A, EOS, B, A, EOS]
    assert sample.loss_mask == [1, 1, 0, 1, 1]
    assert engine.requests[1]["token_ids"] == [1, A, A, EOS, B]


class TestAbortByAWeightUpdate:
    """The engine ends a request early with what it has (vLLM pause?mode=abort)."""

    @staticmethod
    def script(request):
        if request.number == 0:
            return Reply(token_ids=[A, A], finish_reason="abort", version="0", log_prob=-1)
        return Reply(token_ids=[B, EOS], version="1", log_prob=-2)

    def test_tokens_are_kept_and_continued_when_staleness_allows(self, ask):
        with ScriptedEngine(self.script) as engine:
            (sample,) = ask(engine, [prompt()], "--transferqueue-max-staleness", 1)
        assert engine.requests[1]["token_ids"] == [1, A, A, A]
        assert engine.requests[1]["sampling_params"]["max_tokens"] == 6  # 8 - 2
        assert sample.tokens == [1, A, A, A, B, EOS]
        assert sample.rollout_log_probs == [-1, -1, -2, -2]
        assert sample.token_policy_versions == [VersionSpan(0, 0, 2), VersionSpan(1, 2, 4)]

    def test_the_answer_is_sampled_anew_when_it_must_be_fresh(self, ask):
        with ScriptedEngine(self.script) as engine:
            (sample,) = ask(engine, [prompt()])
        assert engine.requests[1]["token_ids"] == [1, A]
        assert (sample.tokens, sample.weight_versions) == ([1, A, B, EOS], [1])

    def test_tokens_that_will_be_masked_are_kept_as_context_also_when_the_answer_must_be_fresh(self, ask):
        with ScriptedEngine(self.script) as engine:
            (sample,) = ask(engine, [prompt()], "--mixed-version-policy", "mask")
        assert engine.requests[1]["token_ids"] == [1, A, A, A]
        assert sample.weight_versions == [0, 1]

    def test_an_answer_whose_versions_may_not_mix_is_sampled_anew(self, ask):
        flags = ("--transferqueue-max-staleness", 1, "--mixed-version-policy", "reject")
        with ScriptedEngine(self.script) as engine:
            (sample,) = ask(engine, [prompt()], *flags)
        assert engine.requests[1]["token_ids"] == [1, A]
        assert sample.weight_versions == [1]


class TestFailures:
    @pytest.mark.parametrize("status", [500, 503])
    def test_a_server_fault_is_asked_again(self, ask, status):
        def script(request):
            return Failure(status) if request.number < 2 else Reply(token_ids=[EOS])

        with ScriptedEngine(script) as engine:
            (sample,) = ask(engine, [prompt()])
        assert (len(engine.requests), sample.status) == (3, SampleStatus.COMPLETED)

    def test_a_lasting_fault_ends_after_eight_attempts_and_shows_the_last_answer(self, ask):
        with (
            ScriptedEngine(lambda _: Failure(503, "no worker")) as engine,
            pytest.raises(EngineError, match=r"no response after 8 attempts, the last: HTTP 503: no worker"),
        ):
            ask(engine, [prompt()])
        assert len(engine.requests) == 8

    def test_a_refused_request_is_not_repeated(self, ask):
        with (
            ScriptedEngine(lambda _: Failure(400, "n must be at most 4")) as engine,
            pytest.raises(EngineError, match="HTTP 400: n must be at most 4"),
        ):
            ask(engine, [prompt()])
        assert len(engine.requests) == 1

    def test_nobody_listening_is_an_engine_error(self, ask):
        with ScriptedEngine(lambda _: Hang()) as engine:
            pass  # closed: the port is free again
        with pytest.raises(EngineError, match="no response after 8 attempts, the last: ConnectionRefusedError"):
            ask(engine, [prompt()])

    def test_an_engine_that_never_answers_meets_the_deadline(self, ask):
        with (
            ScriptedEngine(lambda _: Hang()) as engine,
            pytest.raises(WaitTimeoutError, match=r"waited 0\.3 s for 1 completions of a prompt of 2 tokens"),
        ):
            ask(engine, [prompt()], "--generate-timeout-secs", 0.3)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"logprobs": {"content": []}}, "2 tokens with 0 log-probabilities"),
            ({"logprobs": None}, "2 tokens with 0 log-probabilities"),
            ({"weight_versions": None}, "weight_versions cover 0 of 2 tokens"),
            ({"weight_versions": [{"version": "abc", "start": 0, "end": 2}]}, "abc"),
            ({"finish_reason": "tired"}, "ended a completion with 'tired'"),
            ({"token_ids": [1, 2.5]}, r"Expected `int`, got `float` - at `\$.choices\[0\].token_ids\[1\]`"),
            ({"token_ids": "12"}, "Expected `array \\| null`, got `str`"),
            ({"index": None}, "Expected `int`, got `null`"),
            ({"weight_versions": [{"version": "1", "end": 2}]}, "missing required field `start`"),
            ({"routed_experts": "no array"}, "cannot be read"),
        ],
    )
    def test_a_malformed_answer_is_refused(self, ask, changes, message):
        with (
            ScriptedEngine(lambda _: Reply(token_ids=[A, EOS], changes=changes)) as engine,
            pytest.raises(EngineError, match=message),
        ):
            ask(engine, [prompt()])


def test_cancelling_the_caller_closes_the_connection_so_that_the_engine_aborts():
    async def cancel(engine):
        client = EngineClient(f"http://127.0.0.1:{engine.port}", max_in_flight=2, timeout_s=20)
        task = asyncio.create_task(client.generate([1], {"temperature": 1.0}))
        while not engine.requests:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait([task])
        await client.aclose()
        return task.cancelled()

    with ScriptedEngine(lambda _: Hang()) as engine:
        assert asyncio.run(cancel(engine))
        assert engine.disconnected.wait(10)


def test_no_more_requests_are_open_than_allowed():
    open_now, most = 0, 0

    async def run(engine):
        nonlocal open_now, most
        client = EngineClient(f"http://127.0.0.1:{engine.port}", max_in_flight=3, timeout_s=20)
        send = client._post

        async def counted(*arguments):
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            try:
                return await send(*arguments)
            finally:
                open_now -= 1

        client._post = counted
        await asyncio.gather(*(client.generate([1], {"temperature": 1.0}) for _ in range(12)))
        await client.aclose()

    with ScriptedEngine(lambda _: Reply(token_ids=[EOS])) as engine:
        asyncio.run(run(engine))
    assert most == 3


class TestHalt:
    """What is under way ends with the tokens so far, and nothing more is asked."""

    def halted(self, engine, work):
        """`work(client)` under a halt that ends it as soon as `engine` holds a request."""

        async def run():
            client = EngineClient(f"http://127.0.0.1:{engine.port}", max_in_flight=1, timeout_s=20)
            halt = AbortScope()
            halt.activate()
            task = asyncio.create_task(work(client))
            await asyncio.to_thread(engine.num_held.acquire)
            await halt.end([task])
            await client.aclose()
            return task.result()

        return asyncio.run(run())

    def test_answers_under_way_come_in_cut_and_those_that_wait_for_their_turn_are_empty(self):
        async def work(client):
            asks = (client.generate([1, letter], {"temperature": 1.0}, n=2) for letter in (5, 6))
            return await asyncio.gather(*asks)

        with ScriptedEngine(lambda request: Held(Reply(token_ids=[A, request.sample], version="3"))) as engine:
            under_way, waiting = self.halted(engine, work)
        assert [answer.token_ids for answer in under_way] == [[A, 0], [A, 1]]
        assert {answer.finish_reason for answer in under_way} == {"abort"}
        assert [answer.versions for answer in under_way] == [[VersionSpan(3, 0, 2)]] * 2
        assert [(answer.token_ids, answer.finish_reason) for answer in waiting] == [((), "abort")] * 2
        assert len(engine.requests) == 1

    def test_an_engine_that_is_gone_is_passed_over(self):
        async def work(client):
            return await client.generate([1], {"temperature": 1.0})

        with ScriptedEngine(lambda _: Reply(token_ids=[EOS])) as gone:
            pass
        with ScriptedEngine(lambda _: Held(Reply(token_ids=[A]))) as engine:
            engine.workers = [f"http://127.0.0.1:{gone.port}", f"http://127.0.0.1:{engine.port}"]
            [answer] = self.halted(engine, work)
        assert answer.token_ids == [A]

    def test_a_router_that_does_not_say_where_the_engines_are_ends_nothing(self, caplog):
        async def run(engine):
            client = EngineClient(f"http://127.0.0.1:{engine.port}", max_in_flight=1, timeout_s=20)
            await client.abort(["r1"])
            await client.aclose()

        with ScriptedEngine(lambda _: Hang()) as engine:
            engine.workers = None
            asyncio.run(run(engine))
        assert "does not list its engines" in caplog.text


class TestSeveralRouters:
    """A client that waited before it asks the next router would miss its deadline."""

    @pytest.fixture(autouse=True)
    def no_pause(self, monkeypatch):
        monkeypatch.setattr(engine_client, "LONGEST_BACKOFF_S", 600)

    def ask(self, urls, sessions):
        """A request for each session. Returns the first token of each."""

        async def run():
            client = EngineClient(
                urls[0], others=urls[1:], max_in_flight=len(sessions), timeout_s=20, first_backoff_s=600
            )
            try:
                asks = (client.generate([1], {"temperature": 1.0}, session_id=session) for session in sessions)
                return [completion.token_ids[0] for [completion] in await asyncio.gather(*asks)]
            finally:
                await client.aclose()

        return asyncio.run(run())

    def url(self, engine):
        return f"http://127.0.0.1:{engine.port}"

    def test_each_session_has_its_router_and_keeps_it(self):
        sessions = [f"group-{number}" for number in range(4)] * 2  # 0110, see test_router_choice.py
        with (
            ScriptedEngine(lambda _: Reply(token_ids=[A, EOS])) as first,
            ScriptedEngine(lambda _: Reply(token_ids=[A + 1, EOS])) as second,
        ):
            tokens = self.ask([self.url(first), self.url(second)], sessions)
        assert tokens == [A, A + 1, A + 1, A] * 2

    @pytest.mark.parametrize("status", [None, 503])
    def test_a_router_that_does_not_respond_or_has_no_engine_is_passed_over_at_once(self, status):
        sessions = [f"group-{number}" for number in range(8)]
        with ScriptedEngine(lambda _: Failure(status or 500, "no engine")) as away:
            if status is not None:
                with ScriptedEngine(lambda _: Reply(token_ids=[A, EOS])) as engine:
                    assert self.ask([self.url(engine), self.url(away)], sessions) == [A] * 8
                assert len(away.requests) == 3  # those of group-1, group-2 and group-6
        with ScriptedEngine(lambda _: Reply(token_ids=[A, EOS])) as engine:  # `away` is gone
            assert self.ask([self.url(away), self.url(engine)], sessions) == [A] * 8
            assert self.ask([self.url(engine), self.url(away)], sessions) == [A] * 8
            assert len(engine.requests) == 16

    def test_when_none_responds_all_are_tried_again_after_a_pause_and_the_last_error_is_told(self):
        async def run(urls):
            client = EngineClient(urls[0], others=urls[1:], max_in_flight=1, timeout_s=20, first_backoff_s=1e-3)
            try:
                await client.generate([1], {"temperature": 1.0}, session_id="group-1")
            finally:
                await client.aclose()

        down = Failure(503, "no engine")
        with ScriptedEngine(lambda _: down) as first, ScriptedEngine(lambda _: down) as second:
            with pytest.raises(EngineLostError, match="no response after 8 attempts, the last: HTTP 503: no engine"):
                asyncio.run(run([self.url(first), self.url(second)]))
            assert (len(first.requests), len(second.requests)) == (8, 8)

    def test_once_generation_is_aborted_nothing_is_sent_to_the_next_router(self):
        asked = []

        async def run():
            client = EngineClient("http://first", others=["http://second"], max_in_flight=1, timeout_s=20)
            halt = AbortScope()
            halt.activate()

            async def call(_method, url, *_, **__):
                asked.append(url)
                halt.is_set = True  # as `end` does, while the request is under way
                raise HttpFailure("the router ended")

            client._http.call = call
            try:
                return await client.generate([1], {"temperature": 1.0}, session_id="group-0")
            finally:
                await client.aclose()

        [completion] = asyncio.run(run())
        assert (completion.token_ids, completion.finish_reason) == ((), "abort")
        assert asked == ["http://first/inference/v1/generate"]

    def test_an_abort_reaches_engines_that_only_one_of_the_routers_names(self):
        async def run(urls, held):
            client = EngineClient(urls[0], others=urls[1:], max_in_flight=1, timeout_s=20)
            halt = AbortScope()
            halt.activate()
            task = asyncio.create_task(client.generate([1], {"temperature": 1.0}, session_id="group-0"))
            await asyncio.to_thread(held.num_held.acquire)
            await halt.end([task])
            await client.aclose()
            return task.result()

        with ScriptedEngine(lambda _: Hang()) as second, ScriptedEngine(lambda _: Held(Reply(token_ids=[A]))) as first:
            first.workers, second.workers = None, [self.url(first)]
            [completion] = asyncio.run(run([self.url(first), self.url(second)], first))
        assert completion.token_ids == [A]
