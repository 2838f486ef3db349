"""An agent that runs elsewhere, for a run with --agent-listen: it asks for a sample, plays it, and asks for the next.

    python outside.py http://HOST:PORT KEY_FILE [--patience-secs 300]

It needs the package `openai` and nothing of Vime; docs/agents.md walks through it. Start as many as you like, before or
after the run, on any machine that has the key. It waits while the run is away (it starts, or starts again), and ends
when that lasts longer than its patience, or at SIGTERM.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx  # which openai brings along
import openai

HELD_S = 60.0
"""Longer than the run holds a request for a sample, which is 30 s."""
PAUSE_S = 1.0


class RunIsAway(Exception):
    """Nobody has listened at the address for as long as the patience."""


def post(client: httpx.Client, url: str, patience_s: float, **request: Any) -> httpx.Response:
    """Return the response. A run that is away is asked again: what is asked here may be repeated."""
    ends = time.monotonic() + patience_s
    while True:
        try:
            return client.post(url, timeout=HELD_S, **request)
        except httpx.TransportError as error:
            if time.monotonic() > ends:
                raise RunIsAway(f"{url}: {error}") from error
            time.sleep(PAUSE_S)


def claim(client: httpx.Client, root: str, key: str, patience_s: float) -> dict[str, Any]:
    """Return the next sample. All requests for it have one Idempotency-Key, so that a lost answer costs no sample."""
    headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": uuid.uuid4().hex}
    while True:
        response = post(client, f"{root}/v1/sessions", patience_s, headers=headers)
        if response.status_code == 200:
            return dict(response.json())
        if response.status_code >= 500:  # a full disk, say
            time.sleep(PAUSE_S)
        elif response.status_code != 204:  # 204: the run has no sample at the moment
            sys.exit(f"{root} refused: {response.status_code} {response.text}")


def play(task: dict[str, Any], patience_s: float) -> float:
    """Return the reward of one turn: whether the model said what the label says. The session outlives a restart of the
    run, so a turn is asked again as often as the patience lasts: the SDK waits up to 8 s before each time."""
    retries = 2 + int(patience_s / 8)
    with openai.OpenAI(base_url=task["base_url"], api_key=task["key"], max_retries=retries) as model:
        messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
        said = model.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    return float((said or "").rpartition("</think>")[2].strip() == task["label"])


def end(client: httpx.Client, task: dict[str, Any], patience_s: float, how: dict[str, Any]) -> None:
    """Say how the session ended. A refusal is shown: the run may have ended the session by itself."""
    headers = {"Authorization": f"Bearer {task['key']}"}
    url = f"{task['base_url']}/sessions/{task['id']}/complete"
    response = post(client, url, patience_s, json=how, headers=headers)
    if response.status_code != 200:
        sys.stderr.write(f"session {task['id']}: {response.status_code} {response.text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="http://HOST:PORT of --agent-listen")
    parser.add_argument("key_file", type=Path, help="RUN/agent-key, or what --agent-key-file names")
    parser.add_argument("--patience-secs", type=float, default=300.0, help="how long the run may be away")
    given = parser.parse_args()
    root, key, patience_s = given.address.rstrip("/"), given.key_file.read_text().strip(), given.patience_secs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    num_played = 0
    with httpx.Client() as client:
        try:
            while True:
                task = claim(client, root, key, patience_s)
                try:
                    reward = play(task, patience_s)
                except (openai.APIConnectionError, openai.APIStatusError) as error:
                    sys.stderr.write(f"session {task['id']}: {error}\n")  # the run has ended the session, say
                    end(client, task, patience_s, {"failed": str(error)})
                except BaseException as error:
                    end(client, task, 0.0, {"failed": f"the agent ended: {error!r}"})
                    raise
                else:
                    end(client, task, patience_s, {"reward": reward})
                    num_played += 1
        except RunIsAway as error:
            sys.stdout.write(f"{error}\n")
        finally:
            sys.stdout.write(f"{num_played} sessions played\n")


if __name__ == "__main__":
    main()
