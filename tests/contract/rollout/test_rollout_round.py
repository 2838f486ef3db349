"""One round against a scripted engine: filter, over-sampling, surplus, order, deadline, plug-ins, evaluation."""

import math
from pathlib import Path

import pytest

from tests.helpers.kept import round_groups
from tests.helpers.rollout_setup import make_args, write_jsonl
from tests.helpers.scripted_engine import Hang, Reply, ScriptedEngine
from vime.observability.samples import read_fates, read_round
from vime.rollout import evaluate
from vime.rollout.data_source import RolloutDataSourceWithBuffer
from vime.rollout.sample_recorder import RECORDER
from vime.rollout.vllm_rollout import close_generation, generate_rollout, generation_progress
from vime.types import DataError, PluginError, RewardError, SampleStatus, WaitTimeoutError

EOS = 2
LETTER = {letter: number for number, letter in enumerate("abcdefghij", start=5)}


@pytest.fixture
def play(model_dir, tmp_path):
    """play(engine, *flags): a round of 2 groups of 2 over prompts a, b, ... j whose labels are themselves."""
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"input": letter, "label": letter} for letter in LETTER])

    def run(engine, *flags, source=None, evaluation=False):
        args = make_args(
            "--hf-checkpoint", model_dir, "--vllm-router-ip", "127.0.0.1", "--vllm-router-port", engine.port,
            "--prompt-data", data, "--label-key", "label", "--rm-type", "exact_match", "--rollout-batch-size", 2,
            "--n-samples-per-prompt", 2, "--rollout-max-response-len", 8, "--rollout-timeout-secs", 30, *flags,
        )  # fmt: skip
        source = source or RolloutDataSourceWithBuffer(args)
        return generate_rollout(args, 4, source, evaluation=evaluation), source

    yield run
    close_generation()


def echo_first_sample(request):
    """The first sample of a group answers right, the others stop at once."""
    return Reply(token_ids=[request.token_ids[-1], EOS] if request.sample == 0 else [EOS], version="4")


def test_a_round_answers_whole_scored_groups_in_prompt_order(play):
    with ScriptedEngine(echo_first_sample) as engine:
        output, _ = play(engine)
    assert [[s.prompt for s in group] for group in output.samples] == [["a", "a"], ["b", "b"]]
    assert [[s.reward for s in group] for group in output.samples] == [[1.0, 0.0], [1.0, 0.0]]
    assert {s.rollout_id for group in output.samples for s in group} == {4}
    metrics = output.metrics
    assert metrics["rollout/reward_mean"] == 0.5
    assert metrics["rollout/response_len_mean"] == 1.5  # lengths 2, 1, 2, 1
    assert (metrics["rollout/response_len_p50"], metrics["rollout/response_len_p95"]) == (1.0, 2.0)
    assert (metrics["rollout/num_tokens"], metrics["rollout/num_samples"], metrics["rollout/num_groups"]) == (6, 4, 2)
    assert (metrics["rollout/version_oldest"], metrics["rollout/version_newest"]) == (4, 4)
    assert (metrics["rollout/dropped_groups"], metrics["rollout/surplus_groups"]) == (0, 0)
    assert generation_progress().startswith("round 4: 2/2 groups, 0 in flight, 6 tokens")


def test_the_filter_drops_groups_with_a_reason_and_new_prompts_replace_them(play):
    def script(request):
        letter = request.token_ids[-1]
        if letter == LETTER["a"]:
            return Reply(token_ids=[EOS])  # all wrong
        if letter == LETTER["b"]:
            return Reply(token_ids=[letter, EOS])  # all right
        return echo_first_sample(request)

    with ScriptedEngine(script) as engine:
        output, _ = play(engine, "--dynamic-sampling-filter-path", "vime.rollout.filter_hub.check_reward_nonzero_std")
    assert [group[0].prompt for group in output.samples] == ["c", "d"]
    assert output.metrics["rollout/dropped_zero_std_0"] == output.metrics["rollout/dropped_zero_std_1"] == 1
    assert output.metrics["rollout/dropped_groups"] == 2
    assert output.metrics["rollout/reward_mean_before_filter"] == 0.5  # (0 + 0 + 1 + 1 + 1 + 0 + 1 + 0) / 8


