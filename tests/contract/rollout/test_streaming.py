"""Mode streaming in one process: real worker, coordinator, ledger and spool against a scripted engine over HTTP."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.kept import round_groups
from tests.helpers.scripted_engine import Hang, Reply, ScriptedEngine
from tests.helpers.streaming import LETTER, Streaming, attempts_of, groups_of, wait_until
from vime.handoff.ledger import Ledger
from vime.handoff.prompt_ledger import PromptLedger
from vime.handoff.round_ledger import RoundLedger
from vime.observability.samples import read_fates
from vime.rollout.sample_recorder import RECORDER
from vime.types import HandoffError, RewardError, WaitTimeoutError

EOS = 2


class ServedVersion:
    """An engine that echoes the prompt's letter and stamps the version that the test serves."""

    def __init__(self, version=0):
        self.version = version

    def __call__(self, request):
        return Reply(token_ids=[request.token_ids[-1], EOS], version=str(self.version))


def test_each_group_is_in_one_round_in_the_order_of_the_prompts(tmp_path, model_dir):
    served = ServedVersion()
    with ScriptedEngine(served) as engine, Streaming(tmp_path, engine, model_dir) as run:
        rounds = []
        for round_id in range(3):
            served.version = round_id
            rounds.append(run.play(round_id))
        assert [groups_of(output) for output in rounds] == [[0, 1], [2, 3], [4, 5]]
        assert [[s.prompt for s in group] for group in rounds[1].samples] == [["c", "c"], ["d", "d"]]
        assert {s.rollout_id for group in rounds[2].samples for s in group} == {2}
        assert {s.reward for output in rounds for group in output.samples for s in group} == {1.0}
        assert rounds[2].metrics["rollout/version_oldest"] == 2
        # six groups for three rounds of two, and not one prompt more
        assert run.status().active == 0
        assert run.port.call(PromptLedger.issue, "p", 1, request="r").is_exhausted


def test_at_staleness_0_no_prompt_is_sent_before_the_weights_of_the_round_are_served(tmp_path, model_dir):
    served = ServedVersion()
    with ScriptedEngine(served) as engine, Streaming(tmp_path, engine, model_dir) as run:
        run.lease(0)
        run.port.call(RoundLedger.trained, 0, run.taken.lease.fence)
        assert len(engine.requests) == 2  # one for each group of round 0
        assert run.status().active == 2  # trained, but the engines serve older weights
        served.version = 1
        run.port.call(RoundLedger.release, 1)
        assert groups_of(run.lease(1)) == [2, 3]


def test_at_staleness_1_the_next_round_is_answered_while_one_trains(tmp_path, model_dir):
    with ScriptedEngine(ServedVersion()) as engine, Streaming(tmp_path, engine, model_dir, staleness=1) as run:
        first = run.lease(0)
        fence = run.taken.lease.fence
        second = run.lease(1)  # version 0 tokens, one behind; round 0 is still being trained
        assert sorted(groups_of(first) + groups_of(second)) == [0, 1, 2, 3]
        run.port.call(RoundLedger.trained, 0, fence)
        run.train(1)


@pytest.mark.timeout(60)
def test_a_worker_whose_share_grows_takes_more_prompts_though_none_of_its_own_has_ended(tmp_path, model_dir):
    """What a dead worker was at goes to those that live, before another one has started in its place."""
    with (
        ScriptedEngine(lambda _: Hang()) as engine,
        Streaming(tmp_path, engine, model_dir, staleness=1, starts=False) as run,
    ):
        run.worker.share(2)
        run.worker.start()
        wait_until(run, lambda: run.worker.num_running == 2)
        run.worker.share(1)
        wait_until(run, lambda: run.status().active == 4)


def test_what_an_older_group_asks_goes_before_the_prompts_of_the_next_round(tmp_path, model_dir):
    """Two turns an answer and one request at a time: first come, first served would ask every first turn first."""
    (tmp_path / "twice.py").write_text(
        "import copy\n"
        "from vime.rollout.generation import generate as ask\n"
        "async def generate(args, sample, sampling_params):\n"
        "    await ask(args, copy.deepcopy(sample), sampling_params)\n"
        "    return await ask(args, sample, sampling_params)\n"
    )
    plugin = ("--custom-generate-function-path", f"{tmp_path / 'twice.py'}:generate")
    with (
        ScriptedEngine(ServedVersion(), answer_s=0.01) as engine,
        Streaming(tmp_path, engine, model_dir, *plugin, "--vllm-server-concurrency", 1, staleness=1) as run,
    ):
        run.lease(0)
        run.lease(1)
        asked = [request["token_ids"][-1] - LETTER["a"] for request in engine.requests]
    assert asked == [group for group in range(4) for _ in range(4)]  # 2 samples with 2 turns


