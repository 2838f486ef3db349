"""--partial-rollout in mode streaming: tokens of aborted completions wait in the spool and are continued, each once."""

from tests.helpers.scripted_engine import Held, Reply, ScriptedEngine
from tests.helpers.streaming import LETTER, Streaming, groups_of, wait_until
from vime.data.payload import bytes_to_samples
from vime.handoff.audit import audit_run
from vime.handoff.group_store import GroupStore
from vime.handoff.ledger import Ledger
from vime.handoff.prompt_ledger import PromptLedger
from vime.rollout import abort_scope
from vime.types import VersionSpan

EOS = 2
KEPT = 30
PARTIAL = "--partial-rollout"


class Cutting:
    """Answers end at once, but those to the `slow` letters are held after one token; behind it they end."""

    def __init__(self, *slow):
        self.slow = {LETTER[letter] for letter in slow}
        self.version = 0

    def __call__(self, request):
        version = str(self.version)
        if request.token_ids[-1] == KEPT:
            return Reply(token_ids=[EOS], version=version, log_prob=-0.25)
        if request.token_ids[-1] in self.slow:
            return Held(Reply(token_ids=[KEPT], version=version))
        return Reply(token_ids=[request.token_ids[-1], EOS], version=version)


def stop_with_one_held(directory, engine, model_dir, *flags, **options):
    """A run that stops while group 1 (`b`) is under way and group 0 is ready."""
    with Streaming(directory, engine, model_dir, *flags, **options) as run:
        assert engine.num_held.acquire(timeout=30)
        wait_until(run, lambda: run.status().ready == 1)
        run.worker.stop()
        assert run.status().retry == 1
        return run.worker.stats


def test_a_run_that_stops_keeps_the_tokens_under_way_and_the_next_one_goes_on_with_them(tmp_path, model_dir):
    script = Cutting("b")
    with ScriptedEngine(script) as engine:
        stats = stop_with_one_held(tmp_path, engine, model_dir, PARTIAL)
        assert (stats.partial.partial_groups, stats.partial.partial_tokens, stats.retried_groups) == (1, 2, 1)
        assert audit_run(tmp_path, saved=None).findings == ()
        asked = len(engine.requests)
        with Streaming(tmp_path, engine, model_dir, PARTIAL) as again:
            output = again.lease(0)
            assert [(g.task.group, g.task.attempt) for g in again.taken.lease.groups] == [(0, 1), (1, 2)]
            assert [request["token_ids"] for request in engine.requests[asked:]] == [[1, LETTER["b"], KEPT]]
            assert engine.requests[asked]["sampling_params"]["max_tokens"] == 7
            again.train(0)
            report = audit_run(tmp_path, saved=None)
            # also the tokens of the second attempt, which the producer has hashed
            assert (report.findings, report.receipts, report.num_unhashed) == ((), (0, 0), 0)
    for sample in output.samples[1]:
        assert sample.tokens == [1, LETTER["b"], KEPT, EOS]
        assert sample.rollout_log_probs == [-0.5, -0.25]
        assert sample.token_policy_versions == [VersionSpan(0, 0, 2)]
    assert output.metrics["rollout/resumed_tokens"] == 2


def test_tokens_in_the_spool_outlive_attempts_that_add_none(tmp_path, model_dir):
    """The second run is killed: its attempt leaves nothing, and the third goes on from the first run's tokens."""
    script = Cutting("b")
    with ScriptedEngine(script) as engine:
        stop_with_one_held(tmp_path, engine, model_dir, PARTIAL)
        with Streaming(tmp_path, engine, model_dir, PARTIAL, starts=False) as killed:
            [prompt] = killed.port.call(PromptLedger.issue, "of the dead", 1, request="r").prompts
            assert prompt.partial is not None
        asked = len(engine.requests)
        with Streaming(tmp_path, engine, model_dir, PARTIAL) as third:
            output = third.lease(0)
            assert third.taken.groups[1].task.attempt == 3
        assert [request["token_ids"] for request in engine.requests[asked:]] == [[1, LETTER["b"], KEPT]]
    assert output.samples[1][0].tokens == [1, LETTER["b"], KEPT, EOS]


def test_without_the_flag_a_run_that_stops_keeps_no_tokens(tmp_path, model_dir):
    script = Cutting("b")
    with ScriptedEngine(script) as engine:
        with Streaming(tmp_path, engine, model_dir) as run:
            assert engine.num_held.acquire(timeout=30)
            run.worker.stop()
        script.slow = set()
        asked = len(engine.requests)
        with Streaming(tmp_path, engine, model_dir) as again:
            again.lease(0)
        assert [1, LETTER["b"]] in [request["token_ids"] for request in engine.requests[asked:]]


def test_tokens_that_cannot_be_read_are_sampled_again(tmp_path, model_dir):
    script = Cutting("b")
    with ScriptedEngine(script) as engine:
        stop_with_one_held(tmp_path, engine, model_dir, PARTIAL)
        script.slow = set()
        with Streaming(tmp_path, engine, model_dir, PARTIAL, starts=False) as again:
            again.store.record = lambda task, checksum: GroupStore.record(again.store, task, checksum + 1)
            again.worker.start()
            wait_until(again, lambda: again.status().ready == 2)
            del again.store.record
            assert groups_of(again.lease(0)) == [0, 1]
    assert engine.requests[-1]["token_ids"] == [1, LETTER["b"]]


