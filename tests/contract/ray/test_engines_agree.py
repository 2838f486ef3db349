"""--check-weight-update-equal against a scripted engine, which scores every token of the probe with -1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.helpers import tiny_images, tiny_models
from tests.helpers.tied_engine import USES, RanksOf, TiedEngine
from vime.backends.vllm_utils.control import FleetControl
from vime.backends.vllm_utils.fake import FakeEngine
from vime.config.parse import Config
from vime.data.images import images_of
from vime.data.rows import TrainRow
from vime.ray.probe import check_engines_agree, compare_with_engines
from vime.types import EngineError, EngineReport, PublishError, SamplingRule, VersionSpan
from vime.weights.plan import TensorMeta
from vime.weights.publish import publish
from vime.weights.transports import make_sender

NUM_TOKENS = 15  # of the probe's answer


class Ranks:
    """`Trainers` whose score of the first tokens is off by these amounts."""

    def __init__(self, *off: float) -> None:
        self._off = [*off, *[0.0] * (NUM_TOKENS - len(off))]

    def log_probs(self, rows: Sequence[TrainRow], rule: SamplingRule) -> list[list[float]]:
        assert rule == SamplingRule()  # as the engine scores, whatever --rollout-temperature says
        return [[-1.0 + off for off in self._off] for _ in rows]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as running:
        running.faults.wrong_version = "1"  # which is none at all before the first update
        yield running


def check(engine: FakeEngine, ranks: Ranks, *, bf16: bool) -> float:
    fleet = FleetControl([engine.address], timeout_s=10)
    try:
        return check_engines_agree(Config().replace(bf16=bf16), cast(Any, ranks), fleet, version=1)
    finally:
        fleet.close()


def test_in_fp32_one_token_that_differs_is_enough(engine: FakeEngine) -> None:
    assert check(engine, Ranks(5e-4), bf16=False) == pytest.approx(5e-4)
    with pytest.raises(PublishError, match=r"differ from the trainer's by 0\.002"):
        check(engine, Ranks(2e-3), bf16=False)


@pytest.mark.parametrize("transport", ["shm", "gloo", "disk"])
@pytest.mark.parametrize("keeps", USES)
def test_an_engine_whose_tied_model_keeps_the_old_table_in_one_use_is_named_though_its_hash_is_confirmed(
    llama_dir: Path, tmp_path: Path, keeps: str, transport: str
) -> None:
    model = tiny_models.load(llama_dir)
    with TiedEngine(llama_dir) as engine:
        fleet = FleetControl([engine.address], timeout_s=10)
        sender = make_sender(transport, bucket_bytes=60_000, directory=tmp_path, timeout_s=10)
        sender.connect(fleet)
        for version in (1, 2):
            tiny_models.perturb(model, seed=version)
            weights = dict(tiny_models.stream(model))
            publish(  # confirms the hash
                iter(weights.items()),
                [TensorMeta.of(*pair) for pair in weights.items()],
                version=version,
                fleet=fleet,
                sender=sender,
                pause_mode="keep",
                deadline_s=10,
            )
            assert check_engines_agree(Config(), cast(Any, RanksOf(model)), fleet, version) < 1e-4
        engine.keeps = keeps
        with pytest.raises(
            PublishError, match=r"e0: log-probabilities differ .* after version 2 .* bytes were confirmed"
        ):
            check_engines_agree(Config(), cast(Any, RanksOf(model)), fleet, 2)
        sender.close()
        fleet.close()


def test_engines_that_take_turns_with_trainers_score_after_them(engine: FakeEngine) -> None:
    order: list[str] = []

    class Noted(Ranks):
        def log_probs(self, rows: Sequence[TrainRow], rule: SamplingRule) -> list[list[float]]:
            order.append("trainers")
            return super().log_probs(rows, rule)

    fleet = FleetControl([engine.address], timeout_s=10)
    fleet.sleep(1)

    def between() -> None:
        order.append("between")
        fleet.wake_up("weights", is_last=False)
        fleet.wake_up("kv_cache", is_last=True)

    try:
        check_engines_agree(Config(), cast(Any, Noted()), fleet, version=1, between=between)
    finally:
        fleet.close()
    assert order == ["trainers", "between"]


def test_a_sleeping_engine_says_what_of_it_is_awake(engine: FakeEngine) -> None:
    fleet = FleetControl([engine.address], timeout_s=10)
    try:
        fleet.sleep(2)
        with pytest.raises(
            EngineError, match=r"wake_up\?tags=weights: the engine says that it is sleeping, expected awake"
        ):
            fleet.wake_up("weights", is_last=True)
        fleet.wake_up("kv_cache", is_last=True)
        assert engine.calls == ["/sleep?level=2&mode=wait", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]
    finally:
        fleet.close()


def test_in_bf16_rounding_moves_single_tokens_and_other_weights_move_most(engine: FakeEngine) -> None:
    """Of 1,024 tokens of SmolLM2-135M one in a hundred was off by more than 0.23, the largest by 0.46; with experts
    single tokens by 5.5 (docs/agreement.md)."""
    assert check(engine, Ranks(0.46, 0.23, 5.5), bf16=True) == 0.0
    assert check(engine, Ranks(*[0.044] * NUM_TOKENS), bf16=True) == pytest.approx(0.044)  # SmolLM2's mean
    with pytest.raises(PublishError, match=r"differ from the trainer's by 0\.12"):
        check(engine, Ranks(*[0.12] * 8), bf16=True)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_score_that_is_no_number_is_no_agreement(engine: FakeEngine, bf16: bool) -> None:
    with pytest.raises(PublishError, match="differ from the trainer's by nan"):
        check(engine, Ranks(0.0, math.nan), bf16=bf16)


class Fleet:
    """An engine that says -1 for each token."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []  # tokens of a row, and whether it came with an image

    def reports(self) -> list[EngineReport]:
        return [EngineReport(engine="e0", version=1, content_hash="", num_tensors=1)]

    def prompt_log_probs(self, rows: Sequence[Sequence[int]], images: Sequence[Any]) -> list[list[list[float]]]:
        self.asked += [(len(row), bool(inputs)) for row, inputs in zip(rows, images, strict=True)]
        return [[[-1.0] * (len(row) - 1) for row in rows]]