def test_trainers_may_begin_with_a_finished_group_while_another_of_the_round_is_answered(tmp_path, model_dir):
    (tmp_path / "held.py").write_text(
        "import asyncio, threading\n"
        "from vime.rollout.generation import generate as ask\n"
        "go_on = threading.Event()\n"
        "async def generate(args, sample, sampling_params):\n"
        "    if sample.group_index == 0:\n"
        "        await asyncio.to_thread(go_on.wait, 60)\n"
        "    return await ask(args, sample, sampling_params)\n"
    )
    flags = ("--custom-generate-function-path", f"{tmp_path / 'held.py'}:generate", "--train-early-groups", 1)
    with ScriptedEngine(ServedVersion()) as engine, Streaming(tmp_path, engine, model_dir, *flags) as run:
        with ThreadPoolExecutor(1) as thread:
            whole = thread.submit(run.lease, 0)
            assert run.coordinator.early_batches.wait(0, 30)
            [early_batch] = run.coordinator.claim_early_batch()
            assert early_batch.task.group == 1
            sys.modules["vime_plugin_held"].go_on.set()
            output = whole.result(60)
        assert not run.coordinator.early_batches.wait(0, 30)
        assert run.coordinator.claim_early_batch() == []
        assert groups_of(output) == [0, 1]
        assert output.groups[1] is early_batch  # not asked for again
        assert run.taken.begun == {1}


def test_of_a_prefetched_round_trainers_begin_with_its_own_groups_not_with_finished_ones_of_the_next(
    tmp_path, model_dir
):
    (tmp_path / "held_round.py").write_text(
        "import asyncio, threading\n"
        "from vime.rollout.generation import generate as ask\n"
        "go_on = {2: threading.Event(), 3: threading.Event()}\n"
        "async def generate(args, sample, sampling_params):\n"
        "    if sample.group_index in go_on:\n"
        "        await asyncio.to_thread(go_on[sample.group_index].wait, 60)\n"
        "    return await ask(args, sample, sampling_params)\n"
    )
    flags = ("--custom-generate-function-path", f"{tmp_path / 'held_round.py'}:generate", "--train-early-groups", 1)
    with (
        ScriptedEngine(ServedVersion()) as engine,
        Streaming(tmp_path, engine, model_dir, *flags, staleness=1) as run,
        ThreadPoolExecutor(1) as thread,
    ):
        run.play(0)
        whole = thread.submit(run.lease, 1)
        wait_until(run, lambda: run.status().ready == 2)  # 4 and 5, of the round after
        go_on = sys.modules["vime_plugin_held_round"].go_on
        go_on[3].set()
        assert run.coordinator.early_batches.wait(1, 10)
        assert [group.task.group for group in run.coordinator.claim_early_batch()] == [3]
        assert run.coordinator.claim_early_batch() == []
        go_on[2].set()
        assert groups_of(whole.result(60)) == [2, 3]
        assert run.taken.begun == {3}


def test_dropped_groups_are_counted_and_replaced_by_further_prompts(tmp_path, model_dir):
    def right_for_every_other_prompt(request):
        is_right = (request.token_ids[-1] - LETTER["a"]) % 2 == 0
        first = [request.token_ids[-1], EOS] if request.sample == 0 and is_right else [EOS]
        return Reply(token_ids=first, version="0")

    flags = ("--dynamic-sampling-filter-path", "vime.rollout.filter_hub.check_reward_nonzero_std")
    RECORDER.open(tmp_path / "kept", max_bytes=1 << 20)  # first: the worker generates from its start
    with ScriptedEngine(right_for_every_other_prompt) as engine, Streaming(tmp_path, engine, model_dir, *flags) as run:
        output = run.lease(0)
        RECORDER.write_round(0, round_groups(output.samples))
        RECORDER.close()
    assert groups_of(output) == [0, 2]
    assert read_fates(tmp_path / "kept")[0].kept == (0, 2)
    assert 1 in read_fates(tmp_path / "kept")[0].dropped["zero_std_0"]
    assert output.metrics["rollout/dropped_groups"] >= 1  # group 1; group 3 may be finished or not
    assert output.metrics["rollout/dropped_zero_std_0"] >= 1


def test_an_error_of_the_reward_ends_the_round_that_waits_with_that_error(tmp_path, model_dir):
    flags = ("--rm-type", "remote_rm", "--rm-url", "http://127.0.0.1:9/none")
    with (
        ScriptedEngine(ServedVersion()) as engine,
        Streaming(tmp_path, engine, model_dir, *flags) as run,
        pytest.raises(RewardError, match=r"http://127\.0\.0\.1:9/none"),
    ):
        run.lease(0)