def test_an_engine_that_is_deaf_to_the_abort_does_not_hold_the_end_up(tmp_path, model_dir, monkeypatch):
    monkeypatch.setattr(abort_scope.AbortScope.end, "__kwdefaults__", {"deadline_s": 0.5})
    with ScriptedEngine(Cutting("b")) as engine:
        engine.is_deaf = True
        with Streaming(tmp_path, engine, model_dir, PARTIAL) as run:
            assert engine.num_held.acquire(timeout=30)
            wait_until(run, lambda: run.status().ready == 1)
            run.worker.stop()
            assert run.worker.num_running == 0
            assert run.worker.stats.partial.partial_groups == 0
        with Streaming(tmp_path, engine, model_dir, PARTIAL, starts=False) as again:
            assert again.report.reissued[-1].group == 1  # in flight when it stopped


def test_the_spool_keeps_what_a_retry_goes_on_from_and_drops_it_when_it_is_whole(tmp_path, model_dir):
    def compacted(run):
        run.store.compact(run.port.call(Ledger.needed_payloads))
        return {(task.group, task.attempt) for task, _, _ in run.spool.entries() if task.group < 2}

    with ScriptedEngine(Cutting("b")) as engine:
        stop_with_one_held(tmp_path, engine, model_dir, PARTIAL, segment_bytes=1)
        with Streaming(tmp_path, engine, model_dir, PARTIAL, segment_bytes=1, starts=False) as again:
            assert compacted(again) == {(0, 1), (1, 1)}  # one group is whole, one is cut
            again.worker.start()
            again.lease(0)
            assert compacted(again) == {(0, 1), (1, 2)}


class CutByAnUpdate:
    """Staleness 1. Round 0 is trained while group 2 (`c`) is under way on version 0; the weight update to version 1
    aborts it, and `then` is what it is answered with from then on. Other prompts are answered at once."""

    def __init__(self, directory, model_dir, *flags, then):
        self.script, self.then = Cutting("c"), iter(then)
        self.engine = ScriptedEngine(self.answer)
        self.engine.__enter__()
        self.run = Streaming(directory, self.engine, model_dir, *flags, staleness=1)
        self.run.__enter__()

    def answer(self, request):
        is_cut = self.script.version == 1 and LETTER["c"] in request.token_ids
        return next(self.then) if is_cut else self.script(request)

    def __enter__(self):
        assert self.engine.num_held.acquire(timeout=30)
        self.run.play(0)
        self.script.version = 1
        self.engine.abort_all()
        return self

    def __exit__(self, *_):
        self.run.__exit__()
        self.engine.__exit__(None, None, None)

    def when(self, *states):
        """(attempt, oldest, newest version) of group 2 when the ledger says one of these states of it."""

        def row():
            sql = "select state, attempt, min_version, max_version from prompt_group where grp = 2"
            return self.run.look(sql)[0]

        wait_until(self.run, lambda: row()[0] in states)
        return row()[1:]

    def payload(self):
        """The samples that round 1 or 2 will train."""
        [data] = [self.run.spool.read(task, crc) for task, crc, _ in self.run.spool.entries() if task.group == 2]
        return bytes_to_samples(data)


END = Reply(token_ids=[EOS], version="1")
CROSSING = Reply(token_ids=[KEPT, EOS], spans=[("0", 0, 1), ("1", 1, 2)])  # --pause-mode keep
FRESH = Reply(token_ids=[KEPT, EOS], version="1")
MIXED = [VersionSpan(0, 0, 1), VersionSpan(1, 1, 2)]


def test_mixed_versions_are_accepted_and_the_oldest_counts(tmp_path, model_dir):
    with CutByAnUpdate(tmp_path, model_dir, then=[END] * 2) as cut:
        assert cut.when("ready") == (1, 0, 1)
        samples = cut.payload()
    assert [(s.loss_mask, s.token_policy_versions) for s in samples] == [([1, 1], MIXED)] * 2


def test_mixed_versions_are_masked_but_for_the_newest_which_counts(tmp_path, model_dir):
    with CutByAnUpdate(tmp_path, model_dir, "--mixed-version-policy", "mask", then=[END] * 2) as cut:
        assert cut.when("ready") == (1, 1, 1)
        samples = cut.payload()
    assert [(s.loss_mask, s.token_policy_versions) for s in samples] == [([0, 1], MIXED)] * 2


def test_mixed_versions_are_rejected_and_dropped_with_a_counted_reason(tmp_path, model_dir):
    flags = ("--mixed-version-policy", "reject")
    with CutByAnUpdate(tmp_path, model_dir, *flags, then=[FRESH, CROSSING]) as cut:
        assert cut.when("dropped")[0] == 1
        assert cut.run.worker.stats.dropped == {"mixed_versions": 1}


def test_mixed_versions_are_rejected_and_their_prompt_is_answered_again(tmp_path, model_dir):
    flags = ("--mixed-version-policy", "reject", "--stale-policy", "retry")
    with CutByAnUpdate(tmp_path, model_dir, *flags, then=[CROSSING, FRESH, FRESH, FRESH]) as cut:
        assert cut.when("ready") == (2, 1, 1)
        assert cut.run.worker.stats.retried_groups == 1
