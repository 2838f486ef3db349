"""An agent that plays a task of the `verifiers` package: a program for --agent-command, which docs/agents.md walks
through.

    PYTHON verifiers_taskset.py CONFIG.json --write-prompts FILE      the tasks as prompts of Vime
    --agent-command "PYTHON verifiers_taskset.py CONFIG.json"         plays the task of one sample

PYTHON is of an environment of its own: `python -m venv DIR && DIR/bin/pip install verifiers==0.4.0 uv`, because
verifiers wants other versions of OpenAI's SDK than vLLM. CONFIG.json is verifiers' configuration of an environment, for
instance {"taskset": {"id": "gsm8k-v1"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

try:
    import verifiers.v1 as vf
except ImportError as error:
    sys.exit(
        f"{sys.executable} cannot import verifiers ({error}). Run: {sys.executable} -m pip install verifiers==0.4.0 uv"
    )


def load(path: str) -> Any:
    return vf.load_environment(vf.resolve_env_config(json.loads(Path(path).read_text())))


def write_prompts(environment: Any, path: str) -> None:
    """One line for each task; its label is the task's place in the taskset."""
    if not environment.taskset.bounded:
        sys.exit("this taskset does not end; it cannot be written to a file")
    lines = [
        json.dumps({"input": task.data.prompt_text or str(place), "label": str(place)})
        for place, task in enumerate(environment.taskset)
    ]
    Path(path).write_text("\n".join(lines) + "\n")


async def play(environment: Any, place: int) -> float:
    """Return the mean reward of the traces that may be trained; what fails in verifiers ends the program with why."""
    [task] = environment.taskset.include(idx=[str(place)])
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(task, vf.ModelContext(model="policy", client=client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        sys.exit("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode has failed")
    rewards = [trace.reward for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    return sum(rewards) / len(rewards)


def main() -> None:
    config, *more = sys.argv[1:]
    environment = load(config)
    if more:
        [_, path] = more
        write_prompts(environment, path)
        return
    reward = asyncio.run(play(environment, int(os.environ["VIME_LABEL"])))
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/sessions/{os.environ['VIME_SESSION']}/complete",
        json.dumps({"reward": reward}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=60).close()


if __name__ == "__main__":
    main()
