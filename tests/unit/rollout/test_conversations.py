"""Conversations to imitate: every turn of the assistant is trained, up to the token that ends it, and nothing else."""

import pytest

from tests.helpers.converted import trained_rows
from tests.helpers.rollout_setup import make_args, write_jsonl, write_model_directory
from vime.rollout.data_source import RolloutDataSource
from vime.rollout.prompts import load_tokenizer
from vime.rollout.sft_rollout import generate_rollout
from vime.types import DataError

# "=" stands before what the assistant says, <eos> and "+" behind it; the user's words end with "-".
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}={{ m['content'] }}<eos>+"
    "{% else %}{{ m['content'] }}-{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
FORGETFUL = TEMPLATE.replace("={{ m['content'] }}", "={{ m['content'] if loop.last else '' }}")
TALK = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "23"},
    {"role": "user", "content": "4"},
    {"role": "assistant", "content": "5"},
]


def source(directory, records, *more, template=TEMPLATE, positions=32):
    model = write_model_directory(directory / "model", positions=positions)
    load_tokenizer.cache_clear()
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    load_tokenizer.cache_clear()
    args = make_args(
        *("--hf-checkpoint", model, "--prompt-data", write_jsonl(directory / "data.jsonl", records)),
        *("--input-key", "messages", "--n-samples-per-prompt", "1", "--loss-type", "sft_loss"),
        *("--rollout-batch-size", "1", *more),
    )
    return args, RolloutDataSource(args)


def test_each_turn_of_the_assistant_is_trained_and_nothing_else(tmp_path):
    args, prompts = source(tmp_path, [{"messages": TALK}])
    output = generate_rollout(args, 2, prompts)
    (row,) = trained_rows(args, output.samples, 2)[0]
    tokenizer = load_tokenizer(args.hf_checkpoint)
    words = [tokenizer.decode([token]) for token in row.tokens]
    assert words == ["1", "-", "=", "2", "3", "<eos>", "+", "4", "-", "=", "5", "<eos>", "+"]
    trained = [word for word, kept in zip(words[-row.response_length :], row.loss_mask, strict=True) if kept]
    assert trained == ["2", "3", "<eos>", "5", "<eos>"]
    assert row.response_length == 10  # behind "1-=", the prompt
    assert row.oldest_version == 2


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"jsonl:1: the chat template writes earlier turns differently"):
        source(tmp_path, [{"messages": TALK}], template=FORGETFUL)


def test_a_conversation_needs_a_template_and_a_first_word_of_the_user(tmp_path):
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        source(tmp_path, [{"messages": TALK}], template=None)


def test_a_conversation_beyond_the_context_is_left_out(tmp_path):
    args, prompts = source(tmp_path, [{"messages": TALK}, {"messages": TALK * 3}], positions=13)
    assert (len(prompts), prompts.num_too_long) == (1, 1)  # 13 tokens fill 13 positions: nothing is to be generated
    assert generate_rollout(args, 0, prompts).samples[0][0].response_length == 10
