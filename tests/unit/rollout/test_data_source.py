"""Prompt files and the data source: what is refused, in which order prompts come, what a restart continues."""

import json
from pathlib import Path

import pytest

from tests.helpers.rollout_setup import make_args, write_jsonl, write_model_directory
from vime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from vime.rollout.plugins import load_data_source
from vime.types import ConfigError, DataError, PluginError, SampleStatus


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_directory(tmp_path_factory.mktemp("model"), positions=64)


@pytest.fixture
def five(tmp_path):
    """Prompts a=, b=, ... e= with labels A..E."""
    return write_jsonl(
        tmp_path / "five.jsonl", [{"input": f"{c}=", "label": c.upper(), "metadata": {"c": c}} for c in "abcde"]
    )


def source(model_dir, data, *flags, kind=RolloutDataSourceWithBuffer):
    return kind(
        make_args("--hf-checkpoint", model_dir, "--prompt-data", data, "--label-key", "label",
                  "--n-samples-per-prompt", 2, *flags)
    )  # fmt: skip


def texts(groups):
    return [group[0].prompt for group in groups]


def test_a_group_holds_n_pending_samples_with_prompt_tokens_label_and_metadata(model_dir, five):
    (group,) = source(model_dir, five).get_samples(1)
    # <bos> is 1; letters start at 5 in the order of the alphabet, so a = 5; digits 31..40; " :=" 41, 42, 43.
    assert [sample.tokens for sample in group] == [[1, 5, 43], [1, 5, 43]]
    assert [(sample.label, sample.metadata, sample.status) for sample in group] == [
        ("A", {"c": "a"}, SampleStatus.PENDING)
    ] * 2
    group[0].metadata["c"] = "changed"
    assert group[1].metadata == {"c": "a"}


def test_indexes_grow_over_epochs_and_name_each_sample_once(model_dir, five):
    data = source(model_dir, five)
    groups = [group for _ in range(4) for group in data.get_samples(3)]  # 12 groups of 5 prompts: epochs 0, 1, 2
    assert [group[0].group_index for group in groups] == list(range(12))
    assert [sample.index for group in groups for sample in group] == list(range(24))
    assert texts(groups) == [f"{c}=" for c in "abcdeabcdeab"]
    assert data.epoch == 2


def test_shuffle_depends_on_seed_and_epoch_and_keeps_every_prompt(model_dir, five):
    first = texts(source(model_dir, five, "--rollout-shuffle").get_samples(10))
    again = texts(source(model_dir, five, "--rollout-shuffle").get_samples(10))
    other = texts(source(model_dir, five, "--rollout-shuffle", "--rollout-seed", 7).get_samples(10))
    assert first == again != other
    assert sorted(first[:5]) == sorted(first[5:]) == [f"{c}=" for c in "abcde"]
    assert first[:5] != first[5:]


@pytest.mark.parametrize("drawn", [0, 3, 5, 7])
def test_a_restored_source_continues_where_the_saved_one_stood(model_dir, five, drawn):
    running = source(model_dir, five, "--rollout-shuffle")
    running.get_samples(drawn)
    state = json.loads(json.dumps(running.save(4)))
    restored = source(model_dir, five, "--rollout-shuffle")
    restored.load(state)
    assert [[s.to_dict() for s in g] for g in restored.get_samples(8)] == [
        [s.to_dict() for s in g] for g in running.get_samples(8)
    ]


def test_unused_groups_come_first_and_survive_a_restart(model_dir, five):
    running = source(model_dir, five)
    groups = running.get_samples(3)
    running.add_samples([groups[2], groups[0]])
    restored = source(model_dir, five)
    restored.load(json.loads(json.dumps(running.save(0))))
    assert restored.buffer_length == 2
    assert [group[0].group_index for group in restored.get_samples(3)] == [0, 2, 3]
    assert len(restored) == 5


FILTERS = Path(__file__).parents[2] / "helpers" / "slime_plugins" / "buffer_filters.py"


