"""Agents elsewhere keep their sessions when the process that serves them is killed, and when the whole run is.

Real Ray, megatron, queue, SDK and front; the engine is a scripted one. The program notes each completion that it got
before it asks for the next, and raises at the first thing that goes wrong. What was trained is compared with its notes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.agents_outside import listening_flags, wait
from tests.helpers.training import TinyTask, Training
from vime.cli.queue import newest_checkpoint
from vime.handoff.audit import audit_run
from vime.observability.claims import read_claims
from vime.observability.samples import read_round
from vime.utils.network import free_port

ROUNDS, GROUPS, SAMPLES, TURNS = 4, 2, 2, 3
AT = (1, 6)  # in these sessions the program waits behind its first turn until the test has killed something
PROGRAM = """
import json, pathlib, sys, threading, time, uuid
import httpx, openai

root, key_file, directory, turns, *at = sys.argv[1:]
directory, turns = pathlib.Path(directory), int(turns)
headers = {"Authorization": "Bearer " + pathlib.Path(key_file).read_text().strip()}
lock, begun = threading.Lock(), []

def note(**what):
    with lock, (directory / "notes.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\\n")

def claim():
    mine = {**headers, "Idempotency-Key": uuid.uuid4().hex}
    while (answer := httpx.post(root + "/v1/sessions", headers=mine, timeout=300)).status_code == 204:
        pass
    return answer.raise_for_status().json()

def play(task):
    with lock:
        number = str(len(begun))
        begun.append(task["id"])
    messages = [{"role": "user", "content": task["prompt"]}]
    with openai.OpenAI(base_url=task["base_url"], api_key=task["key"], timeout=300, max_retries=0) as model:
        for turn in range(turns):
            said = model.chat.completions.create(model="m", messages=messages, extra_body={"return_token_ids": True})
            [choice] = said.choices
            note(session=task["id"], ids=choice.token_ids)
            marker = directory / ("at-" + number)
            if turn == 0 and number in at:
                marker.touch()
            while marker.exists():
                time.sleep(0.01)
            messages += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "go"}]
    own = {"Authorization": "Bearer " + task["key"]}
    url = task["base_url"] + "/sessions/" + task["id"] + "/complete"
    httpx.post(url, json={"reward": float(int(number) % 2)}, headers=own, timeout=300).raise_for_status()
    note(session=task["id"], completed=True)

def work():
    try:
        while True:
            play(claim())
    except BaseException as error:
        note(error=repr(error))
        raise

for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
threading.Event().wait()
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "serves", "num_restarts"),
    [
        ("streaming", "RolloutManager", 1),
        ("external", "RolloutWorkerActor", 0),  # which starts again alone
    ],
)
def test_agents_elsewhere_go_on_when_what_serves_them_is_killed_and_when_the_run_is(
    tiny_task: TinyTask, tmp_path: Path, mode: str, serves: str, num_restarts: int
) -> None:
    port, key, run_dir = free_port(), tmp_path / "key", tmp_path / "run"
    (tmp_path / "program.py").write_text(PROGRAM)
    checkpoints = str(run_dir / "checkpoints")
    flags = listening_flags(tiny_task, tmp_path, port, rounds=ROUNDS, groups=GROUPS, samples=SAMPLES)
    flags += ["--save-interval", "1", "--save", checkpoints, "--load", checkpoints, "--agent-timeout-secs", "120"]
    flags += ["--transferqueue-mode", mode]
    front = subprocess.Popen(
        [sys.executable, "-m", "vime", "sessions-front", f"http://127.0.0.1:{port}", "--patience-secs", "240"],
        stdout=subprocess.PIPE,
        text=True,
    )
    began = [front]
    training = Training("train.py", flags, run_dir)
    try:
        assert front.stdout is not None
        address = front.stdout.readline().strip()
        wait(training, key.exists)
        program = [str(tmp_path / "program.py"), address, str(key), str(tmp_path), str(TURNS), *map(str, AT)]
        with (tmp_path / "program.out").open("w") as out:
            began.append(subprocess.Popen([sys.executable, *program], stdout=out, stderr=out))
        first, second = (tmp_path / f"at-{number}" for number in AT)
        wait(training, first.exists)
        training.kill_member(serves)
        first.unlink()  # and the agent asks for its next turn
        wait(training, second.exists)
        assert len(training.so_far().events("run_restarted")) == num_restarts
        training.process.kill()
        assert training.process.wait(60) == -signal.SIGKILL
        assert training.survivors(grace_s=60) == []
        second.unlink()
        training = Training("train.py", flags, run_dir)
        run = training.finish()
    finally:
        for process in reversed(began):  # the program first: a front that is gone is an error that it notes
            process.kill()
            process.wait(30)
        training.kill()
    assert run.code == 0, run.output
    notes = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    errors = [note for note in notes if "error" in note]
    assert errors == [], (tmp_path / "program.out").read_text()
    said: dict[str, list[tuple[int, ...]]] = {}
    for note in notes:
        said.setdefault(note["session"], []).append(tuple(note.get("ids", ())))
    num_samples = ROUNDS * GROUPS * SAMPLES
    assert len(said) == num_samples  # no sample was given away a second time
    assert [len(ids) for ids in said.values()] == [TURNS + 1] * num_samples  # each was completed
    report = audit_run(run_dir, saved=newest_checkpoint(run_dir), claims=partial(read_claims, run_dir))
    assert report.findings == ()
    assert report.groups == {"durable": ROUNDS * GROUPS}
    trained: Counter[tuple[int, ...]] = Counter()
    for number in range(ROUNDS):
        for group in read_round(run_dir, number):
            for row in group.answers:
                mask = zip(row.tokens, row.loss_mask, strict=True)
                trained[tuple(token for token, counts in mask if counts)] += 1
    assert trained == Counter(sum(ids, ()) for ids in said.values())  # token for token what its program was told
    assert all(line["train/num_rows"] == GROUPS * SAMPLES for line in run.metrics().values())
