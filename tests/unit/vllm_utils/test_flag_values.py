"""A value that a server would not take is refused before the server starts, with what it would take."""

from __future__ import annotations

import argparse
import json

import pytest

from vime.backends.vllm_utils import launch
from vime.backends.vllm_utils.flag_values import FlagShape, check_values, shape_of
from vime.backends.vllm_utils.router import validate_router_flags
from vime.config.parse import parse
from vime.types import ConfigError


def server_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seqs", type=int)
    parser.add_argument("--memory", type=float)
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction)
    parser.add_argument("--level", choices=("low", "high"))
    parser.add_argument("--overrides", type=json.loads)
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--free")
    return parser


def known() -> dict[str, FlagShape]:
    bounds = {"--seqs": {"ge": 1.0}, "--memory": {"gt": 0.0, "le": 1.0}}
    return {
        option: shape_of(action, bounds.get(option))
        for action in server_parser()._actions
        for option in action.option_strings
    }


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--seqs many", "--x-seqs: got 'many', expected a whole number"),
        ("--seqs 1.5", "--x-seqs: got '1.5', expected a whole number"),
        ("--seqs 0", "--x-seqs: got 0, expected at least 1"),
        ("--seqs", "--x-seqs: S expects one value, got none"),
        ("--seqs 1 2", "--x-seqs: S expects one value, got '1 2'"),
        ("--memory 1.5", "--x-memory: got 1.5, expected above 0 and at most 1"),
        ("--eager true", "--x-eager: S expects no value, got 'true'. Remove it."),
        ("--level middle", "--x-level: got 'middle', expected one of low, high"),
        ("--overrides word", "--x-overrides: got 'word', expected a whole number or a number or JSON"),
        ("--names", "--x-names: S expects at least one value, got none"),
        ("--seq 1", "--x-seq: S has no flag --seq. Did you mean --x-seqs?"),
    ],
)
def test_an_impossible_value_is_named_with_what_is_expected(flags: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_values(flags.split(), known(), prefix="--x-", whose="S")
    assert says in str(refusal.value)


def test_every_fault_is_in_one_refusal() -> None:
    with pytest.raises(ConfigError, match=r"(?s)x-seqs.*x-memory.*x-nonsense"):
        check_values(["--seqs", "0", "--memory=2", "--nonsense"], known(), prefix="--x-", whose="S")


def test_possible_values_pass() -> None:
    flags = ["--seqs=4", "--memory", "0.5", "--no-eager", "--level", "low", "--names", "a", "b", "--free", "-1"]
    check_values([*flags, "--overrides", '{"a": 1}', "--overrides.b", "2"], known(), prefix="--x-", whose="S")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--router-polcy random", "vllm-router has no flag --polcy. Did you mean --router-policy?"),
        ("--router-retry-max-retries -3", "got -3, expected at least 0"),
        ("--router-request-timeout-secs 0", "got 0, expected at least 1"),
        ("--router-log-level loud", "got 'loud', expected one of debug"),
        ("--router-cache-threshold 7", "got 7, expected at least 0 and at most 1"),
        ("--router-mini-lb", "Vime decides the router's --mini-lb itself"),
    ],
)
def test_the_router_s_own_flags_are_checked_before_it_starts(flags: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        validate_router_flags(parse(flags.split()))
    assert says in str(refusal.value)


def test_the_engine_s_own_flags_are_checked_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "installed_flags", known)
    with pytest.raises(ConfigError, match=r"--vllm-seqs: got 0, expected at least 1"):
        launch.validate_vllm_flags(parse(["--vllm-seqs", "0"]))
    launch.validate_vllm_flags(parse(["--vllm-seqs", "2"]))