def test_the_answers_of_dropped_groups_are_kept_with_their_reason(play, tmp_path):
    def script(request):
        return Reply(token_ids=[EOS]) if request.token_ids[-1] == LETTER["a"] else echo_first_sample(request)

    RECORDER.open(tmp_path, max_bytes=1 << 20)
    try:
        with ScriptedEngine(script) as engine:
            output, _ = play(
                engine, "--dynamic-sampling-filter-path", "vime.rollout.filter_hub.check_reward_nonzero_std"
            )
        RECORDER.write_round(0, round_groups(output.samples))
    finally:
        RECORDER.close()
    kept, lost = read_fates(tmp_path)[0].kept, read_fates(tmp_path)[0].dropped
    assert kept == tuple(group[0].group_index for group in output.samples)
    assert list(lost) == ["zero_std_0"]
    [group] = [group for group in read_round(tmp_path, 0) if group.reason is not None]
    assert (group.reason, group.prompt, len(group.answers)) == ("zero_std_0", "a", 2)


def test_surplus_requests_are_aborted_and_their_prompts_come_first_next_time(play):
    def script(request):
        if request.token_ids[-1] in (LETTER["b"], LETTER["d"]):
            return Hang()
        return echo_first_sample(request)

    with ScriptedEngine(script) as engine:
        output, source = play(engine, "--over-sampling-batch-size", 4, "--vllm-server-concurrency", 4)
        assert engine.disconnected.wait(10)
    assert [group[0].prompt for group in output.samples] == ["a", "c"]
    assert output.metrics["rollout/aborted_groups"] == 2
    again = source.get_samples(3)
    assert [group[0].prompt for group in again] == ["b", "d", "e"]
    assert [(s.status, s.response_length, s.rollout_id) for s in again[0]] == [(SampleStatus.PENDING, 0, -1)] * 2


LAST_OF_FOUR = """
import asyncio
scored = asyncio.Event()

async def custom(args, sample, **kwargs):
    if sample.prompt == "d":
        scored.set()
    if sample.prompt == "a":
        await scored.wait()
        await asyncio.sleep(0.2)  # the three others are in by now
    return float(sample.index % 2)
"""


def test_reference_mode_keeps_who_was_asked_first_and_waits_for_the_slow(play, plugin_file):
    """Four prompts for a round of two, and `a` is scored last; who is fast first would be kept otherwise."""
    flags = ["--reference-mode", "--over-sampling-batch-size", 4, "--rollout-num-engines", 2]
    with ScriptedEngine(echo_first_sample) as engine:
        output, source = play(engine, *flags, "--custom-rm-path", f"{plugin_file(LAST_OF_FOUR)}:custom")
    assert [group[0].prompt for group in output.samples] == ["a", "b"]
    assert [group[0].prompt for group in source.get_samples(3)] == ["c", "d", "e"]
    assert (output.metrics["rollout/surplus_groups"], output.metrics["rollout/aborted_groups"]) == (2, 0)


def test_every_prompt_is_kept_or_handed_back(play):
    with ScriptedEngine(echo_first_sample) as engine:
        output, source = play(engine, "--over-sampling-batch-size", 6)
    kept = {group[0].prompt for group in output.samples}
    back = {group[0].prompt for group in source.get_samples(4)}
    assert kept | back == set("abcdef")
    assert output.metrics["rollout/surplus_groups"] + output.metrics["rollout/aborted_groups"] == 4


def test_an_engine_that_never_answers_meets_the_deadline_which_counts_the_groups(play):
    def script(request):
        return Hang() if request.token_ids[-1] == LETTER["b"] else echo_first_sample(request)

    with (
        ScriptedEngine(script) as engine,
        pytest.raises(WaitTimeoutError, match=r"waited 5 s for round 4: 1 of 2 groups ready, 1 in flight"),
    ):
        play(engine, "--rollout-timeout-secs", 5)  # in which the other one is answered, on any machine


def test_an_exhausted_source_is_said(play):
    class Empty:
        def get_samples(self, num_groups):
            return []

    with (
        ScriptedEngine(echo_first_sample) as engine,
        pytest.raises(DataError, match="round 4: the data source is exhausted with 0 of 2 groups kept"),
    ):
        play(engine, source=Empty())


