"""What a killed part costs a run, and how long it is away. Exit code 1: a promise was broken, and which.

    .venv/bin/python benchmarks/fleet.py [--part PART ...] [--engines 4] [--routers 1] [--kills 8] [--seed 0]

One run of train.py in mode streaming with scripted engines and two rollout workers: a token takes the same time
whatever else runs, and an engine answers two requests at a time, so that the rate of the run is that of its engines.
Parts are killed with SIGKILL one after the other, at a random moment of a round, each when all have worked for some
rounds. `--engine vllm` takes vLLM and a model of random weights; with `--part gateway` an external job brings
everything, without an engine. Those of RESTARTS restart the run by design, from a checkpoint of every round; a driver
is started again with the same command line.

Printed: response tokens a second before the first kill, while something was away, and in the rounds after it was back;
the seconds that a kill cost, for an engine those beyond its share while it was away; the recovery table (seconds from
SIGKILL until the events of STEPS: a worker is lost when others have its prompts; a round that is trained after a
restart may be one that was trained before); the load of the machine; and what is wrong: a restart of the run that
should not be, a round that was trained twice or never, a finding of the audit, a run that does not end upon Ctrl-C.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vime.backends.vllm_utils.launch import CPU_SERVER_MODULE
from vime.backends.vllm_utils.scripted_server import AT_ONCE, LOADS_FIRST, PACE
from vime.observability.events import EventKind, read_events

ROOT = Path(__file__).resolve().parents[1]
SCRIPTED = "vime.backends.vllm_utils.scripted_server"
PATIENCE_S = {"scripted": 240.0, "vllm": 600.0}
"""Of each engine: how long a start with some rounds, or a recovery, may take."""
END_S, POLL_S = 120.0, 0.1
QUIET_ROUNDS, FIRST_ROUNDS, WARM_ROUNDS = 3, 13, 3
"""Rounds between two kills; before the first kill and after the last, where rates are measured; the first of them, in
which processes run for the first time, and which count in no rate."""
WORKERS = 2
INTERRUPTED = "interrupted"
COMMITTED = "commit_groups"
RESTARTED = ("run_restarted", "weights_confirmed", "round_trained")
STEPS = {
    "engine": ("engine_lost", "engine_ready", "engine_readmitted"),
    "router": ("router_lost", "router_ready"),
    "worker": ("worker_lost",),
    "queue": ("queue_lost", "queue_ready"),
    "ledger": (COMMITTED,),
    "gateway": ("worker_lost", "group_put"),
    "manager": RESTARTED,
    "trainer": RESTARTED,
    "ray": RESTARTED,
    "driver": ("run_started", *RESTARTED[1:]),
}
"""Of each part: the events of a recovery, in this order. COMMITTED is a span: the first that began after the kill.
group_put: the job outside has put a group."""
RESTARTS = ("manager", "trainer", "ray", "driver")
TITLES = {
    "router": ("vllm::router",),
    "worker": ("ray::RolloutWorkerActor",),
    "queue": ("ray::SimpleStorageUnit", "ray::TransferQueueController"),
    "ledger": ("ray::LedgerActor",),
    "gateway": ("ray::GatewayActor",),
    "manager": ("ray::RolloutManager",),
    "trainer": ("ray::TrainerActor",),
    "ray": ("raylet/raylet ", "gcs/gcs_server "),
}
"""What the command line of a part contains; of several they are killed in turns."""
REWARD = "def reward(args, sample, **kwargs):\n    return float(len(set(sample.tokens)) % 3)\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", nargs="+", choices=STEPS, default=["engine"], help="a run for each")
    parser.add_argument("--engine", choices=("scripted", "vllm"), default="scripted")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--routers", type=int, default=1, help="of which the oldest is killed, so that they take turns")
    parser.add_argument("--kills", type=int, default=8, help="in each run")
    parser.add_argument("--tokens-per-second", type=float, default=20.0, help="of a sequence of a scripted engine")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    options = parser.parse_args()
    wrong = []
    for part in options.part:
        print(f"{part}:", flush=True)
        found = list(kill_in_a_run(argparse.Namespace(**vars(options) | {"part": part})))
        wrong += [f"{part}: {fault}" for fault in found]
        print("\n".join(f"FAILED: {fault}" for fault in found) or "nothing lost, nothing repeated", flush=True)
        if any(fault.startswith(INTERRUPTED) for fault in found):
            break
    print("\n".join(f"FAILED: {fault.splitlines()[0]}" for fault in wrong) or f"kept: {', '.join(options.part)}")
    return 1 if wrong else 0


def kill_in_a_run(options: argparse.Namespace) -> Iterator[str]:
    """Make one run; yields what is wrong."""
    with tempfile.TemporaryDirectory() as directory:
        run, kills, wrong = Run(Path(directory), options), [], ""
        until = time.time()
        try:
            for kill in kill_parts(run, options):
                kills.append(kill)
                until = time.time()
        except RuntimeError as error:
            wrong = f"after {len(kills)} kills or one more: {error}\n{run.last_lines()}"
        except KeyboardInterrupt:
            wrong = f"{INTERRUPTED} after {len(kills)} kills or one more"
        finally:
            late: list[int] = []  # a signal that comes now would lose the figures
            former = signal.signal(signal.SIGINT, lambda number, _: late.append(number))
            code = run.end()
            signal.signal(signal.SIGINT, former)
        if late and not wrong:
            wrong = f"{INTERRUPTED} after {len(kills)} kills"
        if code != 128 + signal.SIGINT and not wrong:
            wrong = f"upon Ctrl-C the run ended with {code}\n{run.last_lines()}"
        if wrong:
            yield wrong
        if kills:
            report(run, kills, until, options)
        yield from faults(run.path, len(kills), options.part)
        yield from findings(run.path)


class Run:
    """The run, and what brings groups to it from outside."""

    def __init__(self, out: Path, options: argparse.Namespace) -> None:
        self.path, self._output = out / "run", out / "out"
        self._job: Any = None
        self.puts: list[float] = []  # unix times
        self.loads: list[float] = []  # of the machine, at each kill
        write_task(out)
        self._flags = run_flags(out, options)
        if options.part == "gateway":
            self._flags += self._bring(socket_address())
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", AT_ONCE: "2", LOADS_FIRST: "1"}
        self._environment[PACE] = str(options.tokens_per_second)
        self.start()

    def start(self) -> None:
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "train.py", *self._flags],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _bring(self, address: str) -> list[str]:
        """Start a job outside, which waits for the gateway; returns the flags of a run that has one."""
        from tests.helpers.external_run import Bringer
        from tests.helpers.jobs import make_token

        puts = self.puts

        class Job(Bringer):
            def group(self, *key: Any) -> dict[str, Any]:
                """Note the time: the group before was acknowledged, and the gateway has said which weights serve."""
                puts.append(time.time())
                return super().group(*key)

        self._job = Job(f"http://{address}", make_token(self.path, "job"))
        self._job.start()
        return ["--transferqueue-mode", "external", "--transferqueue-address", address, "--rollout-num-engines", "0"]

    def end(self) -> int | None:
        """Return the exit code upon Ctrl-C; None when it did not end within END_S and was killed."""
        if self._job is not None:
            self._job.is_stopping = True
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if self.process.poll() is None:
                for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            if self._job is not None:
                self._job.close()

    def wait_for(self, what: str, is_so: Callable[[], bool], deadline_s: float) -> None:
        ends = time.monotonic() + deadline_s
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"the run ended with {self.process.poll()}, or no {what} for {deadline_s:g} s")
            time.sleep(POLL_S)

    def times(self, step: str) -> list[float]:
        """Return when this step of a recovery happened."""
        if step == "group_put":
            return self.puts[1:]  # the first is made before anything is acknowledged
        return [event["t"] for event in self.events(step)]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Those of this kind, as far as they are whole, in the order of time: workers are watched by the manager, all
        else by the driver."""
        found = []
        for file in (self.path / "events").glob("*.jsonl"):
            lines = file.read_text().splitlines(keepends=True)
            found += [json.loads(line) for line in lines if line.endswith("\n") and f'"{kind}"' in line]
        return sorted((event for event in found if event["kind"] == kind), key=lambda event: event["t"])

    def last_lines(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-25:])