def test_a_filter_of_slime_takes_from_the_buffer_and_what_it_forgets_is_dropped(model_dir, five):
    data = source(model_dir, five, "--buffer-filter-path", f"{FILTERS}:pop_newest")
    data.add_samples(data.get_samples(4))  # 0 to 3 wait
    assert data.take_dropped() == []
    assert [group[0].group_index for group in data.get_samples(1)] == [3]
    assert [group[0].group_index for group in data.take_dropped()] == [0]  # 1 and 2 are left
    assert data.take_dropped() == []
    assert [group[0].group_index for group in data.get_samples(3)] == [2, 1, 4]  # then fresh ones


def test_what_a_filter_answers_leaves_the_buffer_also_when_it_forgets_to(model_dir, five):
    data = source(model_dir, five, "--buffer-filter-path", f"{FILTERS}:leaves_them")
    data.add_samples(data.get_samples(2))
    assert [group[0].group_index for _ in range(3) for group in data.get_samples(1)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("twice", "returned group 0 twice"),
        ("made_up", "returned a group that is not in the buffer"),
        ("too_many", "returned 3 groups, expected a list of at most 2"),
        ("adds", "put a group into the buffer"),
    ],
)
def test_a_filter_that_would_break_a_group_is_named(model_dir, five, name, says):
    data = source(model_dir, five, "--buffer-filter-path", f"{FILTERS}:{name}")
    data.add_samples(data.get_samples(3))
    with pytest.raises(PluginError, match=rf"--buffer-filter-path .*{name}: .*{says}"):
        data.get_samples(2)


def test_a_source_without_buffer_refuses_returned_groups(model_dir, five):
    data = source(model_dir, five, kind=RolloutDataSource)
    with pytest.raises(DataError, match="RolloutDataSourceWithBuffer"):
        data.add_samples(data.get_samples(1))


def test_resuming_on_other_prompts_is_refused(model_dir, five, tmp_path):
    state = source(model_dir, five).save(3)
    other = write_jsonl(tmp_path / "other.jsonl", [{"input": "z=", "label": "Z"}])
    with pytest.raises(DataError, match="differ from those of the checkpoint"):
        source(model_dir, other).load(state)


@pytest.mark.parametrize("change", [{"label": "B"}, {"metadata": {"level": 2}}, {"input": "b="}])
def test_resuming_on_a_changed_record_is_refused(model_dir, tmp_path, change):
    record = {"input": "a=", "label": "A", "metadata": {"level": 1}}
    before = source(model_dir, write_jsonl(tmp_path / "before.jsonl", [record]))
    same = source(model_dir, write_jsonl(tmp_path / "same.jsonl", [dict(reversed(record.items()))]))
    same.load(before.save(3))  # the order of keys is not the data
    after = source(model_dir, write_jsonl(tmp_path / "after.jsonl", [record | change]))
    with pytest.raises(DataError, match=r"differ from those of the checkpoint \(round 3\).*labels, metadata"):
        after.load(before.save(3))


@pytest.mark.parametrize(("part", "expected"), [("[1:3]", "bc"), ("[:2]", "ab"), ("[3:]", "de"), ("[-2:]", "de")])
def test_a_slice_takes_those_records(model_dir, five, part, expected):
    data = source(model_dir, f"{five}@{part}")
    assert texts(data.get_samples(len(data))) == [f"{c}=" for c in expected]


