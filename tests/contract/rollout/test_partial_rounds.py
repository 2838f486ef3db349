"""--partial-rollout in modes off and buffer: what a round does not need goes on in the next, token for token."""

import json

import pytest

from tests.helpers.converted import trained_rows
from tests.helpers.metrics_page import undocumented
from tests.helpers.rollout_setup import make_args, write_jsonl
from tests.helpers.scripted_engine import Held, Reply, ScriptedEngine
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.vllm_rollout import generate_rollout
from vime.types import SampleStatus, StaleError, VersionSpan

EOS = 2
LETTER = {letter: number for number, letter in enumerate("abcdefghij", start=5)}
KEPT, MORE = 30, 31


class Rounds:
    """Rounds of 2 groups of 2 out of 4 that are asked for. The weights of version `served` answer `a` and `c` at once,
    and hold `b` and `d` after one token; whatever goes on behind that token gets one more and ends."""

    def __init__(self, directory, model_dir, *flags):
        data = write_jsonl(directory / "prompts.jsonl", [{"input": letter, "label": letter} for letter in LETTER])
        self.engine = ScriptedEngine(lambda request: self.script(request))
        self.engine.__enter__()
        self.served, self.slow = 4, {LETTER["b"], LETTER["d"]}
        self.args = make_args(
            "--hf-checkpoint", model_dir, "--vllm-router-ip", "127.0.0.1", "--vllm-router-port", self.engine.port,
            "--prompt-data", data, "--label-key", "label", "--rm-type", "exact_match", "--rollout-batch-size", 2,
            "--n-samples-per-prompt", 2, "--rollout-max-response-len", 8, "--rollout-timeout-secs", 30,
            "--over-sampling-batch-size", 4, "--vllm-server-concurrency", 64, "--partial-rollout", *flags,
        )  # fmt: skip
        self.source = RolloutDataSourceWithBuffer(self.args)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.__exit__(None, None, None)

    def script(self, request):
        version = str(self.served)
        if request.token_ids[-1] == KEPT:
            return Reply(token_ids=[MORE, EOS], version=version, log_prob=-0.25)
        if request.token_ids[-1] in self.slow:
            return Held(Reply(token_ids=[KEPT], version=version))
        return Reply(token_ids=[request.token_ids[-1], EOS], version=version)

    def play(self, rollout_id):
        self.served = rollout_id
        return generate_rollout(self.args, rollout_id, self.source)

    def play_two(self):
        """Round 4, which cuts b and d, then round 5."""
        first = self.play(4)
        asked = len(self.engine.requests)
        return first, self.play(5), self.engine.requests[asked:]


def prompts_of(output):
    return [group[0].prompt for group in output.samples]


def test_cut_answers_are_gone_on_with_first_and_each_token_keeps_its_version(tmp_path, model_dir):
    with Rounds(tmp_path, model_dir, "--max-staleness", 1) as rounds:
        first, second, requests = rounds.play_two()
    assert (prompts_of(first), prompts_of(second)) == (["a", "c"], ["b", "d"])
    assert first.metrics["rollout/partial_groups"] == first.metrics["rollout/aborted_groups"] == 2
    assert first.metrics["rollout/partial_tokens"] == 4  # one token of each of two samples of two groups
    assert (second.metrics["rollout/resumed_groups"], second.metrics["rollout/resumed_tokens"]) == (2, 4)
    continued = [request for request in requests if request["token_ids"][-1] == KEPT]
    assert [request["sampling_params"]["n"] for request in continued] == [2, 2]  # their tokens are still equal
    assert {request["sampling_params"]["max_tokens"] for request in continued} == {7}  # 8, less the one that is there
    for sample in second.samples[0]:
        assert sample.tokens[-4:] == [LETTER["b"], KEPT, MORE, EOS]
        assert sample.rollout_log_probs == [-0.5, -0.25, -0.25]
        assert sample.token_policy_versions == [VersionSpan(4, 0, 1), VersionSpan(5, 1, 3)]
        assert (sample.loss_mask, sample.status, sample.rollout_id) == ([1, 1, 1], SampleStatus.COMPLETED, 5)
    rows = trained_rows(rounds.args, second.samples, 5)[0]
    assert [row.oldest_version for row in rows] == [4, 4]


def test_at_staleness_0_tokens_of_the_round_before_are_context_and_no_loss(tmp_path, model_dir):
    with Rounds(tmp_path, model_dir, "--mixed-version-policy", "mask") as rounds:
        _, second, _ = rounds.play_two()
    assert prompts_of(second) == ["b", "d"]
    assert {tuple(sample.loss_mask) for group in second.samples for sample in group} == {(0, 1, 1)}
    assert second.metrics["rollout/masked_tokens"] == 4
    rows = [row for group in trained_rows(rounds.args, second.samples, 5) for row in group]
    assert {row.oldest_version for row in rows} == {5}