def test_a_model_with_vision_is_asked_about_an_image_too_and_a_tower_that_differs_is_found(tmp_path: Path) -> None:
    """The image is 7 tokens, of which 4 are its places; each row has 15 tokens to score."""
    model, keys = str(tiny_images.make_idefics3(tmp_path / "model")), '{"image": "images"}'

    class Blind:
        """Right without an image."""

        def log_probs(self, rows: Sequence[TrainRow], rule: SamplingRule) -> list[list[float]]:
            return [[-1.1 if images_of(row) else -1.0] * row.response_length for row in rows]

    for multimodal_keys, context, asked in (
        (keys, 64, [(16, False), (22, True)]),
        (keys, 22, [(16, False)]),  # the context has no space for it
        (None, 64, [(16, False)]),
    ):
        fleet = Fleet()
        config = Config().replace(
            hf_checkpoint=model, multimodal_keys=multimodal_keys, rollout_max_context_len=context, bf16=False
        )
        if len(asked) == 2:
            with pytest.raises(PublishError, match=r"differ from the trainer's by 0\.1"):
                check_engines_agree(config, cast(Any, Blind()), cast(Any, fleet), version=1)
        else:
            assert check_engines_agree(config, cast(Any, Blind()), cast(Any, fleet), version=1) == 0.0
        assert fleet.asked == asked


def test_an_engine_that_did_not_expand_an_image_gives_no_score(engine: FakeEngine) -> None:
    """It scores 2 tokens where the row has 3."""
    images = {"images": ["data:image/png;base64,AAAA"], "prompt_ids": [3], "prompt_length": 2}
    fleet = FleetControl([engine.address], timeout_s=10)
    with pytest.raises(EngineError, match="scored a prompt of 2 tokens, expected 3, with the places of its images"):
        fleet.prompt_log_probs([[3, 3, 9]], [images])
    fleet.close()


def test_every_engine_is_compared_and_rows_of_several_lengths_keep_their_own_tokens() -> None:
    """Engines say -1 for each token; the trainer -1.5 for one of the 2 and 3 trainable tokens of the two rows."""

    class Two:
        def log_probs(self, rows: Sequence[TrainRow], rule: SamplingRule) -> list[list[float]]:
            return [[-1.5] + [-1.0] * (row.response_length - 1) for row in rows]

    rows = [_row([5, 6, 7, 8], response_length=2), _row([5, 6, 7, 8], response_length=3)]
    with FakeEngine(name="e0") as first, FakeEngine(name="e1") as second:
        first.faults.wrong_version = second.faults.wrong_version = "1"
        fleet = FleetControl([first.address, second.address], timeout_s=10)
        found = compare_with_engines(fleet, cast(Any, Two()), rows, [None, None])
        fleet.close()
    assert list(found) == ["e0", "e1"]
    for agreement in found.values():
        assert agreement.num_tokens == 5
        assert agreement.largest == pytest.approx(0.5)
        assert agreement.mean == pytest.approx(0.2)  # 2 x 0.5 / 5


def _row(tokens: list[int], response_length: int) -> TrainRow:
    return TrainRow(
        sample_index=0,
        group_index=0,
        rollout_id=0,
        tokens=np.asarray(tokens, dtype=np.int32),
        response_length=response_length,
        loss_mask=np.ones(response_length, dtype=np.uint8),
        rollout_log_probs=np.zeros(response_length, dtype=np.float32),
        token_policy_versions=[VersionSpan(1, 0, response_length)],
        reward=0.0,
        raw_reward=0.0,
        status="completed",
        truncated=False,
    )
