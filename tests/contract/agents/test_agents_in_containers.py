"""The line of docs/agents.md that runs an agent in a container, with a stand-in for docker: nothing here has docker."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.contract.agents.test_agents_before_an_engine import answer, sample
from tests.helpers.agent_world import agent_world
from vime.types import SampleStatus

LINE = (
    "docker run --rm --init --network host --env OPENAI_BASE_URL --env OPENAI_API_KEY --env VIME_PROMPT "
    "--env VIME_LABEL --env VIME_SESSION IMAGE timeout 280 PROGRAM"
)
DOCKER = '''
"""`docker run [--rm] [--init] --network host [--env NAME ...] IMAGE PROGRAM ...`: the program sees what it is given and
nothing else of the environment. Whoever does not share the host's network could not reach the server on loopback."""
import os, sys
_, run, *words = sys.argv
assert run == "run", run
given = {"PATH": os.environ["PATH"]}
network = "bridge"
while words[0].startswith("-"):
    flag = words.pop(0)
    if flag == "--network":
        network = words.pop(0)
    elif flag == "--env":
        name = words.pop(0)
        given[name] = os.environ[name]
    else:
        assert flag in ("--rm", "--init"), flag
assert network == "host", network
image, *program = words
assert image == "my-image", image
os.execvpe(program[0], program, given)
'''
PROGRAM = """
import json, os, urllib.request
assert set(os.environ) - {"PATH", "LC_CTYPE"} == {
    "OPENAI_BASE_URL", "OPENAI_API_KEY", "VIME_PROMPT", "VIME_LABEL", "VIME_SESSION"}, sorted(os.environ)
def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
base, session = os.environ["OPENAI_BASE_URL"], os.environ["VIME_SESSION"]
post(base + "/chat/completions", {"messages": [{"role": "user", "content": os.environ["VIME_PROMPT"]}]})
post(f"{base}/sessions/{session}/complete", {"reward": float(os.environ["VIME_LABEL"])})
"""


def test_the_line_of_the_page_gives_a_container_all_that_an_agent_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs/agents.md").read_text()
    assert f'--agent-command "{LINE}"' in " ".join(page.split())
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "docker").write_text(f"#!{sys.executable}\n{DOCKER}")
    (tools / "docker").chmod(0o755)
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    command = LINE.replace("IMAGE", "my-image").replace(
        "PROGRAM", shlex.join([sys.executable, "-I", str(tmp_path / "program.py")])
    )
    with agent_world(tmp_path / "model", answer) as world:
        [row] = world.generate(world.args("--agent-command", command), sample())
    assert (row.status, row.reward) == (SampleStatus.COMPLETED, 2.0), row.metadata
