"""argv becomes frozen sections and back; unknown and out-of-range flags are refused with a suggestion."""

import json
import pickle

import pytest

from vime.config.flags import flag_name, knobs
from vime.config.parse import SECTIONS, Args, Config, build_parser, dump, iter_flags, parse
from vime.types import ConfigError


def test_unknown_flag_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean --rollout-batch-size\? See"):
        parse(["--rollout-batchsize", "4"])


def test_abbreviated_flags_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown flag --rollout-batch"):
        parse(["--rollout-batch", "4"])


def test_a_value_out_of_range_is_refused_naming_the_range() -> None:
    with pytest.raises(ConfigError, match=r"--rollout-top-p: got 1\.5, expected 0 to 1"):
        parse(["--rollout-top-p", "1.5"])


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="--lr: got nan, expected a number"):
        parse(["--lr", "nan"])


def test_a_value_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="--lr: invalid float value"):
        parse(["--lr", "fast"])


def test_a_wrong_choice_is_refused_listing_the_choices() -> None:
    with pytest.raises(ConfigError, match="invalid choice: 'nfs'"):
        parse(["--update-weight-transport", "nfs"])


def test_vllm_and_router_flags_pass_through_with_their_values() -> None:
    config = parse(["--vllm-max-num-seqs", "8", "--lr", "1e-3", "--router-log-level", "debug"])
    assert config.vllm_flags == ("--max-num-seqs", "8")
    assert config.router_flags == ("--log-level", "debug")
    assert config.optimizer.lr == 1e-3


def test_config_survives_json() -> None:
    config = parse(["--rollout-stop", "a", "b", "--eval-prompt-data", "x", "y.jsonl"])
    assert Config.from_dict(json.loads(dump(config))) == config


def test_args_reads_every_flag_by_name_and_is_frozen() -> None:
    args = parse(["--rollout-batch-size", "7"]).flat
    assert args.rollout_batch_size == 7
    for _, _, spec in iter_flags():
        getattr(args, spec.name)
    assert args.has_sets is False  # what a section makes of its flags is read the same way
    with pytest.raises(AttributeError, match="frozen"):
        args.rollout_batch_size = 8
    with pytest.raises(AttributeError, match="no 'rollout_batchsize'"):
        _ = args.rollout_batchsize


def test_args_survives_pickling() -> None:
    args = parse(["--lr", "0.5"]).flat
    copy = pickle.loads(pickle.dumps(args))
    assert isinstance(copy, Args)
    assert copy.lr == 0.5


def test_replace_changes_by_flag_name_and_refuses_unknown_names() -> None:
    config = parse([])
    assert config.replace(lr=0.25, run_dir="x").optimizer.lr == 0.25
    assert config.optimizer.lr != 0.25
    with pytest.raises(ConfigError, match="no flag is called"):
        config.replace(learning_rate=1)


def test_flag_names_are_unique_and_every_flag_has_a_help_text() -> None:
    names = [name for _, name, _ in iter_flags()]
    assert len(names) == len(set(names))
    for _, name, spec in iter_flags():
        assert spec.metadata["help"], name
        assert flag_name(spec) == name


def test_help_is_readable_by_group() -> None:
    text = build_parser().format_help()
    assert "--transferqueue-max-staleness" in text
    assert "Queue: how rollouts reach the trainer" in text


def test_every_switch_given_by_its_own_name_is_on() -> None:
    """`--no-save-optim` once was the opposite of a flag that does not exist, and without effect."""
    for section in SECTIONS.values():
        for kind, spec in knobs(section):
            if kind is bool:
                assert getattr(parse([flag_name(spec)]).flat, spec.name) is True, flag_name(spec)
