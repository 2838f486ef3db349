"""Modes off and buffer: the text of a sample is decoded when a mismatch record asks for it, and only then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.rollout_setup import write_model_directory
from vime.config.parse import parse
from vime.ray import rollout_manager
from vime.types import PendingText, RolloutFnTrainOutput, Sample, SampleStatus, VersionSpan

decoded: list[list[int]] = []


def decode(tokens: Sequence[int]) -> str:
    decoded.append(list(tokens))
    return " ".join(map(str, tokens))


def sample_of(index: int) -> Sample:
    """A sample whose response is the tokens [2, 10 + index]."""
    sample = Sample(group_index=0, index=index, prompt="a", tokens=[1], reward=1.0, status=SampleStatus.COMPLETED)
    sample.append_response_tokens([2, 10 + index], [-0.5, -0.5], versions=[VersionSpan(0, 0, 2)])
    sample.set_pending_text(PendingText([2, 10 + index], decode))
    return sample


def manager_after_a_round(tmp_path: Path, *flags: str) -> rollout_manager.RolloutManager:
    samples = [sample_of(0), sample_of(1), sample_of(2)]
    samples[2].response = "set by a plug-in"
    required = ["--hf-checkpoint", str(write_model_directory(tmp_path / "model")), "--rm-type", "exact_match"]
    manager = object.__new__(rollout_manager.RolloutManager)
    manager._config, manager._texts, manager._coordinator = parse([*required, *flags]), {}, None
    manager._generate = lambda _args, _rollout_id, _source: RolloutFnTrainOutput(samples=[samples], metrics={})
    manager._source = SimpleNamespace(save=lambda _rollout_id: {})
    manager._rounds = SimpleNamespace(put=lambda _rollout_id, groups: ("train_0", [[] for _ in groups]))
    decoded.clear()
    manager._generate_round(0)
    return manager


def test_a_text_is_decoded_when_it_is_asked_for_and_no_other(tmp_path: Path) -> None:
    manager = manager_after_a_round(tmp_path, "--on-train-rollout-diff", "warn")
    assert decoded == []
    said = manager.texts_of(0, [1, 2, 7])
    assert [text and text.response for text in said] == ["2 11", "set by a plug-in", None]
    assert decoded == [[2, 11]]


@pytest.mark.parametrize(("action", "num_held"), [("ignore", 0), ("stop", 3)])
def test_texts_are_held_only_where_a_record_may_be_made(tmp_path: Path, action: str, num_held: int) -> None:
    manager = manager_after_a_round(tmp_path, "--on-train-rollout-diff", action)
    assert len(manager._texts.get(0, {})) == num_held


def test_the_task_of_an_agent_is_not_told_as_what_its_row_begins_with() -> None:
    """Else `vime diagnose` names another tokenisation of a prompt that was never rendered."""
    plain, of_agent = sample_of(0), sample_of(1)
    of_agent.metadata["session_row"] = 0
    made = rollout_manager._texts([[plain, of_agent]])
    assert [made[0]().prompt, made[1]().prompt] == ["a", None]
    assert made[1]().response == "2 11"