@pytest.fixture
def plugin_file(tmp_path):
    def write(text):
        path = tmp_path / "plugins.py"
        path.write_text("import math, time\nfrom vime.types import *\n" + text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def keep(args, samples): raise KeyError('x')", r"raised KeyError: 'x' \(at .*It was given a group of 2"),
        ("def keep(args, samples): return 1", "returned int, expected bool"),
    ],
)
def test_a_faulty_filter_ends_the_round_and_is_named(play, plugin_file, text, message):
    with ScriptedEngine(echo_first_sample) as engine, pytest.raises(PluginError, match=message):
        play(engine, "--dynamic-sampling-filter-path", f"{plugin_file(text)}:keep")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("async def custom(args, sample, **kwargs): return math.nan", r"custom, sample \d: got nan, expected a finite"),
        ("async def custom(args, sample): 1 / 0", r"custom, sample \d: raised ZeroDivisionError"),
        ("def custom(args, sample): time.sleep(60)", r"custom, sample \d: did not return within 0.2 s"),
        ("async def custom(args, sample): return 'good'", r"custom, sample \d: got str 'good'"),
    ],
)
def test_a_faulty_reward_function_ends_the_round_and_is_named(play, plugin_file, text, message):
    limit_s = 0.2 if "did not return" in message else 60
    with ScriptedEngine(echo_first_sample) as engine, pytest.raises(RewardError, match=message):
        play(engine, "--custom-rm-path", f"{plugin_file(text)}:custom", "--rm-timeout-secs", limit_s)


GENERATE = "from vime.rollout.generation import generate\nimport copy\nasync def custom(args, sample, params):\n    "


def test_a_custom_generate_function_may_fan_out_and_set_rewards(play, plugin_file):
    text = GENERATE + (
        "sample = await generate(args, sample, params)\n"
        "    twin = copy.deepcopy(sample); twin.reward = 9.0; twin.index += 1000  # a sample of its own\n"
        "    return [sample, twin]\n"
    )
    with ScriptedEngine(echo_first_sample) as engine:
        output, _ = play(engine, "--custom-generate-function-path", f"{plugin_file(text)}:custom")
    assert [[s.reward for s in group] for group in output.samples] == [[1.0, 9.0, 1.0, 9.0]] * 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "returned NoneType, expected a Sample"),
        ("return []", "returned an empty list"),
        ("return sample", "status is still pending"),
        ("raise ValueError('no')", "raised ValueError: no"),
    ],
)
def test_a_faulty_generate_function_ends_the_round_and_is_named(play, plugin_file, body, message):
    with ScriptedEngine(echo_first_sample) as engine, pytest.raises(PluginError, match=rf"sample \d.*{message}"):
        play(engine, "--custom-generate-function-path", f"{plugin_file(GENERATE + body)}:custom")


def test_a_failed_sample_drops_its_group_with_that_reason(play, plugin_file):
    text = GENERATE + (
        "sample = await generate(args, sample, params)\n"
        "    if sample.prompt == 'a': sample.status = SampleStatus.FAILED\n"
        "    return sample\n"
    )
    with ScriptedEngine(echo_first_sample) as engine:
        output, _ = play(engine, "--custom-generate-function-path", f"{plugin_file(text)}:custom")
    assert output.metrics["rollout/dropped_failed"] == 1
    assert "a" not in {group[0].prompt for group in output.samples}


def test_group_rewards_are_asked_once_for_each_group(play, plugin_file):
    text = "async def custom(args, samples, **kwargs): return [s.index / 10 for s in samples]"
    with ScriptedEngine(echo_first_sample) as engine:
        output, _ = play(engine, "--custom-rm-path", f"{plugin_file(text)}:custom", "--group-rm")
    assert [[s.reward for s in group] for group in output.samples] == [[0.0, 0.1], [0.2, 0.3]]