def test_parquet_records_read_like_jsonl(model_dir, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"input": "a=", "label": "A"}, {"input": "b=", "label": "B"}]), path)
    groups = source(model_dir, path).get_samples(2)
    assert [(group[0].prompt, group[0].label) for group in groups] == [("a=", "A"), ("b=", "B")]


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ('{"input": "a=", "label": "A"}\n{oops\n', (), r"data\.jsonl:2: not JSON"),
        ('{"input": "a=", "label": "A"}\n\n["b="]\n', (), r"data\.jsonl:3: got a JSON list"),
        (
            '{"question": "a=", "label": "A"}\n',
            (),
            r"data\.jsonl:1: no key 'input' \(--input-key\); the record has: label, question",
        ),
        ('{"input": "a="}\n', (), r"data\.jsonl:1: no key 'label' \(--label-key\)"),
        ('{"input": "a=", "label": "A", "metadata": 3}\n', (), r"data\.jsonl:1: 'metadata' is int"),
        ('{"input": 3, "label": "A"}\n', (), r"data\.jsonl:1: the prompt is int, expected text"),
        ("", (), "no records there"),
        ("\n\n", (), "no records there"),
        (
            '{"input": "abc=", "label": "A"}\n',
            ("--rollout-max-prompt-len", 4, "--refuse-long-prompts"),
            r"jsonl:1: the prompt has 5 tokens, --rollout-max-prompt-len is 4",
        ),
        (
            '{"input": "abc=", "label": "A"}\n',
            ("--rollout-max-context-len", 5, "--refuse-long-prompts"),
            r"jsonl:1: the prompt has 5 tokens and the context is 5",
        ),
        ('{"input": "' + "a" * 63 + '", "label": "A"}\n', (), r"the prompt has 64 tokens and the context is 64"),
        ('{"input": "a=", "label": "A"}\n', ("--apply-chat-template",), "has no chat template"),
    ],
)  # fmt: skip
def test_a_bad_prompt_file_is_refused_at_construction(model_dir, tmp_path, content, flags, message):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        source(model_dir, path, *flags)


def test_a_key_with_a_dot_goes_into_an_object(model_dir, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"input": "a=", "reward_model": {"ground_truth": "A", "style": "rule"}}\n')
    made = source(model_dir, path, "--label-key", "reward_model.ground_truth")
    assert made.get_samples(1)[0][0].label == "A"
    with pytest.raises(DataError, match=r"jsonl:1, reward_model: no key 'truth' \(--label-key\); the record has: gr"):
        source(model_dir, path, "--label-key", "reward_model.truth")


def test_prompts_that_are_too_long_are_left_out_and_counted(model_dir, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f'{{"input": "{text}=", "label": "A"}}\n' for text in ("a", "abcd", "b", "abc")))
    made = source(model_dir, path, "--rollout-max-prompt-len", 4)  # <bos> a = are three tokens, <bos> abc = five
    assert (len(made), made.num_too_long) == (2, 2)
    assert [group[0].prompt for group in made.get_samples(2)] == ["a=", "b="]
    with pytest.raises(DataError, match=r"all 4 prompts are too long.*jsonl:1"):
        source(model_dir, path, "--rollout-max-prompt-len", 2)


