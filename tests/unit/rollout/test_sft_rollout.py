"""Labels of a data file become answers to imitate."""

import pytest

from tests.helpers.converted import trained_rows
from tests.helpers.rollout_setup import make_args, write_jsonl, write_model_directory
from vime.config.checks import check, resolve
from vime.config.parse import parse
from vime.rollout.data_source import RolloutDataSource
from vime.rollout.prompts import load_tokenizer
from vime.rollout.sft_rollout import generate_rollout
from vime.types import ConfigError, DataError, VersionSpan


def flags(directory, records, *more):
    model = write_model_directory(directory / "model", positions=16)
    (model / "model.safetensors").write_bytes(b"")
    data = write_jsonl(directory / "data.jsonl", records)
    return [
        *("--hf-checkpoint", model, "--prompt-data", data, "--label-key", "label", "--n-samples-per-prompt", "1"),
        *("--loss-type", "sft_loss", "--rollout-batch-size", "2", *more),
    ]


def test_a_label_becomes_trainable_tokens_of_the_rounds_version(tmp_path):
    args = make_args(*flags(tmp_path, [{"input": "1+1=", "label": "2"}, {"input": "2+2=", "label": "04"}]))
    output = generate_rollout(args, 3, RolloutDataSource(args))
    tokenizer = load_tokenizer(args.hf_checkpoint)
    rows = [group[0] for group in trained_rows(args, output.samples, 3)]
    assert [tokenizer.decode(row.tokens[-row.response_length : -1]).replace(" ", "") for row in rows] == ["2", "04"]
    assert [row.tokens[-1] for row in rows] == [tokenizer.eos_token_id] * 2
    assert [row.response_length for row in rows] == [2, 3]  # with the end of sequence
    assert [row.loss_mask.tolist() for row in rows] == [[1, 1], [1, 1, 1]]
    assert rows[1].token_policy_versions == (VersionSpan(3, 0, 3),)
    assert rows[0].reward == 0
    assert output.metrics["rollout/response_len_mean"] == 2.5


@pytest.mark.parametrize(
    ("label", "message"), [(7, "the label is 7"), ("", "the label is ''"), ("1" * 20, "context is 16")]
)
def test_a_label_that_cannot_be_imitated_is_refused(tmp_path, label, message):
    args = make_args(*flags(tmp_path, [{"input": "1+1=", "label": label}]))
    with pytest.raises(DataError, match=message):
        generate_rollout(args, 0, RolloutDataSource(args))


def test_training_alone_needs_recorded_rollouts_or_a_rollout_function_of_its_own(tmp_path):
    records = [{"input": "1+1=", "label": "2"}] * 2
    more = ["--debug-train-only", "--device", "cpu", "--num-rollout", "1", "--rollout-max-response-len", "8"]
    line = [str(flag) for flag in flags(tmp_path, records, *more)]
    with pytest.raises(ConfigError, match="--debug-train-only needs"):
        check(resolve(parse(line)))
    check(resolve(parse([*line, "--rollout-function-path", "vime.rollout.sft_rollout.generate_rollout"])))