def write_task(out: Path) -> None:
    import runpy

    quickstart = runpy.run_path(str(ROOT / "examples" / "quickstart" / "warm_start.py"))
    quickstart["build_model"](0).save_pretrained(out / "model")
    quickstart["build_tokenizer"]().save_pretrained(out / "model")
    runpy.run_path(str(ROOT / "examples" / "quickstart" / "prepare.py"))["write_data"](
        out, num_train=64, num_eval=8, seed=0
    )
    (out / "reward.py").write_text(REWARD)


def run_flags(out: Path, options: argparse.Namespace) -> list[str]:
    flags = [
        *("--hf-checkpoint", str(out / "model"), "--prompt-data", str(out / "train.jsonl"), "--input-key", "input"),
        *("--label-key", "label", "--custom-rm-path", f"{out / 'reward.py'}:reward", "--device", "cpu"),
        *("--rollout-batch-size", str(2 * options.engines), "--n-samples-per-prompt", "4"),
        *("--rollout-max-response-len", "40", "--rollout-max-context-len", "64", "--micro-batch-size", "32"),
        *("--lr", "1e-4", "--num-rollout", "4000", "--transferqueue-mode", "streaming"),
        *("--rollout-num-engines", str(options.engines), "--vllm-router-count", str(options.routers)),
        *("--vllm-server-concurrency", "4", "--on-train-rollout-diff", "ignore", "--run-dir", str(out / "run")),
        *("--engine-health-interval-secs", "1"),
    ]
    if options.engine == "scripted":
        flags += ["--debug-engine-module", SCRIPTED]
    if options.part != "gateway":
        flags += ["--num-rollout-workers", str(WORKERS)]
    if options.part in RESTARTS:
        flags += ["--save-interval", "1", "--keep-checkpoints", "3"]
    if options.part == "driver":
        flags += ["--load", str(out / "run" / "checkpoints")]
    return flags