def test_missing_files_and_unreadable_ones_are_refused(model_dir, tmp_path, five):
    with pytest.raises(DataError, match="no such file"):
        source(model_dir, tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"expected|Expected path@\[start:stop\]"):
        source(model_dir, f"{five}@[a:b]")
    with pytest.raises(DataError, match="no records there"):
        source(model_dir, f"{five}@[9:]")
    binary = tmp_path / "data.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        source(model_dir, binary)
    (tmp_path / "data.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        source(model_dir, tmp_path / "data.parquet")
    with pytest.raises(DataError, match="no tokenizer there"):
        source(tmp_path, five)


def test_a_chat_template_renders_messages_and_tools(tmp_path):
    from transformers import AutoTokenizer

    directory = write_model_directory(tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = (
        "{{ prefix }}{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    tokenizer.save_pretrained(directory)
    tool = {"type": "function", "function": {"name": "t", "parameters": {}}}
    data = write_jsonl(
        tmp_path / "chat.jsonl",
        [
            {"input": "ab", "label": "A", "tools": [tool]},
            {"input": [{"role": "user", "content": "c"}], "label": "C", "tools": []},
        ],
    )
    chat = source(
        directory,
        data,
        "--apply-chat-template",
        "--tool-key",
        "tools",
        "--apply-chat-template-kwargs",
        '{"prefix": "z"}',
    )
    first, second = (group[0] for group in chat.get_samples(2))
    assert (first.prompt, second.prompt) == ("ztab=", "zc=")
    # The template decides on special tokens: no <bos> is added to its text. z = 30, t = 24, a = 5, b = 6, "=" 43.
    assert first.tokens == [30, 24, 5, 6, 43]
    assert first.metadata == {"tools": [tool]}


class TestReasoningGym:
    def test_generators_are_mixed_in_turn_and_equal_for_equal_seeds(self, tmp_path):
        pytest.importorskip("reasoning_gym")
        directory = write_model_directory(tmp_path, positions=4096)
        flags = ("--hf-checkpoint", directory, "--reasoning-gym", "chain_sum,spell_backward", "--reasoning-gym-size", 3)
        first, again = (load_data_source(make_args(*flags)) for _ in range(2))
        assert len(first) == 6
        groups = first.get_samples(6)
        assert texts(groups) == texts(again.get_samples(6))
        assert [group[0].metadata["reasoning_gym"]["task"] for group in groups] == ["chain_sum", "spell_backward"] * 3

    def test_an_unknown_generator_is_refused_with_near_matches(self, tmp_path):
        pytest.importorskip("reasoning_gym")
        args = make_args("--hf-checkpoint", write_model_directory(tmp_path), "--reasoning-gym", "chain_sums")
        with pytest.raises(ConfigError, match="near matches: chain_sum"):
            load_data_source(args)


def test_a_data_source_without_the_methods_is_refused(tmp_path):
    plugin = tmp_path / "half.py"
    plugin.write_text("class Half:\n    def __init__(self, args): pass\n    def get_samples(self, n): return []\n")
    with pytest.raises(ConfigError, match="Half has no add_samples, save, load, __len__"):
        load_data_source(make_args("--data-source-path", f"{plugin}:Half"))


def test_another_data_file_is_recognised_before_anything_is_restored(model_dir, tmp_path):
    flags = ("--hf-checkpoint", model_dir, "--prompt-data")
    mine = RolloutDataSource(make_args(*flags, write_jsonl(tmp_path / "a.jsonl", [{"input": "a="}])))
    other = RolloutDataSource(make_args(*flags, write_jsonl(tmp_path / "b.jsonl", [{"input": "b="}])))
    mine.recognise(mine.save(0))
    with pytest.raises(DataError, match="the prompts differ from those of the checkpoint"):
        other.recognise(mine.save(0))


def test_a_prompt_with_an_id_beyond_the_embedding_is_refused_with_its_line(tmp_path):
    model = write_model_directory(tmp_path / "model")
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"vocab_size": 20}))
    data = write_jsonl(tmp_path / "z.jsonl", [{"input": "a"}, {"input": "z"}])  # a is 5, z is 30
    with pytest.raises(DataError, match=r"z.jsonl:2: the prompt has token id 30, but the embedding .* has 20 rows"):
        RolloutDataSource(make_args("--hf-checkpoint", model, "--prompt-data", data))


def test_a_directory_without_a_tokenizer_is_named_and_no_record_is_blamed(tmp_path):
    model = write_model_directory(tmp_path / "model")
    for file in (*model.glob("tokenizer*"), *model.glob("special*")):
        file.unlink()
    data = write_jsonl(tmp_path / "a.jsonl", [{"input": "a"}])
    with pytest.raises(DataError, match=r"--hf-checkpoint .*: no tokenizer there") as refusal:
        RolloutDataSource(make_args("--hf-checkpoint", model, "--prompt-data", data))
    assert "Remove the record" not in str(refusal.value)


def test_a_tokenizer_that_makes_nothing_of_a_prompt_is_named_before_the_record(tmp_path):
    """transformers takes a Qwen2's tokenizer for one of bytes, whatever the file says of itself."""
    model = write_model_directory(tmp_path / "model")
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"model_type": "qwen2"}))
    (model / "tokenizer.json").write_text(
        json.dumps(json.loads((model / "tokenizer.json").read_text()) | {"post_processor": None})
    )
    data = write_jsonl(tmp_path / "a.jsonl", [{"input": "\u00e9\u00e9"}])
    with pytest.raises(DataError, match=r"a.jsonl:1: the tokenizer of --hf-checkpoint .* makes no tokens of 'éé'"):
        RolloutDataSource(make_args("--hf-checkpoint", model, "--prompt-data", data))
