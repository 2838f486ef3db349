"""Rewards: what each built-in one says, and that no reward function can hang, lie or crash unnamed."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from tests.helpers.rollout_setup import make_args, write_model_directory
from vime.rollout import rm_hub
from vime.rollout.filter_hub import check_reward_nonzero_std
from vime.rollout.plugins import check_plugins, plugin
from vime.rollout.rm_hub import async_rm, batched_async_rm, check_reward, close_rewards
from vime.types import ConfigError, RewardError, Sample, SampleStatus


def answer(response, label="w", status=SampleStatus.COMPLETED, index=5, **fields):
    return Sample(index=index, response=response, label=label, status=status, **fields)


@pytest.mark.parametrize(
    ("response", "status", "expected"),
    [
        ("w", "completed", 1.0),
        ("<think>alquwxxz</think>w", "completed", 1.0),
        ("<think>a</think>x<think>b</think> w \n", "completed", 1.0),
        ("w", "truncated", 0.0),
        ("wx", "completed", 0.0),
        ("<think>w", "completed", 0.0),
        ("", "completed", 0.0),
    ],
)
async def test_exact_match_compares_what_follows_the_last_thought_of_a_finished_answer(response, status, expected):
    args = make_args("--rm-type", "exact_match")
    assert await async_rm(args, answer(response, status=SampleStatus(status))) == expected


@pytest.mark.parametrize(("label", "response"), [(7.0, "7.0"), (7, "7"), (-7.5, "-7.5")])
async def test_a_number_is_compared_as_it_is_written(label, response):
    assert await async_rm(make_args("--rm-type", "exact_match"), answer(response, label=label)) == 1.0


async def test_a_missing_label_is_said():
    with pytest.raises(RewardError, match=r"sample 5: has no label.*--label-key"):
        await async_rm(make_args("--rm-type", "exact_match"), answer("w", label=None))


class TestAsTheRecordSays:
    """slime's `metadata["rm_type"]`, and `boxed_` in front of a grader's name."""

    async def test_the_record_s_own_grader_wins_over_the_run_s(self):
        args = make_args("--rm-type", "exact_match")
        assert await async_rm(args, answer("the answer is (B).", "B", metadata={"rm_type": "gpqa"})) == 1.0
        # 2 common words; precision 2/2, recall 2/3: 0.8
        assert await async_rm(args, answer("cat sat", "cat sat down", metadata={"rm_type": "f1"})) == pytest.approx(0.8)
        assert await async_rm(args, answer("cat sat", "cat sat down", metadata={"rm_type": ""})) == 0.0

    async def test_no_flag_is_needed_where_every_record_says_it(self):
        assert await async_rm(make_args(), answer("w", metadata={"rm_type": "exact_match"})) == 1.0
        with pytest.raises(RewardError, match=r"sample 5: no reward function\. Give --rm-type"):
            await async_rm(make_args(), answer("w"))

    async def test_a_reward_of_one_s_own_is_asked_whatever_the_record_says(self, tmp_path):
        plugin = tmp_path / "own.py"
        plugin.write_text("def rm(args, sample):\n    return 0.25\n")
        args = make_args("--custom-rm-path", f"{plugin}:rm")
        assert await async_rm(args, answer("w", metadata={"rm_type": "exact_match"})) == 0.25

    @pytest.mark.parametrize("rm_type", ["maths", 7, "boxed_dapo"])
    async def test_a_grader_that_is_none_is_named(self, rm_type):
        with pytest.raises(RewardError, match=rf"sample 5: metadata\['rm_type'\] is {rm_type!r}, expected one of"):
            await async_rm(make_args("--rm-type", "f1"), answer("w", metadata={"rm_type": rm_type}))

    @pytest.mark.parametrize(
        ("rm_type", "response", "label", "expected"),
        [
            ("boxed_exact_match", r"so \boxed{no} or \boxed{yes} it is", "yes", 1.0),
            ("boxed_exact_match", "yes", "yes", 0.0),  # no box
            ("boxed_f1", r"the cat \boxed{cat sat}", "cat sat down", 0.8),
            ("boxed_gpqa", r"(A)? no: \boxed{B}", "B", 1.0),
            ("boxed_gpqa", r"So the answer is $\boxed{\text{B}}$.", "B", 1.0),
            ("boxed_math", r"1/3 or \boxed{\frac{1}{2}}, not 3", "0.5", 1.0),
            ("boxed_math", "0.5", "0.5", 0.0),
        ],
    )
    async def test_boxed_judges_the_last_box_alone(self, rm_type, response, label, expected):
        asked = answer(response, label)
        assert await async_rm(make_args("--rm-type", rm_type), asked) == pytest.approx(expected)
        assert await async_rm(make_args(), answer(response, label, metadata={"rm_type": rm_type})) == pytest.approx(
            expected
        )
        assert asked.response == response
        await close_rewards()


class TestReasoningGym:
    async def test_the_generators_own_verdict_is_the_reward(self, tmp_path):
        pytest.importorskip("reasoning_gym")
        from vime.rollout.data_source import RolloutDataSource

        args = make_args(
            "--hf-checkpoint", write_model_directory(tmp_path, positions=4096), "--reasoning-gym", "chain_sum",
            "--reasoning-gym-size", 2, "--rm-type", "reasoning_gym", "--n-samples-per-prompt", 3,
        )  # fmt: skip
        samples = RolloutDataSource(args).get_samples(1)[0]
        samples[0].response = f"<think>hm</think> {samples[0].label}"
        samples[1].response = f"so <answer>{samples[1].label}</answer> it is"
        samples[2].response = "no idea"
        rewards = await batched_async_rm(args, samples)
        assert rewards[:2] == [1.0, 1.0]
        assert rewards[2] < 0.1

    async def test_prompts_of_another_source_are_refused(self):
        with pytest.raises(RewardError, match="scores prompts of --reasoning-gym only"):
            await async_rm(make_args("--rm-type", "reasoning_gym"), answer("1"))


@pytest.fixture
async def service():
    """service(handler) -> address of an HTTP reward service."""
    runners = []

    async def start(handler):
        app = web.Application()
        app.router.add_post("/score", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/score"

    yield start
    await close_rewards()
    for runner in runners:
        await runner.cleanup()


class TestRemote:
    @pytest.mark.parametrize("body", ["0.75", '{"reward": 0.75}'])
    async def test_the_services_number_is_the_reward(self, service, body):
        seen = []

        async def handler(request):
            seen.append(await request.json())
            return web.Response(text=body, content_type="application/json")

        args = make_args("--rm-type", "remote_rm", "--rm-url", await service(handler))
        assert await async_rm(args, answer("w", prompt="4:xw=", group_index=2)) == 0.75
        assert seen[0]["prompt"] == "4:xw="
        assert (seen[0]["response"], seen[0]["label"], seen[0]["index"], seen[0]["status"]) == (
            "w",
            "w",
            5,
            "completed",
        )

    async def test_a_fault_is_tried_again_and_a_lasting_one_named(self, service):
        calls = []

        async def handler(request):
            calls.append(1)
            return web.Response(status=500, text="boom")

        args = make_args("--rm-type", "remote_rm", "--rm-url", await service(handler))
        with pytest.raises(RewardError, match="sample 5: 3 attempts failed, the last: HTTP 500: boom"):
            await async_rm(args, answer("w"))
        assert len(calls) == 3

    async def test_samples_one_after_the_other_share_a_connection(self, service):
        peers = []

        async def handler(request):
            peers.append(request.transport.get_extra_info("peername"))
            return web.Response(text="0.5")

        args = make_args("--rm-type", "remote_rm", "--rm-url", await service(handler))
        assert [await async_rm(args, answer("w")) for _ in range(3)] == [0.5] * 3
        assert len(peers) == 3
        assert len(set(peers)) == 1

    async def test_the_flag_alone_says_how_long_an_answer_may_take(self, service, monkeypatch):
        """The library has a limit of its own, 300 s, for whoever names none."""
        monkeypatch.setattr("aiohttp.client.DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.05))

        async def slow(request):
            await asyncio.sleep(0.3)
            return web.Response(text="0.5")

        args = make_args("--rm-type", "remote_rm", "--rm-url", await service(slow), "--rm-timeout-secs", 30)
        assert await async_rm(args, answer("w")) == 0.5

    async def test_nonsense_and_silence_are_named(self, service):
        async def nonsense(request):
            return web.Response(text="<html>")

        async def silence(request):
            await asyncio.sleep(30)

        with pytest.raises(RewardError, match="the response is not JSON"):
            await async_rm(make_args("--rm-type", "remote_rm", "--rm-url", await service(nonsense)), answer("w"))
        args = make_args("--rm-type", "remote_rm", "--rm-url", await service(silence), "--rm-timeout-secs", 0.2)
        with pytest.raises(RewardError, match=r"sample 5.*(no response within 0\.2 s|ReadTimeout)"):
            await async_rm(args, answer("w"))


@pytest.fixture
def custom(tmp_path):
    def write(body, *flags):
        path = tmp_path / "rewards.py"
        path.write_text("import asyncio, math, time, threading\n" + body)
        return make_args("--custom-rm-path", f"{path}:custom", *flags)

    return write


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("async def custom(args, sample, **kw): raise KeyError('x')", "raised KeyError: 'x'"),
        ("def custom(args, sample): raise TimeoutError('mine')", "raised TimeoutError: mine"),
        ("async def custom(args, sample): return math.inf", "got inf, expected a finite number"),
        ("def custom(args, sample): return 1e300", "got 1e\\+300, expected a finite number of at most 3.4e\\+38"),
        ("def custom(args, sample): return -(10**400)", "got -1.*, expected a finite number of at most 3.4e\\+38"),
        ("async def custom(args, sample): return None", "got NoneType None, expected a number"),
        ("async def custom(args, sample): return [1.0]", r"got list \[1.0\], expected a number"),
        ("async def custom(args, sample): return {'a': 1.0}", r"got a dict with keys \['a'\], expected .*--reward-key"),
        ("async def custom(args, sample): await asyncio.Event().wait()", "did not return within 0.3 s"),
        ("def custom(args, sample): threading.Event().wait()", "did not return within 0.3 s"),
    ],
)
async def test_a_bad_reward_is_an_error_that_names_function_and_sample(custom, body, message):
    args = custom(body, "--rm-timeout-secs", 0.3 if "did not return" in message else 60)
    with pytest.raises(RewardError, match=rf"rewards\.py:custom, sample 5: {message}"):
        await async_rm(args, answer("w"))


async def test_a_coroutine_that_blocks_its_thread_still_meets_the_deadline(custom):
    """It would end by itself after a minute, with another error."""
    args = custom("end = threading.Event()\nasync def custom(args, sample): end.wait(60)", "--rm-timeout-secs", 0.3)
    with pytest.raises(RewardError, match="blocking calls belong in a plain function"):
        await async_rm(args, answer("w"))
    plugin(args, "custom_rm_path").__globals__["end"].set()


async def test_the_deadline_of_a_plain_function_begins_when_it_has_a_thread(custom, monkeypatch):
    """A thousand completions that end together take more turns of 32 threads than one deadline has."""
    monkeypatch.setattr(rm_hub, "MAX_THREADS", 1)
    args = custom("def custom(args, sample): time.sleep(0.5); return 1.0", "--rm-timeout-secs", 1.4)
    assert await asyncio.gather(*(async_rm(args, answer("w", index=index)) for index in range(4))) == [1.0] * 4


async def test_the_wait_for_a_thread_has_a_deadline_of_its_own(monkeypatch):
    monkeypatch.setattr(rm_hub, "MAX_THREADS", 1)
    threads = rm_hub._Threads()
    async with threads.one(60.0):
        with pytest.raises(RewardError, match=r"no thread .* was free within 0.2 s: 1 calls are at work and 1 wait"):
            async with threads.one(0.1):
                pass
    async with threads.one(60.0):  # what was waited for in vain takes no place
        pass


async def test_plain_functions_run_side_by_side_in_threads(custom):
    # Each waits for the other: two of them in one thread would never end.
    body = "barrier = threading.Barrier(2)\ndef custom(args, sample): barrier.wait(20); return True"
    assert await batched_async_rm(custom(body), [answer("a"), answer("b")]) == [1.0, 1.0]


async def test_a_dict_reward_is_kept_whole_when_the_key_is_there(custom):
    args = custom("async def custom(args, sample): return {'acc': 1, 'len': 0.5}", "--reward-key", "acc")
    assert await async_rm(args, answer("w")) == {"acc": 1.0, "len": 0.5}


@pytest.mark.parametrize("body", ["return [1.0]", "return 1.0"])
async def test_a_group_reward_must_answer_for_every_sample(custom, body):
    args = custom(f"async def custom(args, samples): {body}", "--group-rm")
    with pytest.raises(RewardError, match=r"samples \[1, 2\]: got .* expected a list of 2 rewards"):
        await batched_async_rm(args, [answer("a", index=1), answer("b", index=2)])


def test_numpy_numbers_and_booleans_are_rewards():
    import numpy

    args = make_args()
    assert check_reward(args, numpy.float32(0.5), where="x") == 0.5
    assert check_reward(args, True, where="x") == 1.0


class TestCheckPlugins:
    def test_built_in_paths_pass(self):
        check_plugins(
            make_args("--dynamic-sampling-filter-path", "vime.rollout.filter_hub.check_reward_nonzero_std",
                      "--rm-type", "exact_match", "--custom-rm-path", "vime.rollout.rm_hub.exact_match")
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("flag", "body"),
        [
            ("--custom-rm-path", "def f(): ..."),
            ("--custom-generate-function-path", "async def f(args, sample): ..."),
            ("--dynamic-sampling-filter-path", "def f(args): ..."),
            ("--custom-reward-post-process-path", "def f(args): ..."),
            ("--rollout-sample-filter-path", "def f(args): ..."),
            ("--rollout-function-path", "def f(args, rollout_id, data_source): ..."),
            ("--data-source-path", "class f: ..."),
        ],
    )
    def test_a_wrong_signature_is_refused_naming_the_flag(self, tmp_path, flag, body):
        (tmp_path / "plug.py").write_text(body)
        with pytest.raises(ConfigError, match=rf"{flag} .*plug\.py:f: cannot be called as"):
            check_plugins(make_args(flag, f"{tmp_path}/plug.py:f"))

    def test_a_missing_module_or_name_is_refused(self):
        with pytest.raises(ConfigError, match=r"--custom-rm-path no\.such\.thing: cannot import"):
            check_plugins(make_args("--custom-rm-path", "no.such.thing"))
        with pytest.raises(ConfigError, match="has no 'nothing'"):
            check_plugins(make_args("--custom-rm-path", "vime.rollout.rm_hub.nothing"))

    def test_group_rewards_need_a_custom_function(self):
        with pytest.raises(ConfigError, match="--group-rm needs --custom-rm-path"):
            check_plugins(make_args("--rm-type", "exact_match", "--group-rm"))


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [([0, 1], True, None), ([1, 1], False, "zero_std_1"), ([0.5, 0.5], False, "zero_std_0.5")],
)
def test_the_filter_drops_groups_of_equal_rewards(rewards, keep, reason):
    verdict = check_reward_nonzero_std(make_args(), [answer("w", reward=float(reward)) for reward in rewards])
    assert (verdict.keep, verdict.reason) == (keep, reason)
