"""`vime plan --like`: schedules whose time can be counted by hand, and costs that come back from a run's records."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.recorded_run import CROWDED_S, GROUP_S, PROMPT_S, ROUNDS, TOKEN_S, record_run
from vime.config.checks import resolve
from vime.config.parse import Config, parse
from vime.observability.forecast import Forecast, _Engine, _Group, forecast
from vime.observability.unit_costs import UnitCosts, measure, recorded_config
from vime.types import ConfigError, DataError

NOTHING = UnitCosts(
    group_s=0.0,
    prompt_s=0.0,
    token_s=0.0,
    crowded_token_s=0.0,
    round_s=0.0,
    trained_token_s=0.0,
    hand_over_s=0.0,
    update_s=0.0,
    pause_s=0.0,
    agreement_s=0.0,
    rest_s=0.0,
    prompt_tokens=0.0,
    dropped_share=0.0,
    lengths=((10,),),
)


def config(*flags: str) -> Config:
    given = ("--device", "cpu", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", *flags)
    return resolve(parse(given))


def costs(**given: float | tuple[tuple[int, ...], ...]) -> UnitCosts:
    return dataclasses.replace(NOTHING, **given)


def streaming(staleness: int, *flags: str) -> Config:
    return config("--transferqueue-mode", "streaming", "--max-staleness", str(staleness), *flags)


def test_off_is_the_sum_of_its_parts() -> None:
    """Eight completions of 10 tokens at once; 80 tokens and 8 prompts of 5 are trained."""
    found = forecast(
        config(),
        costs(
            group_s=0.3,
            prompt_s=0.25,
            token_s=0.5,
            crowded_token_s=0.125,
            round_s=2.0,
            trained_token_s=0.0625,
            hand_over_s=0.5,
            update_s=1.0,
            rest_s=0.75,
            prompt_tokens=5.0,
        ),
    )
    generated = 4 * 0.25 + 10 * (0.5 + 7 * 0.125) + 0.3
    trained = 2.0 + (80 + 40) * 0.0625
    assert found.round_s == pytest.approx(generated + trained + 0.5 + 1.0 + 0.75)
    assert found.tokens_per_sec == pytest.approx(80 / found.round_s)
    assert found.trainers_busy == pytest.approx(trained / found.round_s)
    assert found.staleness == 0


@pytest.mark.parametrize(("trained_s", "slower"), [(3.0, 5.0), (9.0, 9.0)])
def test_the_overlapped_schedule_takes_as_long_as_the_slower_side(trained_s: float, slower: float) -> None:
    given = costs(token_s=0.5, round_s=trained_s, update_s=1.0)
    found = forecast(config("--max-staleness", "1"), given, overlaps=True)
    assert (found.round_s, found.staleness) == (pytest.approx(slower + 1.0), 1)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_in_the_order_of_prompts_every_round_is_as_stale_as_it_may_be(staleness: int) -> None:
    given = costs(token_s=0.5, round_s=2.0, lengths=((4, 9), (11, 3), (1, 30)))
    found = forecast(streaming(staleness), given, overlaps=staleness > 0)
    assert found.staleness == staleness


def test_streaming_without_staleness_is_as_fast_as_off() -> None:
    given = costs(token_s=0.5, round_s=2.0, update_s=1.0, lengths=((4, 9), (11, 3), (1, 30)))
    assert forecast(streaming(0), given).round_s == pytest.approx(forecast(config(), given).round_s)


def test_a_staleness_bound_hides_the_long_tail() -> None:
    given = costs(token_s=0.5, lengths=((4, 9), (11, 3), (1, 30), (2, 2)), round_s=3.0)
    rates = [forecast(streaming(bound), given, overlaps=bound > 0).tokens_per_sec for bound in (0, 1, 2, 4)]
    assert rates == sorted(rates)
    assert rates[-1] > 1.5 * rates[0]
    assert rates[-1] == pytest.approx(4 * 15.5 / 3.0, rel=0.2)  # the trainers never wait


def test_more_engines_help_where_completions_share_one_and_not_where_trainers_are_waited_for() -> None:
    crowded = costs(token_s=0.1, crowded_token_s=0.1, round_s=1.0)
    one, four = (forecast(config(), crowded, num_engines=count) for count in (1, 4))
    assert (one.round_s, four.round_s) == (pytest.approx(10 * 0.8 + 1.0), pytest.approx(10 * 0.2 + 1.0))
    trained = dataclasses.replace(crowded, round_s=50.0)
    one, four = (forecast(streaming(1), trained, num_engines=count, overlaps=True) for count in (1, 4))
    assert one.round_s == four.round_s == pytest.approx(50.0)
    assert four.engines_busy < one.engines_busy


def test_prompts_that_wait_for_a_place_are_of_newer_weights() -> None:
    given = costs(token_s=0.5)
    assert forecast(streaming(3), given, overlaps=True).staleness == 3
    few = streaming(3, "--vllm-server-concurrency", "2")
    assert forecast(few, given, overlaps=True).staleness < 1.5


def test_in_the_order_of_completion_long_completions_get_too_old_and_are_dropped_or_repeated() -> None:
    given = costs(token_s=0.5, lengths=((4, 9), (11, 3), (1, 60), (2, 2)))

    def mean_length(found: Forecast) -> float:
        return found.tokens_per_sec * found.round_s / 8

    order = ("--transferqueue-round-order", "commit")
    dropped = forecast(streaming(1, *order), given, overlaps=True)
    assert dropped.staleness < 1
    assert mean_length(dropped) < 0.7 * mean_length(forecast(streaming(1), given, overlaps=True))


def test_dropped_groups_are_generated_for_nothing() -> None:
    given = costs(token_s=0.1, crowded_token_s=0.1)
    alone = forecast(streaming(1), given, overlaps=True)
    half = forecast(streaming(1), dataclasses.replace(given, dropped_share=0.5), overlaps=True)
    assert half.tokens_per_sec == pytest.approx(alone.tokens_per_sec / 2, rel=0.15)
    off, half_off = forecast(config(), given), forecast(config(), dataclasses.replace(given, dropped_share=0.5))
    assert half_off.tokens_per_sec < 0.75 * off.tokens_per_sec


@pytest.mark.parametrize("mode", ["off", "streaming"])
def test_runs_that_dropped_everything_are_refused_instead_of_played_for_ever(mode: str) -> None:
    given = costs(token_s=0.1, dropped_share=1.0)
    with pytest.raises(ConfigError, match=r"no round would be whole: \d+ groups .* 1\.00\) or too old"):
        forecast(streaming(1) if mode == "streaming" else config(), given)


def test_engines_do_nothing_while_they_are_paused_for_an_update() -> None:
    """Two rounds under way; the trainers are never waited for."""
    given = costs(token_s=1.0, update_s=0.5)
    free, paused = (
        forecast(streaming(1), dataclasses.replace(given, pause_s=pause_s), overlaps=True) for pause_s in (0.0, 0.5)
    )
    assert paused.round_s > free.round_s + 0.2


def test_an_engine_that_was_idle_begins_when_it_is_asked() -> None:
    engine = _Engine(costs(token_s=2.0))
    engine.add(_Group(0, (10, 30), left=2), at=100.0)
    assert engine.next_end() == pytest.approx(120.0)
    engine.go_to(120.0)
    engine.end_one()
    assert (engine.next_end(), engine.busy_s) == (pytest.approx(160.0), pytest.approx(20.0))


def test_what_got_too_old_is_gone_or_comes_again() -> None:
    given = costs(token_s=0.5, round_s=0.1, lengths=((4, 9), (1, 90)))
    order = ("--transferqueue-round-order", "commit", "--stale-policy")
    dropped, repeated = (forecast(streaming(1, *order, policy), given, overlaps=True) for policy in ("drop", "retry"))
    # tokens of a round: whether long completions are among them
    assert repeated.tokens_per_sec * repeated.round_s > 1.1 * dropped.tokens_per_sec * dropped.round_s


def test_only_stale_rounds_are_scored_again() -> None:
    given = costs(token_s=0.5, agreement_s=7.0)
    assert forecast(config(), given).round_s == pytest.approx(5.0)
    assert forecast(streaming(1), given, overlaps=True).round_s >= 7.0


def test_the_overlapped_schedule_publishes_when_the_next_round_is_handed_over() -> None:
    given = costs(token_s=0.5, round_s=0.5, hand_over_s=1.0, update_s=2.0)
    found = forecast(config("--max-staleness", "1"), given, overlaps=True)
    assert found.round_s == pytest.approx(5.0 + 1.0 + 2.0)


def test_what_was_asked_for_beyond_a_round_comes_again_as_long_as_it_was() -> None:
    given = costs(token_s=0.5, lengths=((4, 9), (11, 3), (1, 60), (2, 2)))
    more = forecast(config("--over-sampling-batch-size", "6"), given)
    exact = forecast(config(), given)
    assert more.tokens_per_sec * more.round_s == pytest.approx(exact.tokens_per_sec * exact.round_s, rel=0.1)


def test_slots_are_free_when_weights_are_served() -> None:
    given = costs(token_s=0.5, round_s=1.0)
    every_second = forecast(streaming(2, "--update-weights-interval", "2"), given, overlaps=True)
    assert every_second.staleness == pytest.approx(1.5, abs=0.05)


# ---- costs from what a run recorded ----


def test_costs_come_back_from_the_records_and_the_first_rounds_do_not_count(tmp_path: Path) -> None:
    found = measure([record_run(tmp_path)], config("--rollout-max-response-len", "64"))
    assert found.group_s == pytest.approx(GROUP_S, rel=1e-4)
    assert found.prompt_s == pytest.approx(PROMPT_S, rel=1e-4)
    assert found.token_s == pytest.approx(TOKEN_S, rel=1e-4)
    assert found.crowded_token_s == pytest.approx(CROWDED_S, rel=1e-4)
    assert (found.round_s, found.trained_token_s) == (pytest.approx(2.0), pytest.approx(0.125))
    assert found.hand_over_s == pytest.approx(0.5, rel=1e-4)
    assert (found.update_s, found.pause_s, found.agreement_s) == (0.75, 0.5, 0.0625)
    assert found.rest_s == pytest.approx(0.375)
    assert (found.prompt_tokens, found.dropped_share) == (3.0, pytest.approx(0.25))
    assert [len(found.lengths), found.lengths[0], found.lengths[-1]] == [22, (5, 5), (64, 64)]


def test_groups_whose_completions_were_not_kept_were_under_way_too(tmp_path: Path) -> None:
    """Of a large round only every n-th group is kept for looking at."""
    path = record_run(tmp_path, [*ROUNDS, (8, 20), (6, 30), (4, 50), (2, 12)])
    for file in (path / "samples").glob("round_*.jsonl.gz"):
        head, *groups = gzip.decompress(file.read_bytes()).decode().splitlines()
        file.write_bytes(gzip.compress("\n".join([head, *groups[::2]]).encode() + b"\n"))
    found = measure([path], config("--rollout-max-response-len", "64"))
    assert (found.group_s, found.prompt_s) == (pytest.approx(GROUP_S, rel=1e-3), pytest.approx(PROMPT_S, rel=1e-3))
    assert (found.token_s, found.crowded_token_s) == (
        pytest.approx(TOKEN_S, rel=1e-3),
        pytest.approx(CROWDED_S, rel=1e-3),
    )


def test_lengths_are_of_runs_with_the_same_limit_else_of_all_and_cut(tmp_path: Path) -> None:
    short, long = record_run(tmp_path / "short"), record_run(tmp_path / "long", most=128)
    same = measure([short, long], config("--rollout-max-response-len", "128"))
    other = measure([short, long], config("--rollout-max-response-len", "16"))
    assert len(same.lengths) == 22
    assert len(other.lengths) == 44
    assert max(max(lengths) for lengths in other.lengths) == 16


READY = (3, 4, 5, 6)


def test_a_round_that_was_ready_before_it_was_asked_for_says_nothing_of_the_hand_over(tmp_path: Path) -> None:
    path = record_run(tmp_path, mode="streaming")
    events = path / "events/rollout-manager.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for line in lines:
        if line["name"] == "plan_round" and line["rollout_id"] in READY:
            line["t"] += 60.0  # whole long before they were asked for
        if line["name"] == "generate_round" and line["rollout_id"] in READY:
            line["t"] += 60.0
            line["duration_s"] = 1.0
    events.write_text("\n".join(map(json.dumps, lines)) + "\n")
    driver = path / "events/driver.jsonl"
    handed = [json.loads(line) for line in driver.read_text().splitlines()]
    for line in handed:
        line["t"] += 60.0 if line["rollout_id"] in READY else 0.0
    driver.write_text("\n".join(map(json.dumps, handed)) + "\n")
    assert measure([path], config()).hand_over_s == pytest.approx(0.5, rel=1e-4)


def test_what_is_no_run_or_too_short_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json: cannot be read: .*Expected what a run writes"):
        recorded_config(tmp_path)
    (tmp_path / "config.json").write_text('{"cluster": {"num_gpus": 3}}')
    with pytest.raises(DataError, match=r"no configuration that this version of Vime reads .*a run of this version"):
        recorded_config(tmp_path)
    with pytest.raises(DataError, match=r"2 rounds after the first 2 of each run, 6 groups .*\. Expected 3 rounds"):
        measure([record_run(tmp_path / "run", ROUNDS[:4])], config())
    shutil.rmtree(record_run(tmp_path / "kept-none") / "samples")
    with pytest.raises(DataError, match=r"6 rounds .*, 0 groups in samples/.*--keep-samples-mib above 0"):
        measure([tmp_path / "kept-none"], config())
