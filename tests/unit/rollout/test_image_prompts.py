"""Images of a record: to the prompt's tokens, to the engine's request and to the trainer's column."""

import asyncio
import base64
import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import tiny_images
from tests.helpers.kept import round_groups
from tests.helpers.ledger_cases import issue, open_ledger
from tests.helpers.long_run import write_run
from vime.cli.main import main
from vime.config.eval_sets import eval_sets
from vime.config.parse import Config
from vime.data.images import IMAGE_COLUMN, pack_images, prompt_fields, unpack_images
from vime.data.payload import bytes_to_samples, cut, samples_to_bytes
from vime.data.rows import TrainRow
from vime.observability.html_report import write_report
from vime.observability.samples import SampleStore
from vime.rollout import generation
from vime.rollout.convert import encoded_group, group_rows
from vime.rollout.data_check import data_faults
from vime.rollout.data_source import RolloutDataSource
from vime.rollout.drop_limit import DropStreak
from vime.rollout.evaluate import eval_groups
from vime.rollout.exchanges import Completion
from vime.rollout.group_worker import generate_and_rm_group, unusable_reason
from vime.rollout.images import read_images
from vime.rollout.prompts import read_prompts
from vime.rollout.record import save_samples
from vime.rollout.sft_rollout import generate_rollout
from vime.types import DataError, HandoffError, PluginError, Sample, SampleStatus, VersionSpan

KEYS = '{"image": "images"}'
URL = f"data:image/png;base64,{base64.b64encode(tiny_images.png('red')).decode()}"
CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What colour ?"}]}]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_images.make_idefics3(tmp_path_factory.mktemp("vision"))


def arguments(model: Path, records: list[dict[str, Any]], directory: Path, **flags: Any) -> Any:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    chosen = {"hf_checkpoint": str(model), "prompt_data": str(path), "multimodal_keys": KEYS, **flags}
    return Config().replace(**chosen).flat


def test_a_chat_with_an_image_has_the_tokens_that_the_processor_makes(vision: Path, tmp_path: Path) -> None:
    args = arguments(vision, [{"input": CHAT, "images": [URL]}], tmp_path, apply_chat_template=True)
    [prompt] = read_prompts(args, args.prompt_data, flag="--prompt-data")
    # USER, the image, What colour ?, ASSISTANT
    assert list(prompt.token_ids) == [8, *tiny_images.IMAGE_IDS, 10, 11, 12, 9]
    assert prompt.images is not None
    assert prompt.images.inputs() == {"images": [URL], "prompt_ids": [8, 3, 10, 11, 12, 9], "prompt_length": 12}


