"""The flags of agents: what they derive, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.rollout_setup import write_model_directory
from vime.config.agent_checks import GENERATE, check_agents, host_and_port, resolve_agents
from vime.config.checks import differences, resolve
from vime.config.deadlines import generate_function_deadline_s
from vime.config.parse import Config, parse
from vime.config.problems import Problems
from vime.types import ConfigError

EXTERNAL = ("--transferqueue-mode", "external")
EVALUATION = ("--eval-prompt-data", "held-out", "eval.jsonl")


def config_of(directory: Path, *flags: str) -> Config:
    write_model_directory(directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    config = parse(["--hf-checkpoint", str(directory), *flags])
    return config.replace(**resolve_agents(config, config.cluster.rollout_num_engines or 1))


def test_an_agent_answers_the_prompts_and_without_one_nothing_changes(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--agent-command", "sh agent.sh")
    check_agents(config)
    assert config.rollout.custom_generate_function_path == GENERATE
    plain = config_of(tmp_path)
    check_agents(plain)
    assert plain.rollout.custom_generate_function_path is None


@pytest.mark.parametrize(
    ("flags", "policy", "is_noted"),
    [
        (["--agent-command", "sh agent.sh", "--rollout-num-engines", "2"], "consistent_hash", True),
        (["--agent-command", "sh agent.sh", "--rollout-num-engines", "1"], "round_robin", False),
        (["--rollout-num-engines", "2"], "round_robin", False),
        (
            ["--environment", "a.b", "--rollout-num-engines", "2", "--vllm-router-policy", "round_robin"],
            "round_robin",
            False,
        ),
        (
            ["--environment", "a.b", "--rollout-num-engines", "2", "--vllm-router-policy", "consistent_hash"],
            "consistent_hash",
            False,
        ),
    ],
)
def test_a_session_stays_with_one_of_several_engines_unless_the_user_says_otherwise_and_one_note_says_so(
    tmp_path: Path, flags: list[str], policy: str, is_noted: bool
) -> None:
    write_model_directory(tmp_path)
    given = parse(["--hf-checkpoint", str(tmp_path), "--device", "cpu", *flags])
    config = resolve(given, Problems())
    assert config.engine.vllm_router_policy == policy
    notes = [note for note in differences(given, config) if "--vllm-router-policy consistent_hash" in note]
    assert len(notes) == is_noted


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--agent-function", "a.b"], "--agent-command and --agent-function: .* Keep one"),
        (["--environment", "a.b"], "--agent-command and --environment: .* Keep one"),
        (["--custom-generate-function-path", "a.b"], "--custom-generate-function-path a.b with an agent"),
        (["--agent-timeout-secs", "600"], "--agent-timeout-secs 600 is not below --generate-timeout-secs 600"),
        (["--reference-mode"], "--reference-mode with an agent"),
        (["--use-rollout-routing-replay"], "--use-rollout-routing-replay with an agent: sessions record no experts"),
        (["--use-opd"], "--use-opd with an agent.*--opd-teacher-load"),
    ],
)
def test_what_an_agent_cannot_be_combined_with_is_refused_by_name(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_agents(config_of(tmp_path, "--agent-command", "sh agent.sh", *flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--agent-listen", "8660"], "--agent-listen 8660: expected HOST:PORT"),
        (["--agent-listen", "127.0.0.1:0"], "--agent-listen 127.0.0.1:0: expected HOST:PORT with a port of 1 to"),
        (["--agent-listen", "127.0.0.1:65536"], "--agent-listen 127.0.0.1:65536: expected HOST:PORT"),
        (["--agent-listen", "http://h:1"], "--agent-listen http://h:1: expected HOST:PORT"),
        (["--agent-listen", "h:1", "--environment", "a.b"], "--environment and --agent-listen: .* Keep one"),
        (["--agent-listen", "h:1", "--num-rollout-workers", "2"], "--num-rollout-workers 2: .* Remove one of the two"),
        (["--agent-listen", "h:1", *EXTERNAL, "--rollout-num-engines", "0"], "no engine that could answer agents"),
        (["--agent-listen", "h:1", *EXTERNAL, *EVALUATION], "evaluation sets: .* generate in two processes there"),
        (["--agent-listen", "h:1", "--reference-mode"], "--reference-mode with an agent"),
    ],
)
def test_where_agents_elsewhere_cannot_ask_is_refused(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_agents(config_of(tmp_path, *flags))


def test_a_run_that_listens_has_an_agent_and_its_samples_may_wait_for_one_as_long_as_a_round(tmp_path: Path) -> None:
    """By default 3600 s for the round, and 600 s for the engines."""
    config = config_of(tmp_path, "--agent-listen", "[::1]:8660")
    check_agents(config)
    assert host_and_port("[::1]:8660") == ("::1", 8660)
    assert config.rollout.custom_generate_function_path == GENERATE
    assert generate_function_deadline_s(config) == 3600 + 600
    assert generate_function_deadline_s(config_of(tmp_path, "--agent-command", "sh agent.sh")) == 600


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no program .*no-such-agent.* is found"):
        check_agents(config_of(tmp_path, "--agent-command", "no-such-agent --fast"))


def test_a_quotation_that_is_not_closed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"""--agent-command "python 'x": .*No closing quotation.*quoted as for a"""):
        check_agents(config_of(tmp_path, "--agent-command", "python 'x"))


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--agent-command", "sh agent.sh")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"has no chat template.*chat_template.jinja"):
        check_agents(config)