def test_an_aborted_answer_gives_its_prompt_back_and_is_asked_again(tmp_path, model_dir):
    (tmp_path / "generate.py").write_text(
        "from vime.rollout.generation import generate as ask\n"
        "from vime.types import SampleStatus\n"
        "seen = set()\n"
        "async def generate(args, sample, sampling_params):\n"
        "    if sample.index == 0 and not seen:\n"
        "        seen.add(0)\n"
        "        sample.status = SampleStatus.ABORTED\n"
        "        return sample\n"
        "    return await ask(args, sample, sampling_params)\n"
    )
    flags = ("--custom-generate-function-path", f"{tmp_path / 'generate.py'}:generate")
    with ScriptedEngine(ServedVersion()) as engine, Streaming(tmp_path, engine, model_dir, *flags) as run:
        assert groups_of(run.lease(0)) == [0, 1]
        assert attempts_of(run.taken) == {0: 2, 1: 1}


def test_a_group_whose_lease_went_to_another_attempt_is_thrown_away(tmp_path, model_dir):
    (tmp_path / "slow_generate.py").write_text(
        "import asyncio, threading\n"
        "from vime.rollout.generation import generate as ask\n"
        "go_on, calls = threading.Event(), []\n"
        "async def generate(args, sample, sampling_params):\n"
        "    calls.append(sample.index)\n"
        "    if sample.index == 0 and calls.count(0) == 1:\n"
        "        await asyncio.to_thread(go_on.wait, 60)\n"
        "    return await ask(args, sample, sampling_params)\n"
    )
    flags = ("--custom-generate-function-path", f"{tmp_path / 'slow_generate.py'}:generate")
    with ScriptedEngine(ServedVersion()) as engine, Streaming(tmp_path, engine, model_dir, *flags) as run:
        wait_until(run, lambda: run.status().ready == 1)  # group 1; group 0 is held up
        for _ in range(3):  # one step of the clock counts half a lease at most
            run.clock.time += 6.0
            run.port.call(Ledger.status)  # which takes back what is overdue
        assert groups_of(run.lease(0)) == [0, 1]
        assert attempts_of(run.taken) == {0: 2, 1: 1}
        sys.modules["vime_plugin_slow_generate"].go_on.set()
        wait_until(run, lambda: run.worker.num_running == 0)
        assert run.worker.stats.late_groups == 1


def test_after_a_crash_the_same_rounds_come_back_without_an_engine(tmp_path, model_dir):
    served = ServedVersion()
    with ScriptedEngine(served) as engine:
        with Streaming(tmp_path, engine, model_dir) as run:
            first = [run.lease(0)]
            rows = [run.read(0)[2]]
            run.train(0)
            served.version = 1
            first.append(run.lease(1))
            rows.append(run.read(1)[2])
            run.train(1)
            asked, samples = len(engine.requests), [output.samples for output in first]
        with Streaming(tmp_path, engine, model_dir) as again:  # no checkpoint: from the first round
            assert again.report.replayed_rounds == (0, 1)
            assert again.queue.chunks == {}  # the queue died with the run
            second = [again.lease(0)]
            assert again.taken.lease.is_replay
            assert again.read(0)[2] == rows[0]
            again.train(0)
            second.append(again.lease(1))
            assert again.read(1)[2] == rows[1]
            assert again.store.num_spool_reads == 4  # the chunks of four groups were put again
            assert [output.samples for output in second] == samples
            assert all(request["token_ids"][-1] >= LETTER["e"] for request in engine.requests[asked:])


def test_without_a_spool_a_lost_payload_is_generated_again(tmp_path, model_dir):
    served = ServedVersion()
    with ScriptedEngine(served) as engine:
        with Streaming(tmp_path, engine, model_dir, is_durable=False) as run:
            run.play(0)
        with Streaming(tmp_path, engine, model_dir, is_durable=False) as again:
            assert again.report.replayed_rounds == ()
            assert [task.group for task in again.report.regenerated] == [0, 1]
            assert groups_of(again.lease(0)) == [0, 1]


def test_no_token_of_a_round_is_older_than_the_bound(tmp_path, model_dir):
    served = ServedVersion()
    with (
        ScriptedEngine(served) as engine,
        Streaming(tmp_path, engine, model_dir, staleness=1, rounds=5) as run,
    ):
        first = run.lease(0)
        assert set(groups_of(first)) <= {0, 1, 2, 3}
        run.train(0)
        served.version = 1
        second = run.lease(1)
        run.train(1)
        third = run.lease(2)  # on version 2: nothing of version 0 may be in it
        assert all(version >= 1 for group in third.samples for s in group for version in s.weight_versions)
        seen = groups_of(first) + groups_of(second) + groups_of(third)
        assert len(set(seen)) == 6