def test_paths_bytes_base64_and_data_urls_are_the_same_image(vision: Path, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(tiny_images.png("red"))
    encoded = base64.b64encode(tiny_images.png("red")).decode()
    given = ["red.png", [str(tmp_path / "red.png")], encoded, URL, {"path": "red.png", "bytes": None}]
    args = arguments(vision, [{"input": "USER <image> ?", "images": one} for one in given], tmp_path)
    prompts = read_prompts(args, args.prompt_data, flag="--prompt-data")
    assert all(prompt.images for prompt in prompts)
    read = [(prompt.images.inputs(), prompt.images.digests) for prompt in prompts if prompt.images]
    assert read == [read[0]] * len(given)
    assert read[0][0]["images"] == [URL]


def test_a_record_without_images_is_text(vision: Path, tmp_path: Path) -> None:
    args = arguments(vision, [{"input": "USER What ?"}], tmp_path)
    [prompt] = read_prompts(args, args.prompt_data, flag="--prompt-data")
    assert (prompt.token_ids, prompt.images) == ((8, 10, 12), None)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("none.png", "'none.png': there is no such file"),
        ("broken.png", "'broken.png' cannot be opened"),
        ("cut.png", "'cut.png' cannot be opened"),
        (7, "got int"),
        ("data:image/png;base64,AAAA", "cannot be opened"),
        (URL + "\n", "its base64 cannot be read"),
        ("http://127.0.0.1/red.png", "there is no such file"),
        ("~nobody-of-this-name/red.png", "there is no such file"),
        ("moving.gif", "'moving.gif' is GIF"),
        ({"url": "red.png"}, "got NoneType"),
    ],
)
def test_a_broken_image_is_refused_with_file_and_line_before_the_start(
    vision: Path, tmp_path: Path, image: object, said: str
) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "cut.png").write_bytes(tiny_images.png("red", side=64)[:-40])
    frames = [tiny_images.picture(colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    records = [{"input": "USER <image> ?", "images": [URL]}, {"input": "USER <image> ?", "images": [URL, image]}]
    args = arguments(vision, records, tmp_path, custom_rm_path="x:y")
    faults = list(data_faults(args))
    assert len(faults) == 1
    for part in (f"{tmp_path / 'prompts.jsonl'}:2: image 2 of 2", said, "Expected a PNG, JPEG or WebP image"):
        assert part in faults[0]


@pytest.mark.parametrize("cuts", range(3))
def test_no_bytes_of_a_broken_image_are_an_unknown_error(vision: Path, tmp_path: Path, cuts: int) -> None:
    """100 files, each with a few other bytes and one of three cut off: read, or refused with file and line."""
    chance, whole = random.Random(cuts), tiny_images.png("red", side=24)
    for _ in range(100):
        broken = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        end = chance.randrange(len(broken)) if chance.random() < 1 / 3 else len(broken)
        args = arguments(vision, [], tmp_path)
        try:
            read_images(args, {"images": {"bytes": bytes(broken[:end]), "path": None}}, tmp_path, "file:1")
        except DataError as error:
            assert str(error).startswith("file:1: image 1 of 1 ('images'): ")  # noqa: PT017  some are read


def test_an_image_token_without_an_image_is_refused_with_its_line(vision: Path, tmp_path: Path) -> None:
    """The trainer would look for its image, in the middle of the run."""
    said = r"prompts.jsonl:1: 0 images, but the prompt has 1 times '<image>'. Give its images under the key"
    args = arguments(vision, [{"input": "USER <image> ?"}], tmp_path)
    with pytest.raises(DataError, match=said):
        read_prompts(args, args.prompt_data, flag="--prompt-data")
    chat = [{"role": "user", "content": "What <image> ?"}, {"role": "assistant", "content": "red"}]
    args = arguments(vision, [{"input": chat}], tmp_path, apply_chat_template=True, loss_type="sft_loss")
    with pytest.raises(DataError, match=said):
        read_prompts(args, args.prompt_data, flag="--prompt-data")


def test_images_of_several_turns_are_taken_in_their_order(vision: Path, tmp_path: Path) -> None:
    """Two pictures, of which one is shown twice; the second turn begins behind an answer."""
    again = [{"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "image"}, {"type": "image"}]}]
    chat = [*CHAT, {"role": "assistant", "content": "red"}, *again]
    blue = f"data:image/png;base64,{tiny_base64('blue')}"
    args = arguments(vision, [{"input": chat, "images": [URL, blue, URL]}], tmp_path, apply_chat_template=True)
    [prompt] = read_prompts(args, args.prompt_data, flag="--prompt-data")
    image = tiny_images.IMAGE_IDS
    # USER image What colour ?, ASSISTANT red, USER and image image, ASSISTANT
    assert list(prompt.token_ids) == [8, *image, 10, 11, 12, 9, 14, 8, 13, *image, *image, 9]
    assert prompt.images is not None
    assert prompt.images.inputs()["images"] == [URL, blue, URL]
    assert prompt.images.prompt_ids == (8, 3, 10, 11, 12, 9, 14, 8, 13, 3, 3, 9)


@pytest.mark.parametrize("size", [(1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (1, 5000), (5000, 1)])
def test_an_image_of_any_form_has_its_places_and_pixels(vision: Path, tmp_path: Path, size: tuple[int, int]) -> None:
    """Sides of 1 and 3 could be taken for colours."""
    from PIL import Image

    Image.new("RGB", size, (9, 99, 199)).save(tmp_path / "one.png")
    args = arguments(vision, [{"input": "USER <image> ?", "images": "one.png"}], tmp_path, n_samples_per_prompt=1)
    [row] = group_rows(args, [finished(args)])
    assert (row.tokens == tiny_images.IMAGE_TOKEN).sum() == tiny_images.IMAGE_TOKENS + 1  # one was sampled
    cell = row.extra[IMAGE_COLUMN]
    assert isinstance(cell, bytes)
    assert unpack_images(cell, "row")["pixel_values"].shape == (1, 3, tiny_images.SIDE, tiny_images.SIDE)


def test_as_many_places_as_images_are_demanded(vision: Path, tmp_path: Path) -> None:
    args = arguments(vision, [{"input": "USER <image> ?", "images": [URL, URL]}], tmp_path)
    with pytest.raises(DataError, match=r":1: 2 images, but the prompt has 1 times '<image>'"):
        read_prompts(args, args.prompt_data, flag="--prompt-data")


def test_a_conversation_to_imitate_is_refused_with_its_images(vision: Path, tmp_path: Path) -> None:
    record = {"input": [*CHAT, {"role": "assistant", "content": "red"}], "images": [URL]}
    args = arguments(vision, [record], tmp_path, apply_chat_template=True, loss_type="sft_loss")
    with pytest.raises(DataError, match=r":1: a conversation to imitate with images"):
        read_prompts(args, args.prompt_data, flag="--prompt-data")


def files_and_source(vision: Path, directory: Path, **flags: Any) -> tuple[list[Path], Any, RolloutDataSource]:
    """Two prompts, each with a file; two samples a prompt."""
    files = [directory / "red.png", directory / "blue.png"]
    for file in files:
        file.write_bytes(tiny_images.png(file.stem))
    records = [{"input": "USER <image> ?", "images": file.name, "label": file.stem} for file in files]
    args = arguments(vision, records, directory, label_key="label", n_samples_per_prompt=2, **flags)
    return files, args, RolloutDataSource(args)


def test_a_file_is_read_when_its_prompt_is_issued_and_not_kept(vision: Path, tmp_path: Path) -> None:
    files, _, source = files_and_source(vision, tmp_path)
    for file in files:
        encoded = base64.b64encode(file.read_bytes()).decode()
        assert encoded not in repr(source._prompts)
        [group] = source.get_samples(1)
        assert [sample.multimodal_inputs["images"] for sample in group if sample.multimodal_inputs] == [
            [f"data:image/png;base64,{encoded}"]
        ] * 2
    assert source.group_at(0) == RolloutDataSource(source._args).get_samples(1)[0]  # a restart gives the same
    assert "base64" not in repr(source._prompts)


CHANGES = {
    "gone": (lambda file: file.unlink(), "No such file or directory"),
    "shorter": (lambda file: file.write_bytes(b"PNG"), "it has 3 bytes"),
    "other": (lambda file: file.write_bytes(bytes(file.stat().st_size)), "it has other content of the same length"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_group_of_a_file_that_changed_is_dropped_with_a_reason_and_no_other(
    vision: Path, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    files, args, source = files_and_source(vision, tmp_path)
    how, said = CHANGES[change]
    how(files[1])
    good, bad = source.get_samples(2)
    assert (unusable_reason(good), [sample.status for sample in good]) == (None, [SampleStatus.PENDING] * 2)
    done = asyncio.run(generate_and_rm_group(args, bad, {"temperature": 1.0, "top_p": 1.0, "max_tokens": 4}))
    assert unusable_reason(done) == "image_changed"  # no engine was asked: there is none
    where = f"{tmp_path / 'prompts.jsonl'}:2: image 1 of 1 ('images'): {files[1]} has changed since the run started"
    for part in (where, said, "expected the", "Put the file back"):
        assert part in caplog.text
        assert part in done[0].metadata["image_changed"]


def test_a_run_of_which_every_image_is_gone_ends_and_says_what_to_do(vision: Path, tmp_path: Path) -> None:
    _, args, _ = files_and_source(vision, tmp_path, max_dropped_in_a_row=2)
    streak = DropStreak(args)
    streak.dropped("image_changed")
    with pytest.raises(PluginError, match=r"by reason: image_changed 2\..*Image files were changed .*: put them back"):
        streak.dropped("image_changed")


def test_a_label_to_imitate_is_not_trained_without_its_image(vision: Path, tmp_path: Path) -> None:
    """A rollout function that leaves no group out."""
    files, args, source = files_and_source(vision, tmp_path, rollout_batch_size=2)
    files[1].unlink()
    with pytest.raises(DataError, match=r":2: image 1 of 1 .*blue.png has changed since the run started"):
        generate_rollout(args, 0, source)


def test_in_reference_mode_and_in_an_evaluation_a_changed_file_ends_the_run(vision: Path, tmp_path: Path) -> None:
    files, args, source = files_and_source(vision, tmp_path, reference_mode=True)
    sets = eval_sets(args.config.replace(eval_prompt_data=["held_out", str(args.prompt_data)]))
    prompts = read_prompts(args, args.prompt_data, flag="--eval-prompt-data")
    files[1].unlink()
    for read in (lambda: source.get_samples(2), lambda: source.group_at(1), lambda: eval_groups(sets[0], prompts, 0)):
        with pytest.raises(DataError, match=r":2: image 1 of 1 \('images'\): .*blue.png has changed since the run"):
            read()


def finished(args: Any) -> Sample:
    [[sample]] = RolloutDataSource(args).get_samples(1)
    sample.append_response_tokens([20, tiny_images.IMAGE_TOKEN], [-1.0, -2.0], versions=[VersionSpan(0, 0, 2)])
    sample.reward, sample.status = 1.0, SampleStatus.COMPLETED
    return sample


def test_a_row_holds_what_the_processor_makes_of_its_images(vision: Path, tmp_path: Path) -> None:
    record = {"input": "USER <image> and <image> ?", "images": [URL, tiny_base64("blue")]}
    args = arguments(vision, [record], tmp_path, n_samples_per_prompt=1)
    [row] = group_rows(args, [finished(args)])
    cell = row.extra[IMAGE_COLUMN]
    assert isinstance(cell, bytes)
    found = unpack_images(cell, "row")
    pictures = [tiny_images.picture("red"), tiny_images.picture("blue")]
    expected = tiny_images.processed(vision, record["input"], pictures)
    for name in ("pixel_values", "pixel_attention_mask"):
        np.testing.assert_array_equal(found[name], expected[name][0].numpy())


def tiny_base64(colour: str) -> str:
    return base64.b64encode(tiny_images.png(colour)).decode()


def test_the_engine_gets_one_image_token_an_image_and_what_was_sampled_as_it_is(vision: Path, tmp_path: Path) -> None:
    args = arguments(vision, [{"input": "USER <image> ?", "images": URL}], tmp_path, n_samples_per_prompt=1)
    sample = finished(args)
    assert sample.multimodal_inputs is not None
    assert prompt_fields(sample.tokens, sample.multimodal_inputs) == {
        "token_ids": [8, 3, 12, 20, 3],
        "content_parts": [{"type": "image_url", "url": URL}],
        "return_token_ids": True,
    }
    assert prompt_fields(sample.tokens, None) == {"token_ids": sample.tokens}


@dataclass
class Engine:
    """Each completion is cut after its first token, and ends with its second."""

    asked: list[tuple[int, int, object]] = field(default_factory=list)  # tokens, completions, images

    async def generate(
        self, token_ids: list[int], sampling_params: object, *, n: int = 1, session_id: str = "", images: Any = None
    ) -> list[Completion]:
        self.asked.append((len(token_ids), n, images and images["images"]))
        assert len(self.asked) < 20, f"asked again and again: {self.asked}"
        ends = "stop" if token_ids[-1] == 20 else "abort"
        given = {"token_ids": (20,), "log_probs": (-1.0,), "versions": [VersionSpan(0, 0, 1)]}
        return [Completion(**given, finish_reason=ends) for _ in range(n)]  # type: ignore[arg-type]


def test_a_request_is_shared_by_samples_of_equal_images_and_a_cut_completion_goes_on_with_its_own(
    vision: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are those of any picture: USER, 7 of the image and ?"""
    engine = Engine()
    monkeypatch.setattr(generation, "engine_client", lambda _: engine)
    record = {"input": "USER <image> ?", "images": URL}
    args = arguments(vision, [record], tmp_path, n_samples_per_prompt=3, mixed_version_policy="mask")
    blue = f"data:image/png;base64,{tiny_base64('blue')}"
    for changed, shared in ([], 3), ([2], 0):
        engine.asked.clear()
        [group] = RolloutDataSource(args).get_samples(1)
        for place in changed:
            group[place].multimodal_inputs = {**(group[place].multimodal_inputs or {}), "images": [blue]}
        pictures = [[blue] if place in changed else [URL] for place in range(3)]
        asyncio.run(generation.generate_group(args, group, {"temperature": 1.0, "top_p": 1.0, "max_tokens": 2}))
        first = [(9, 3, [URL])] if shared else [(9, 1, picture) for picture in pictures]
        assert sorted(engine.asked, key=repr) == sorted([*first, *((10, 1, picture) for picture in pictures)], key=repr)
        assert [sample.tokens[9:] for sample in group] == [[20, 20]] * 3


def test_images_come_back_from_the_spool(vision: Path, tmp_path: Path) -> None:
    args = arguments(vision, [{"input": "USER <image> ?", "images": URL}], tmp_path, n_samples_per_prompt=1)
    sample = finished(args)
    [back] = bytes_to_samples(samples_to_bytes([sample]))
    assert back.multimodal_inputs == sample.multimodal_inputs
    assert group_rows(args, [back]) == group_rows(args, [sample])


def test_other_images_are_other_prompts_for_a_checkpoint(vision: Path, tmp_path: Path) -> None:
    states = []
    for image in (URL, tiny_base64("blue")):
        args = arguments(vision, [{"input": "USER <image> ?", "images": image}], tmp_path)
        states.append(RolloutDataSource(args).save(0)["fingerprint"])
    assert states[0] != states[1]


def test_bytes_of_images_count_when_rows_are_cut_into_chunks() -> None:
    cell = pack_images({"pixel_values": np.zeros((1, 3, 200, 200), dtype=np.float32)})  # 480 kB: more than a chunk
    rows = [row_with(cell) for _ in range(3)]
    assert [len(chunk) for chunk in cut(rows)] == [1, 1, 1]
    assert [len(chunk) for chunk in cut([row_with(b"") for _ in range(3)])] == [3]


def test_the_images_of_rows_count_for_the_bytes_that_the_queue_may_hold(vision: Path, tmp_path: Path) -> None:
    """--transferqueue-max-bytes: 16 x 16 pixels of 3 colours, 4 bytes each, and 16 x 16 of the mask are 3,328 bytes."""
    sizes = []
    for record in ({"input": "USER <image> ?", "images": URL}, {"input": "USER ?"}):
        args = arguments(vision, [record], tmp_path, n_samples_per_prompt=1)
        sizes.append(encoded_group(args, [finished(args)]).num_bytes)
    assert 3328 < sizes[0] - sizes[1] < 4500
    ledger = open_ledger(tmp_path, max_bytes=sizes[0] + sizes[1] - 1)
    one, other = issue(ledger, 2)
    assert ledger.prompts.admit(one, num_tokens=1, num_bytes=sizes[0]).granted
    assert "bytes" in ledger.prompts.admit(other, num_tokens=1, num_bytes=sizes[1]).waits_for
    ledger.close()


def test_neither_the_kept_samples_nor_the_page_of_a_run_hold_images(
    vision: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page of a long run stays under 10 MB. What is shown of a prompt is its text."""
    run = write_run(tmp_path / "run", num_rounds=3, groups=2)
    before = (write_report(run) or Path()).stat().st_size
    args = arguments(vision, [{"input": CHAT, "images": tiny_base64("red")}], tmp_path, apply_chat_template=True)
    [[sample, *_]] = RolloutDataSource(args).get_samples(1)
    large = "data:image/png;base64," + base64.b64encode(os.urandom(2 << 20)).decode()  # nothing that gzip makes smaller
    sample.multimodal_inputs = {**(sample.multimodal_inputs or {}), "images": [large]}
    sample.append_response_tokens([20], [-1.0], versions=[VersionSpan(0, 0, 1)])
    sample.response, sample.reward, sample.status = "red", 1.0, SampleStatus.COMPLETED
    SampleStore(run, 1 << 30).write(2, round_groups([[sample]]), [])
    save_samples(run / "eval" / "held_out_2.jsonl", [sample])
    assert sum(file.stat().st_size for file in (run / "samples").iterdir()) < 100_000
    assert (write_report(run) or Path()).stat().st_size < before + 100_000
    assert main(["samples", str(run), "--round", "2", "--best"]) == 0
    shown = capsys.readouterr().out
    assert "USER <image> What colour ?" in shown
    assert "base64" not in shown


def row_with(cell: bytes) -> TrainRow:
    return TrainRow(
        sample_index=0,
        group_index=0,
        rollout_id=0,
        tokens=np.asarray([1, 2], dtype=np.int32),
        response_length=1,
        loss_mask=np.ones(1, dtype=np.uint8),
        rollout_log_probs=np.zeros(1, dtype=np.float32),
        token_policy_versions=(VersionSpan(0, 0, 1),),
        reward=0.0,
        raw_reward=0.0,
        status="completed",
        truncated=False,
        extra={IMAGE_COLUMN: cell},
    )


def test_a_cell_that_is_no_image_names_its_row() -> None:
    with pytest.raises(HandoffError, match="sample 3 of group 1: its multimodal_train_inputs cannot be read"):
        unpack_images(b"something else", "sample 3 of group 1")
