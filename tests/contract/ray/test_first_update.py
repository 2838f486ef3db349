"""An engine that got its first weights since its start is compared with the trainer before a prompt, without a flag."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.helpers import tiny_models
from tests.helpers.tied_engine import USES, RanksOf, TiedEngine
from vime.config.parse import Config
from vime.observability.events import EventLog
from vime.observability.screen import Screen
from vime.ray.mismatch_guard import MismatchGuard
from vime.ray.publisher import Publisher
from vime.types import EngineAddress, MismatchError
from vime.weights.hashing import content_hash
from vime.weights.plan import TensorMeta

TRANSPORTS = ["shm", "gloo", "disk"]


class Setup:
    """A guard without a run, and the publisher of the same configuration."""

    def __init__(self, tmp_path: Path, model_dir: Path, *, vllm_flags: tuple[str, ...] = (), **flags: Any) -> None:
        self._told, self.model, self._run_dir = io.StringIO(), tiny_models.load(model_dir), tmp_path
        self.config = replace(Config(), vllm_flags=vllm_flags).replace(
            **{
                "hf_checkpoint": str(model_dir),
                "on_train_rollout_diff": "warn",
                "bf16": False,
                "update_weight_transport": "shm",
                **flags,
            }
        )
        self.guard = MismatchGuard(
            self.config,
            tmp_path,
            trainers=cast(Any, RanksOf(self.model)),
            manager=cast(Any, None),
            engines=None,
            screen=Screen(tmp_path, stream=self._told),
            events=EventLog(tmp_path, "driver"),
        )

    @property
    def warnings(self) -> list[str]:
        return [line for line in self._told.getvalue().splitlines() if line.startswith("warning")]

    def publish(self, *engines: EngineAddress) -> None:
        """Bring the model, as version 0, and have its hash confirmed."""
        weights = dict(tiny_models.stream(self.model))
        publisher = Publisher(self.config, self._run_dir, engines)
        report = publisher.publish(iter(weights.items()), [TensorMeta.of(*pair) for pair in weights.items()], 0)
        publisher.close()
        assert {each.content_hash for each in report.engine_reports} == {content_hash(weights)}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("keeps", USES)
def test_a_table_that_an_engine_keeps_from_its_start_is_named_after_its_first_update(
    llama_dir: Path, tmp_path: Path, keeps: str, transport: str
) -> None:
    """The weights are those of the checkpoint: no training has moved them."""
    setup = Setup(tmp_path, llama_dir, update_weight_transport=transport)
    with (
        TiedEngine(llama_dir, is_random=True, name="e0") as sound,
        TiedEngine(llama_dir, is_random=True, name="e1", keeps=keeps) as stale,
    ):
        setup.publish(sound.address, stale.address)
        setup.guard.after_first_update(0, [sound.address])
        assert setup.warnings == []
        setup.guard.after_first_update(0, [sound.address, stale.address])
    [warning] = setup.warnings
    assert warning.startswith("warning: engine e1: log-probabilities differ from the trainer's by")
    assert "e0" not in warning


def test_an_engine_that_read_the_checkpoint_would_hide_that_table_until_weights_have_moved(
    llama_dir: Path, tmp_path: Path
) -> None:
    """Why engines of a run start with random weights."""
    setup = Setup(tmp_path, llama_dir)
    with TiedEngine(llama_dir, keeps="lm_head") as stale:
        setup.publish(stale.address)
        setup.guard.after_first_update(0, [stale.address])
        assert setup.warnings == []
        tiny_models.perturb(setup.model, seed=1)
        setup.publish(stale.address)
        setup.guard.after_first_update(0, [stale.address])
    [warning] = setup.warnings
    assert "engine e0: log-probabilities differ" in warning


class Swapped(TiedEngine):
    """Loads two tensors of one shape each in the other's place."""

    def _score_by_model(self, prompt: Any) -> list[float]:
        one, other = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
        self.weights = {**self.weights, one: self.weights[other], other: self.weights[one]}
        assert self.weights[one].shape == self.weights[other].shape
        return super()._score_by_model(prompt)


def test_tensors_that_were_loaded_in_the_place_of_each_other_are_named(llama_dir: Path, tmp_path: Path) -> None:
    setup = Setup(tmp_path, llama_dir)
    with Swapped(llama_dir) as engine:
        setup.publish(engine.address)
        setup.guard.after_first_update(0, [engine.address])
    [warning] = setup.warnings
    assert "engine e0: log-probabilities differ" in warning


def test_the_run_ends_where_it_is_to_stop_at_a_difference(llama_dir: Path, tmp_path: Path) -> None:
    setup = Setup(tmp_path, llama_dir, on_train_rollout_diff="stop")
    with TiedEngine(llama_dir, is_random=True, keeps="lm_head") as engine:
        setup.publish(engine.address)
        with pytest.raises(MismatchError, match=r"engine e0: .* after version 0 .*--on-train-rollout-diff stop"):
            setup.guard.after_first_update(0, [engine.address])


@pytest.mark.parametrize(
    "flags", [{"vllm_flags": ("--quantization", "fp8")}, {"rollout_external_engine_addrs": ["10.0.0.5:81"]}]
)
def test_the_run_goes_on_where_an_engine_may_differ_by_design(
    llama_dir: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    setup = Setup(tmp_path, llama_dir, on_train_rollout_diff="stop", **flags)
    with TiedEngine(llama_dir, is_random=True, keeps="lm_head") as engine:
        setup.publish(engine.address)
        setup.guard.after_first_update(0, [engine.address])
    [warning] = setup.warnings
    assert "They compute with other weights, or are quantised." in warning


@pytest.mark.parametrize("flags", [{"on_train_rollout_diff": "ignore"}, {"check_weight_update_equal": True}])
def test_nothing_is_asked_where_nobody_wants_to_know_or_every_update_is_compared(
    llama_dir: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    setup = Setup(tmp_path, llama_dir, **flags)
    with TiedEngine(llama_dir, is_random=True, keeps="lm_head") as engine:
        setup.publish(engine.address)
        setup.guard.after_first_update(0, [engine.address])
    assert setup.warnings == []


def test_an_engine_that_does_not_answer_is_for_the_check_of_the_engines(llama_dir: Path, tmp_path: Path) -> None:
    setup = Setup(tmp_path, llama_dir, on_train_rollout_diff="stop")
    with TiedEngine(llama_dir, is_random=True) as engine:
        setup.publish(engine.address)
        engine.faults.status["/inference/v1/generate"] = 500
        setup.guard.after_first_update(0, [engine.address])
    [warning] = setup.warnings
    assert "version 0: engines that started serve without a comparison. e0" in warning