def socket_address() -> str:
    """Return an address of this machine at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def kill_parts(run: Run, options: argparse.Namespace) -> Iterator[tuple[float, list[float]]]:
    """Kill one part after the other; yields, when the run is quiet again, the unix times of the kill and of the steps
    of its recovery."""
    chance, patience_s = random.Random(options.seed), PATIENCE_S[options.engine]

    def quiet(num_rounds: int) -> None:
        trained = len(run.events("round_trained"))
        run.wait_for("round", lambda: len(run.events("round_trained")) >= trained + num_rounds, patience_s)

    quiet(FIRST_ROUNDS)
    for number in range(options.kills):
        *_, before, last = run.times("round_trained")
        time.sleep(chance.uniform(0, last - before))  # to a moment of the next round, which takes as long
        process = find_part(run.process.pid, options, number)
        run.loads.append(os.getloadavg()[0])
        at = time.time()
        process.kill()
        if options.part == "driver":
            run.process.wait(END_S)
            run.start()
        run.wait_for("recovery", lambda: recovery(run, options.part, at) is not None, patience_s)  # noqa: B023 - at once
        steps = recovery(run, options.part, at) or []
        quiet(QUIET_ROUNDS if number + 1 < options.kills else FIRST_ROUNDS)
        yield at, steps


def recovery(run: Run, part: str, killed: float) -> list[float] | None:
    """Return when each step after this kill was done; None while one is missing."""
    steps: list[float] = []
    for step in STEPS[part]:
        after = steps[-1] if steps else killed
        if step == COMMITTED:
            spans = [event for event in run.events("span_ended") if event["name"] == step and not event["error"]]
            times = [event["t"] for event in spans if event["t"] - event["duration_s"] > killed]
        else:
            times = [at for at in run.times(step) if at > after]
        if not times:
            return None
        steps.append(times[0])
    return steps


def find_part(driver: int, options: argparse.Namespace, number: int) -> psutil.Process:
    """Return the process for this kill: the driver, an engine, in turns, which has a seed of its own, or the oldest of
    those whose title is the next of TITLES."""
    if options.part == "driver":
        return psutil.Process(driver)
    module = SCRIPTED if options.engine == "scripted" else CPU_SERVER_MODULE
    seed = str(42 + number % options.engines)
    titles = TITLES.get(options.part, ("",))
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        is_engine = words[1:3] == ["-m", module] and words[words.index("--seed") + 1] == seed
        if is_engine if options.part == "engine" else titles[number % len(titles)] in " ".join(words):
            found.append(process)
    if not found:
        raise RuntimeError(f"no process of {options.part} for kill {number}")
    return min(found, key=lambda process: process.create_time())


def faults(path: Path, num_kills: int, part: str) -> Iterator[str]:
    """Yield what a run must not have done."""
    events = read_events(path, with_spans=False)
    restarts = [event for event in events if event.kind == EventKind.RUN_RESTARTED]
    expected = num_kills if part in RESTARTS and part != "driver" else 0
    print(f"{num_kills} kills, {len(restarts)} restarts of the run")
    if len(restarts) != expected:
        errors = "; ".join(str(event.fields["error"]).splitlines()[0] for event in restarts)
        yield f"{len(restarts)} restarts of the run, expected {expected}: {errors}"
    trained = Counter(int(str(e.fields["rollout_id"])) for e in events if e.kind == EventKind.ROUND_TRAINED)
    if missing := sorted(set(range(max(trained, default=-1) + 1)) - set(trained)):
        yield f"rounds {missing} were not trained"
    if part not in RESTARTS and (again := sorted(number for number, times in trained.items() if times > 1)):
        yield f"rounds {again} were trained again without a restart"


def findings(path: Path) -> Iterator[str]:
    """Yield what `vime audit` finds."""
    audit = [sys.executable, "-m", "vime", "audit", str(path)]
    done = subprocess.run(audit, cwd=ROOT, check=False, capture_output=True, text=True)
    print(done.stdout.strip())
    if done.returncode:
        yield f"the audit ended with {done.returncode}: {(done.stdout + done.stderr).strip()}"


def report(run: Run, kills: list[tuple[float, list[float]]], until: float, options: argparse.Namespace) -> None:
    """Print the figures of these kills and of the rounds that ended before `until`."""
    away = [(killed, steps[-1]) for killed, steps in kills]
    rates = {"before the first kill": Rate(), f"{options.part} away": Rate(), "all of them back": Rate()}
    before, during, after = rates.values()
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    tokens_of = {line["step"]: line["metrics"]["rollout/num_tokens"] for line in lines if "metrics" in line}
    rounds = [event for event in run.events("round_trained") if event["t"] <= until]
    for earlier, later in itertools.pairwise(rounds[WARM_ROUNDS:]):
        began, ended, number = earlier["t"], later["t"], later["rollout_id"]
        is_quiet = all(ended < lost or began > back for lost, back in away)
        rate = (before if ended < away[0][0] else after) if is_quiet else during
        is_new = not any(event["rollout_id"] == number for event in rounds[: rounds.index(later)])
        rate.add(tokens_of[number] if is_new else 0, ended - began)  # what is trained again is not progress
    for name, rate in rates.items():
        print(f"{name:>24}: {rate}")
    full = (before.tokens + after.tokens) / (before.seconds + after.seconds)
    print(f"{'back to':>24}: {100 * after.mean / before.mean:.0f} % of the rate before the first kill")
    share = sum(back - lost for lost, back in away) / options.engines if options.part == "engine" else 0.0
    cost = (during.seconds - during.tokens / full - share) / len(kills)
    print(f"a kill cost {cost:.2f} s" + " beyond its share" * bool(share))
    print(f"{'seconds from SIGKILL to':>24} {'median':>7} {'p95':>7} {'max':>7}")
    for place, step in enumerate(STEPS[options.part]):
        took = sorted(steps[place] - killed for killed, steps in kills)
        p95 = took[round(0.95 * (len(took) - 1))]
        print(f"{step:>24} {statistics.median(took):>7.2f} {p95:>7.2f} {took[-1]:>7.2f}")
    print(f"load at the kills: {min(run.loads):.1f} to {max(run.loads):.1f}, median {statistics.median(run.loads):.1f}")


class Rate:
    """Tokens and seconds of rounds."""

    def __init__(self) -> None:
        self.tokens, self.seconds, self._each = 0.0, 0.0, list[float]()

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self._each.append(tokens / seconds)

    @property
    def mean(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        return (
            f"{len(self._each)} rounds, {self.mean:.1f} tokens/s in {self.seconds:.0f} s, median of rounds "
            f"{statistics.median(self._each):.1f}"
        )


if __name__ == "__main__":
    sys.exit(main())
