"""The six programs as agents elsewhere: claims samples of a run with --agent-listen and plays each with launch.py.

    python -m benchmarks.agent_sdks.elsewhere http://HOST:PORT KEY_FILE [--at-once 8]

ADDRESS is that of a front, which holds what is asked while the run is away; nothing here is asked a second time but a
claim. What a restart of the run breaks is written to standard error, on which nothing else is. Ends at SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

from benchmarks.agent_sdks.launch import DIE_WITH_PARENT, HERE

HELD_S = 900.0
LAUNCH = [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid()), sys.executable, str(HERE / "launch.py")]


def claim(client: httpx.Client, root: str, key_file: Path) -> dict[str, Any]:
    """Return the next sample. All requests for it have one Idempotency-Key. Before the first start of the run there is
    no key."""
    asked = {"Idempotency-Key": uuid.uuid4().hex}
    while True:
        if key_file.exists():
            asked["Authorization"] = f"Bearer {key_file.read_text().strip()}"
            response = client.post(f"{root}/v1/sessions", headers=asked)
            if response.status_code == 200:
                return dict(response.json())
            if response.status_code != 204:
                sys.stderr.write(f"a claim was answered with {response.status_code}: {response.text}\n")
        time.sleep(0.1)


def play(client: httpx.Client, task: dict[str, Any]) -> None:
    """Run the program of the sample, and say how it ended."""
    variables = {
        "OPENAI_BASE_URL": task["base_url"], "OPENAI_API_KEY": task["key"],
        "ANTHROPIC_BASE_URL": task["anthropic_base_url"], "ANTHROPIC_API_KEY": task["key"],
        "VIME_PROMPT": task["prompt"], "VIME_LABEL": str(task["label"]), "VIME_SESSION": task["id"],
    }  # fmt: skip
    done = subprocess.run(
        LAUNCH,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    how = {"failed": done.stdout[-400:] or "no output"} if done.returncode else {"reward": None}
    url, own = f"{task['base_url']}/sessions/{task['id']}/complete", {"Authorization": f"Bearer {task['key']}"}
    response = client.post(url, json=how, headers=own)
    if done.returncode or response.status_code != 200:
        sys.stderr.write(f"session {task['id']}: {response.status_code} {response.text}\n{done.stdout}\n")


def work(root: str, key_file: Path) -> None:
    with httpx.Client(timeout=HELD_S) as client:
        while True:
            play(client, claim(client, root, key_file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("key_file", type=Path)
    parser.add_argument("--at-once", type=int, default=8)
    given = parser.parse_args()
    threads = [threading.Thread(target=work, args=(given.address, given.key_file)) for _ in range(given.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