def test_the_sample_filter_marks_samples_that_leave_the_loss(play, plugin_file):
    text = "def mark(args, groups):\n    for group in groups: group[0].remove_sample = True"
    with ScriptedEngine(echo_first_sample) as engine:
        output, _ = play(engine, "--rollout-sample-filter-path", f"{plugin_file(text)}:mark")
    assert [[s.remove_sample for s in group] for group in output.samples] == [[True, False]] * 2
    assert output.metrics["rollout/removed_samples"] == 2


def test_evaluation_uses_its_own_data_and_sampling_and_leaves_the_source_alone(play, tmp_path):
    held_out = write_jsonl(tmp_path / "eval.jsonl", [{"input": "i", "label": "i"}, {"input": "j", "label": "a"}])
    with ScriptedEngine(echo_first_sample) as engine:
        output, source = play(
            engine, "--eval-prompt-data", "tiny", held_out, "--eval-temperature", 0.5, "--eval-max-response-len", 3,
            "--n-samples-per-eval-prompt", 2, evaluation=True,
        )  # fmt: skip
    assert {(b["sampling_params"]["temperature"], b["sampling_params"]["max_tokens"]) for b in engine.requests} == {
        (0.5, 3)
    }
    assert [sample.prompt for sample in output.data["tiny"]] == ["i", "i", "j", "j"]
    assert output.metrics["eval/tiny/reward_mean"] == 0.25  # only the first sample of "i" is right
    assert output.metrics["eval/tiny/response_len_mean"] == 1.5
    assert output.metrics["eval/tiny/truncated_ratio"] == 0
    assert source.get_samples(1)[0][0].group_index == 0


def test_what_a_buffer_filter_forgets_is_counted_as_dropped(play):
    """Of groups 2 to 6, which wait, the filter takes 6 and 5, leaves 4 and 3, and forgets 2."""
    filters = Path(__file__).parents[2] / "helpers" / "slime_plugins" / "buffer_filters.py"
    flags = ["--buffer-filter-path", f"{filters}:pop_newest"]
    with ScriptedEngine(echo_first_sample) as engine:
        _, source = play(engine, *flags)  # groups 0 and 1 are trained
        source.add_samples(source.get_samples(5))  # 2 to 6 wait
        output, _ = play(engine, *flags, source=source)
    assert [group[0].group_index for group in output.samples] == [5, 6]
    assert output.metrics["rollout/dropped_buffer_filter"] == output.metrics["rollout/dropped_groups"] == 1  # 2
    assert source.buffer_length == 2


def test_evaluation_sets_share_one_deadline(play, tmp_path, monkeypatch):
    own = [write_jsonl(tmp_path / f"{letter}.jsonl", [{"input": letter, "label": letter}]) for letter in "ij"]
    deadlines, evaluate_set = [], evaluate._evaluate

    async def note(one, rollout_id, prompts, ends):
        deadlines.append((one.name, ends))
        return await evaluate_set(one, rollout_id, prompts, ends)

    monkeypatch.setattr(evaluate, "_evaluate", note)
    with ScriptedEngine(echo_first_sample) as engine:
        play(engine, "--eval-prompt-data", "first", own[0], "second", own[1], evaluation=True)
    assert [name for name, _ in deadlines] == ["first", "second"]
    assert deadlines[0][1] == deadlines[1][1]


def test_a_round_that_failed_leaves_the_loop_fit_for_the_next_one(play, plugin_file):
    with ScriptedEngine(echo_first_sample) as engine:
        bad = plugin_file("def keep(args, samples): return 1")
        with pytest.raises(PluginError):
            play(engine, "--dynamic-sampling-filter-path", f"{bad}:keep")
        output, _ = play(engine)
    assert math.isclose(output.metrics["rollout/reward_mean"], 0.5)


def test_rows_of_one_sample_of_which_only_some_have_a_reward_are_refused_by_name(play, plugin_file):
    """Scored, the reward that the plug-in gave would be lost without a word."""
    text = GENERATE + (
        "sample = await generate(args, sample, params)\n"
        "    twin = copy.deepcopy(sample); twin.reward = 9.0\n"
        "    return [sample, twin]\n"
    )
    with ScriptedEngine(echo_first_sample) as engine, pytest.raises(PluginError, match="only some of them have a rew"):
        play(engine, "--custom-generate-function-path", f"{plugin_file(text)}:custom")
