"""What the start of a run says to those who start agents elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.config.parse import parse
from vime.observability.screen import Screen
from vime.ray.startup import _tell_agents


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("[::1]", False), ("10.0.0.5", True), ("h", True)])
def test_address_and_key_are_said_and_where_others_may_listen_that_nothing_is_encrypted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str, is_open: bool
) -> None:
    address = f"{host}:8660"
    screen = Screen(run_dir=tmp_path, log_interval=1)
    _tell_agents(parse(["--agent-listen", address]), address, tmp_path, screen)
    said = "".join(capsys.readouterr())
    assert f"http://{address}/v1/sessions" in said
    assert f"{tmp_path / 'agent-key'}" in said
    assert (tmp_path / "agent-key").exists()
    assert ("not encrypted" in said) is is_open
