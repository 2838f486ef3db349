"""One flipped bit in any file of a run directory, and whether an audit or a resume takes it in silence.

    python -m tests.helpers.run_flips DIR [--tries 300] [--seed 0] [--resumes 6]

makes three small run directories of mode streaming in DIR (of a run that ended, of one whose driver was killed behind
its last checkpoint, and the first one gone back to an older checkpoint, without a round trained there), flips bits in
copies of them, and prints what each kind of file had:

    named      the audit, or what a resume does before its first prompt, said what is wrong
    harmless   neither an answer of the audit nor anything that a resume goes on from differs
    unread     harmless, and a file that neither reads (UNREAD says why)
    SILENT     a difference that nobody named, or a bare traceback: none may be left

A kind of file (a line of UNREAD, or the name without its numbers) gets as many tries as any other, whatever its size.
The resume is the real one as far as it goes without processes: preflight, the claim of the directory, the choice of
ledger and checkpoint, every byte of the checkpoint, the ledger's restore, the payloads that are to be trained, the
trainer's receipts, and the audit at the end. On top of it `--resumes` real runs go on from a flipped directory, and end
with the weights of one that nobody touched or say what is wrong; the first ones have a flip in every harmless or unread
file at once.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.bit_flips import flip
from tests.helpers.training import ROOT, Finished, Training, train
from vime.cli.main import main as vime
from vime.config.command_line import parse_command_line
from vime.config.parse import Config, dump
from vime.handoff.ledger import Ledger, needed_payloads
from vime.handoff.ledger_schema import open_for_reading
from vime.handoff.ledger_types import LEDGER_NAME, SPOOL_NAME
from vime.handoff.ledger_undo import lasting_file
from vime.handoff.receipts import ReceiptFile
from vime.handoff.spool import Fsync, Spool
from vime.handoff.spool_check import check_spool
from vime.observability.events import EventKind, read_events
from vime.observability.metrics import Tracker
from vime.observability.run_dir import RunDir, claimed_checkpoints
from vime.ray.checkpoint import find_start, read_run_state
from vime.ray.checkpoint_damage import doubts, refuse_any_damage
from vime.ray.ledger_choice import choose_ledger
from vime.ray.preflight import preflight
from vime.ray.stream import ledger_rules
from vime.types import VimeError
from vime.utils.manifest import compare_hashes

ROUNDS, MORE_ROUNDS, SAVE_EVERY, KILLED_IN = 20, 22, 2, 19
UNREAD = {
    "command.sh": "for people: the command line; written anew by each start",
    "config.json": "for people and the audit, which looks up --save in it; written anew by each start",
    "run.lock": "who holds the directory, for the refusal of a second run; the lock itself is the kernel's",
    "checkpoints/run.lock": "the same, for the directory of checkpoints",
    "spool/spool.lock": "empty or never read: the lock is the kernel's",
    "ledger.db-shm": "sqlite's index of the log, in shared memory; made anew by the first that opens the file",
    "events/*": "for people, `vime report`, the trace, and the audit, which compares what two tell of one round or "
    "version; a line that is no event is left out with a warning",
    "logs/*": "for people",
    "waits/*": "for `vime why-stuck`; removed by each start",
    "eval/*": "for people and the end screen: answers to held-out prompts",
    "metrics.jsonl": "for people, `vime report`, and the audit, which compares a round's samples and tokens; a start "
    "only looks whether the last line has an end",
    "trace.json": "drawn from events/ by each `vime report`",
    "reward_curve.png": "drawn from metrics.jsonl by each `vime report`",
}
"""Files from which nothing is trained, with the reason."""
NUMBERS = re.compile(r"\d+")
Outcome = tuple[str, object]
"""`named` or `bare` with the words, or `answer` with what was found."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A run directory, and a copy of it that stays as it is."""

    run: Path
    whole: Path
    config: Config

    @classmethod
    def of(cls, run: Path, flags: Sequence[str], *, load: Path | None = None) -> Subject:
        """A directory that no process writes any more; `flags`: of the run that would go on there."""
        whole = run.with_name(f"{run.name}.whole")
        shutil.copytree(run, whole)
        more = ["--run-dir", str(run), "--load", str(load or run / "checkpoints")]
        return cls(run, whole, parse_command_line([*flags, *more]))

    def put_back(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.whole, self.run)

    def kinds(self) -> dict[str, list[str]]:
        """Files that have a bit, by their line of UNREAD or their name without numbers."""
        found: dict[str, list[str]] = {}
        for path in sorted(self.whole.rglob("*")):
            if path.is_file() and path.stat().st_size:
                name = path.relative_to(self.whole).as_posix()
                found.setdefault(unread(name) or NUMBERS.sub("N", name), []).append(name)
        return found