def test_tokens_that_no_round_may_train_any_more_are_sampled_again(tmp_path, model_dir):
    with Rounds(tmp_path, model_dir, "--max-staleness", 1) as rounds:
        rounds.play(4)
        rounds.slow = set()
        output = rounds.play(6)  # tokens of version 4 would be two behind
    assert prompts_of(output)[0] == "b"
    assert output.samples[0][0].token_policy_versions == [VersionSpan(6, 0, 2)]
    assert (output.metrics["rollout/discarded_tokens"], output.metrics["rollout/resumed_tokens"]) == (4, 0)


@pytest.mark.parametrize(
    ("flags", "is_kept"), [(["--max-staleness", 1], True), (["--mixed-version-policy", "mask"], False)]
)
def test_a_surplus_group_that_had_finished_is_trained_next_unless_all_its_tokens_are_too_old(
    tmp_path, model_dir, flags, is_kept
):
    with Rounds(tmp_path, model_dir, *flags) as rounds:
        rounds.slow = set()
        first = rounds.play(4)
        left = sorted(set("abcd") - set(prompts_of(first)))
        asked = len(rounds.engine.requests)
        second = rounds.play(5)
        assert prompts_of(second)[: len(left)] == left
        again = {request["token_ids"][-1] for request in rounds.engine.requests[asked:]}
        unused = {LETTER[letter] for letter in left}
        assert unused & again == (set() if is_kept else unused)
    versions = {span.version for sample in second.samples[0] for span in sample.token_policy_versions}
    assert versions == ({4} if is_kept else {5})
    trained_rows(rounds.args, second.samples, 5)


def test_cut_answers_travel_with_the_checkpoint(tmp_path, model_dir):
    with Rounds(tmp_path, model_dir, "--max-staleness", 1) as rounds:
        rounds.play(4)
        state = json.loads(json.dumps(rounds.source.save(4)))
        rounds.source = RolloutDataSourceWithBuffer(rounds.args)
        rounds.source.load(state)
        output = rounds.play(5)
    assert prompts_of(output) == ["b", "d"]
    assert output.samples[0][0].token_policy_versions == [VersionSpan(4, 0, 1), VersionSpan(5, 1, 3)]


def test_an_answer_may_be_cut_in_every_round_until_it_is_finished(tmp_path, model_dir):
    with Rounds(tmp_path, model_dir, "--max-staleness", 2) as rounds:
        rounds.play(4)

        def script(request):  # in round 5 b and d stop again behind their first token
            if request.token_ids[-1] == KEPT and rounds.served == 5:
                return Held(Reply(token_ids=[MORE], version="5"))
            if request.token_ids[-1] == MORE:
                return Reply(token_ids=[EOS], version="6")
            return Reply(token_ids=[request.token_ids[-1], EOS], version=str(rounds.served))

        rounds.script = script
        assert prompts_of(rounds.play(5)) == ["e", "f"]
        output = rounds.play(6)
    assert prompts_of(output) == ["b", "d"]
    assert output.samples[1][1].token_policy_versions == [VersionSpan(v, v - 4, v - 3) for v in (4, 5, 6)]


def test_without_the_mask_older_tokens_are_refused_at_staleness_0(tmp_path, model_dir):
    with Rounds(tmp_path, model_dir, "--max-staleness", 1) as rounds:
        _, second, _ = rounds.play_two()
    strict = make_args("--hf-checkpoint", model_dir, "--rm-type", "exact_match")
    with pytest.raises(StaleError, match=r"versions \[4, 5\] in round 5, expected 5\.\.5"):
        trained_rows(strict, second.samples, 5)


def test_evaluation_is_not_cut_by_a_round_that_ends(tmp_path, model_dir):
    data = write_jsonl(tmp_path / "eval.jsonl", [{"input": "e", "label": "e"}])
    with Rounds(tmp_path, model_dir, "--max-staleness", 1, "--eval-prompt-data", "own", data) as rounds:
        rounds.play(4)
        output = generate_rollout(rounds.args, 4, rounds.source, evaluation=True)
    assert [sample.reward for sample in output.data["own"]] == [1.0]


def test_every_number_is_on_the_page_of_metrics(tmp_path, model_dir):
    with Rounds(tmp_path, model_dir, "--max-staleness", 1) as rounds:
        _, second, _ = rounds.play_two()
    assert "rollout/resumed_tokens" in second.metrics
    assert undocumented(second.metrics) == []