def test_a_round_that_does_not_fill_names_what_it_waits_for_at_its_deadline(tmp_path, model_dir):
    expected = r"round 0: ready groups: 0 of 2; 2 in flight.*works on 2 groups"
    with (
        ScriptedEngine(lambda _: Hang()) as engine,
        Streaming(tmp_path, engine, model_dir, "--rollout-timeout-secs", 4) as run,
        pytest.raises(WaitTimeoutError, match=expected),
    ):
        run.lease(0)


def test_a_payload_waits_for_room_until_a_round_is_trained(tmp_path, model_dir):
    with (
        ScriptedEngine(ServedVersion()) as engine,
        Streaming(tmp_path, engine, model_dir, "--transferqueue-max-groups", 2, staleness=1, max_groups=2) as run,
    ):
        run.lease(0)
        status = run.status()
        assert (status.held_groups, status.ready) == (2, 0)  # finished groups of round 1 are not stored yet
        run.train(0)
        second = run.lease(1)
        # they had finished when the statistics of round 0 were taken, and were stored after that
        assert second.metrics["transferqueue/put_latency"] > 0


def test_a_leased_round_that_waits_for_the_trainers_keeps_its_lease(tmp_path, model_dir):
    """Under train_async.py it waits for as long as the round before it is trained, which may be longer than a lease."""
    with (
        ScriptedEngine(ServedVersion()) as engine,
        Streaming(tmp_path, engine, model_dir, "--transferqueue-lease-timeout-secs", 1, staleness=1) as run,
    ):
        first = run.lease(0), run.taken
        run.lease(1)
        second, run.taken = run.taken, first[1]
        for _ in range(6):  # a lease is 10 s of this clock
            before = max(run.lease_ends())
            run.clock.time += 4.0
            wait_until(run, lambda before=before: min(run.lease_ends()) > before)
        run.train(0)
        run.taken = second
        run.train(1)


def test_the_payload_of_another_group_is_refused(tmp_path, model_dir):
    with ScriptedEngine(ServedVersion()) as engine, Streaming(tmp_path, engine, model_dir, is_durable=False) as run:
        wait_until(run, lambda: run.status().ready == 2)
        key, other = ("train_groups", "train/0#1.0"), ("train_groups", "train/1#1.0")
        run.queue.chunks[key] = run.queue.chunks[other]
        run.lease(0)
        with pytest.raises(HandoffError, match=r"train_groups, train/0#1\.0: row 0 of round 0 is not there"):
            run.train(0)


def test_of_a_round_whose_answers_nobody_must_see_none_is_read(tmp_path, model_dir):
    with ScriptedEngine(ServedVersion()) as engine, Streaming(tmp_path, engine, model_dir) as run:
        wait_until(run, lambda: run.status().ready == 2)
        run.worker.samples = None
        assert groups_of(run.play(0)) == [0, 1]


def test_a_plug_in_that_must_see_answers_sees_them_and_is_obeyed_when_the_rows_are_read(tmp_path, model_dir):
    (tmp_path / "seen.py").write_text(
        "def mark(args, groups):\n"
        "    for group in groups:\n"
        "        assert [sample.rollout_id for sample in group] == [0, 0]\n"
        "        group[0].remove_sample = group[0].prompt == 'b'\n"
        "def post(args, groups):\n"
        "    return [[sample.group_index + sample.index / 8 for sample in group] for group in groups]\n"
    )
    flags = [
        "--rollout-sample-filter-path", f"{tmp_path / 'seen.py'}:mark",
        "--custom-reward-post-process-path", f"{tmp_path / 'seen.py'}:post",
    ]  # fmt: skip
    with ScriptedEngine(ServedVersion()) as engine, Streaming(tmp_path, engine, model_dir, *flags) as run:
        output = run.lease(0)
        rows = run.read(0)[2]
    assert {(row.partition_id, row.producer_id) for row in rows.values()} == {("train_groups", run.worker.name)}
    assert [rows[number].reward for number in range(4)] == [0.0, 0.125, 1.25, 1.375]
    assert [rows[number].num_trainable for number in range(4)] == [2, 2, 0, 2]
    assert output.metrics["rollout/removed_samples"] == 1


def by_length(args, sample):
    """A reward that reads no text."""
    return float(sample.response_length)


def test_text_is_decoded_when_somebody_reads_it_and_not_before(tmp_path, model_dir, monkeypatch):
    decoded = []

    def decode(_directory, tokens):
        decoded.append(list(tokens))
        return "text"

    monkeypatch.setattr("vime.rollout.generation.decode_response", decode)
    by_nobody = ["--custom-rm-path", f"{__file__}:by_length"]
    with ScriptedEngine(ServedVersion()) as engine, Streaming(tmp_path, engine, model_dir, *by_nobody) as run:
        run.store.decode = lambda tokens: decode("", tokens)
        output = run.play(0)
        assert decoded == []  # generated, scored, stored, leased and read by the rank
        assert output.samples[0][0].response == "text"
        assert decoded == [[LETTER["a"], EOS]]