@dataclass(frozen=True, slots=True)
class Try:
    subject: Subject
    kind: str
    name: str
    bit: int
    verdict: str
    said: str

    def __str__(self) -> str:
        return f"{self.subject.run.name}/{self.name}, bit {self.bit}: {self.verdict}: {self.said}"


def unread(name: str) -> str | None:
    """The line of UNREAD that is about this file."""
    return next((pattern for pattern in UNREAD if fnmatch.fnmatch(name, pattern)), None)


def flags_of(directory: Path) -> list[str]:
    return [
        *("--hf-checkpoint", "examples/quickstart/model", "--prompt-data", str(directory / "data/train.jsonl")),
        *("--input-key", "input", "--label-key", "label", "--device", "cpu", "--transferqueue-mode", "streaming"),
        *("--debug-engine-module", "vime.backends.vllm_utils.scripted_server"),
        *("--custom-rm-path", "scripts/chaos_reward.py:even_share", "--rollout-batch-size", "4"),
        *("--n-samples-per-prompt", "4", "--rollout-max-response-len", "12", "--rollout-max-context-len", "64"),
        *("--micro-batch-size", "8", "--lr", "1e-3", "--save-interval", str(SAVE_EVERY), "--keep-checkpoints", "3"),
        *("--eval-prompt-data", "held_out", str(directory / "data/eval.jsonl"), "--eval-interval", "10"),
    ]


def make_runs(directory: Path) -> list[Subject]:
    """A run that ended, and one that was killed when a round was trained that no checkpoint carries."""
    prepare = ["examples/quickstart/prepare.py", "--num-train", "64", "--num-eval", "8"]
    subprocess.run([sys.executable, *prepare, "--data-dir", str(directory / "data")], cwd=ROOT, check=True)
    flags = flags_of(directory)
    ended = train([*flags, "--num-rollout", str(ROUNDS)], directory / "ended")
    assert ended.code == 0, ended.output
    notes = directory / "notes"
    notes.mkdir()
    armed = {"VIME_FAILPOINTS": f"driver.trained:{KILLED_IN}:kill", "VIME_FAILPOINTS_DIR": str(notes)}
    os.environ |= armed
    killed = Training("train.py", [*flags, "--num-rollout", str(ROUNDS)], directory / "killed")
    for name in armed:
        del os.environ[name]
    assert killed.process.wait(200) == -9, killed.so_far().output
    killed.survivors(grace_s=75)  # Ray's agents
    killed.kill()
    more = [*flags, "--num-rollout", str(MORE_ROUNDS)]
    shutil.copytree(directory / "ended", directory / "older")
    oldest = directory / "older/checkpoints" / f"iter_{ROUNDS - 1 - 2 * SAVE_EVERY:07d}"
    resume(Subject.of(directory / "older", more, load=oldest))
    (directory / "older").rename(directory / "back")
    return [Subject.of(directory / name, more) for name in ("ended", "killed", "back")]


def audit(subject: Subject) -> object:
    """What `vime audit` prints. Raises VimeError when it ends with another code than 0."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = vime(["audit", str(subject.run)])
    if code:
        raise VimeError(err.getvalue())
    return out.getvalue()


def resume(subject: Subject) -> object:
    """What a run does with the directory before its first prompt, and the audit with which it ends; answers all that it
    would go on from."""
    run, config = subject.run, subject.config
    with contextlib.ExitStack() as claims:
        preflight(config, is_async=False)
        sign = claims.enter_context(claimed_checkpoints(config.model.save))
        claims.enter_context(RunDir.create(str(run), dump(config), resume=True))
        sign(run)
        start = find_start(config.model.load)
        assert start.checkpoint is not None
        Tracker(config.tracking, run, config.to_dict(), start_round=start.rollout_id).close()
        for doubt in doubts(start.checkpoint, config.model.load):
            raise VimeError(doubt)  # said on the screen
        state = read_run_state(start.checkpoint)
        restored = restore(run, config, start.rollout_id - 1, start.checkpoint)
        refuse_any_damage(start.checkpoint, compare_hashes)
        receipts = ReceiptFile(run, start_round=start.rollout_id, link=start.receipt)
        receipts.close()
        return start, state, restored, receipts.link, audit(subject)


def restore(run: Path, config: Config, checkpoint_round: int, checkpoint: Path) -> object:
    """The ledger as the run would go on with it, and the payloads that it would train without asking an engine."""
    choice, path, spool = choose_ledger(run, checkpoint), run / LEDGER_NAME, run / SPOOL_NAME
    assert choice.origin is None, choice
    train_partition = config.queue.transferqueue_partition
    may_be_torn = config.queue.transferqueue_fsync == Fsync.NEVER
    writer = Spool(spool)
    ledger = Ledger(path, ledger_rules(config, config.rollout.num_rollout or 0), clock=time.monotonic)
    try:
        lasting = lasting_file(path, checkpoint_round)
        check_spool(run, lasting, train=train_partition, may_be_torn=may_be_torn)
        report = ledger.rounds.restore(checkpoint_round, writer.has, choice.mark)
        with contextlib.closing(open_for_reading(path)) as connection:
            names = ("prompt_group", "round", "history", "partition", "identity")
            tables = [connection.execute(f"select * from {name} order by 1, 2").fetchall() for name in names[:3]]
            tables += [connection.execute(f"select * from {name}").fetchall() for name in names[3:]]
            needed = needed_payloads(connection, train_partition)
        payloads = {
            task: writer.read(task, checksum)
            for task, checksum in needed.items()
            if checksum is not None and writer.has(task, checksum)
        }
    finally:
        ledger.close()
        writer.close()
    return report, tables, payloads


class Warned(logging.Handler):
    """Collects what is said on the screen or in a log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())


def outcome(action: Any, subject: Subject) -> Outcome:
    warned = Warned()
    logging.getLogger().addHandler(warned)
    try:
        found = action(subject)
    except VimeError as error:
        return "named", str(error)
    except Exception as error:  # boundary: a traceback is what is looked for
        return "bare", f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger().removeHandler(warned)
    return ("named", "; ".join(warned.words)) if warned.words else ("answer", found)


def judge(subject: Subject, kind: str, name: str, bit: int, expected: dict[Any, Outcome]) -> Try:
    """One flip. The audit reads only, so the resume is tried on the same copy."""
    subject.put_back()
    flip(subject.run / name, bit)
    found = {action: outcome(action, subject) for action in (audit, resume)}
    words = [f"{action.__name__}: {said}" for action, (how, said) in found.items() if how != "answer"]
    answers = {action: answer for action, answer in found.items() if answer[0] == "answer"}
    changed = [action.__name__ for action, answer in answers.items() if answer != expected[action]]
    if any(how == "bare" for how, _ in found.values()):
        verdict = "SILENT"
    elif changed:
        verdict, words = "SILENT", [f"{action} has another answer" for action in changed] + words
    elif words:
        verdict = "named"
    else:
        verdict = "unread" if unread(name) else "harmless"
    return Try(subject, kind, name, bit, verdict, "; ".join(words))


def run_trial(subjects: Sequence[Subject], *, tries: int, seed: int) -> list[Try]:
    """Kinds of files by turns; which file of it and which bit by chance."""
    chance, made = random.Random(seed), []
    expected = {}
    for subject in subjects:
        subject.put_back()
        expected[subject.run] = {action: outcome(action, subject) for action in (audit, resume)}
        for action, (how, said) in expected[subject.run].items():
            assert how == "answer", f"{subject.run}: {action.__name__} of a whole directory: {said}"
    turns = [(subject, kind, names) for subject in subjects for kind, names in subject.kinds().items()]
    for number in range(tries):
        subject, kind, names = turns[number % len(turns)]
        name = chance.choice(names)
        bit = chance.randrange(8 * (subject.whole / name).stat().st_size)
        made.append(judge(subject, kind, name, bit, expected[subject.run]))
    return made


def go_on(subject: Subject, directory: Path) -> Finished:
    more = ["--load", str(subject.run / "checkpoints"), "--num-rollout", str(MORE_ROUNDS)]
    return train([*flags_of(directory), *more], subject.run)


def hashes_of(run: Path, *, since: float = 0.0) -> dict[int, str]:
    """By version, of weights confirmed after that time: what lies in an event from before may have been flipped."""
    events = [event for event in read_events(run) if event.kind == EventKind.WEIGHTS_CONFIRMED]
    return {int(str(e.fields["version"])): str(e.fields["content_hash"]) for e in events if e.time_s >= since}


def real_resumes(subjects: Sequence[Subject], made: Sequence[Try], directory: Path, num: int) -> Iterator[str]:
    """One line a resume; `SILENT` in it when other weights came out and nobody said why."""
    if not num:
        return
    subjects[0].put_back()
    undisturbed = go_on(subjects[0], directory)
    assert undisturbed.code == 0, undisturbed.output
    expected = hashes_of(subjects[0].run)
    quiet = {(one.subject.run, one.name): one for one in made if one.verdict in ("unread", "harmless")}
    batches = [[one for one in quiet.values() if one.subject == subject] for subject in subjects]
    by_kind = {(one.subject.run, one.kind): [one] for one in made if one.verdict == "named"}
    others = random.Random(num).sample(sorted(by_kind.values(), key=str), min(len(by_kind), max(0, num - len(batches))))
    for batch in [*batches, *others][:num]:
        subject = batch[0].subject
        subject.put_back()
        for one in batch:
            flip(subject.run / one.name, one.bit)
        started = time.time()
        finished = go_on(subject, directory)
        found = hashes_of(subject.run, since=started)
        if finished.code == 0 and found.items() <= expected.items() and MORE_ROUNDS in found:
            said = f"the weights of the run that nobody touched, in {len(found)} versions"
        elif finished.code in (2, 3) and found.items() <= expected.items():
            said = f"exit {finished.code}: " + " ".join(finished.output.strip().splitlines()[-3:])[:300]
        else:
            said = f"SILENT: exit {finished.code}, {finished.output[-300:]}"
        flips = f"{batch[0].name}, bit {batch[0].bit}" if len(batch) == 1 else f"a flip in each of {len(batch)} files"
        yield f"resume of {subject.run.name} with {flips}: {said}"


def table(made: Sequence[Try]) -> str:
    verdicts = ("named", "harmless", "unread", "SILENT")
    counts = Counter((one.kind, one.verdict) for one in made)
    lines = ["| file | " + " | ".join(verdicts) + " |", "|---" * (1 + len(verdicts)) + "|"]
    for kind in sorted({one.kind for one in made}):
        lines.append(f"| {kind} | " + " | ".join(str(counts[kind, verdict]) for verdict in verdicts) + " |")
    totals = Counter(one.verdict for one in made)
    lines.append(f"| all {len(made)} | " + " | ".join(str(totals[verdict]) for verdict in verdicts) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tries", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resumes", type=int, default=6)
    options = parser.parse_args(argv)
    directory = options.directory.resolve()
    directory.mkdir(parents=True)
    subjects = make_runs(directory)
    made = run_trial(subjects, tries=options.tries, seed=options.seed)
    lines = list(real_resumes(subjects, made, directory, options.resumes))
    bad = [str(one) for one in made if one.verdict == "SILENT"] + [line for line in lines if "SILENT" in line]
    sys.stdout.write("\n".join([table(made), *lines, *bad]) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
