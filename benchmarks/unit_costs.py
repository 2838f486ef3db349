"""What a unit of work costs in processes that a run has only once: CPU time over five doublings, and its growth.

    .venv/bin/python benchmarks/unit_costs.py [--repeats 5] [--held 24] [--doublings 5] [STATION ...]

Stations: `read` (an engine's JSON to numbers, by tokens; also beside lists of --held million tokens), `worker` (an
engine's JSON to a group's bytes and facts, by tokens; also beside held bytes), `coordinator` (leased facts to plan and
ticket, by tokens of a completion), `rank` (chunks to packed columns, by tokens), `plan` (--balance-data for 512
data-parallel ranks, by rows), `tickets` (the driver's CPU for a call that gives each rank its ticket, by ranks; real
Ray, TICKET_ACTORS actors that do nothing and are asked in turn), `stuck` (why-stuck, by ranks that wait for each other;
peak memory too). "before" is what the code did
until decision 0029, kept here; both sides take turns, medians of --repeats. Exit code 1 when a cost of today grows with
an exponent above 1.1, the coordinator's with tokens at all, or a worker's with what is held; or where 4,096 ranks take
more than LARGEST_TICKETS_S of the driver, or LARGEST_STUCK_MB of memory.
"""

import argparse
import gc
import json
import math
import random
import re
import statistics
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vime.batching.pack import pack
from vime.batching.plan import plan_round
from vime.data.rows import check_versions, decode_facts, encode_facts
from vime.handoff.group_store import EncodedGroup, MemoryStore, chunk_keys
from vime.handoff.ledger_types import Task
from vime.handoff.ticket import RoundTicket, make_ticket, read_rows
from vime.observability.stuck import judge
from vime.observability.waits import RunProcess, SeenWait, State
from vime.ray.rank_rounds import RoundToTrain
from vime.rollout.convert import encoded_group
from vime.rollout.engine_client import read_completions
from vime.rollout.worker import payload_of
from vime.types import Sample, SampleStatus, Version, VersionSpan
from vime.utils.heap import collect_when_asked

LARGEST_EXPONENT = 1.1
LARGEST_SHARE_OF_HELD = 1.25
"""So much dearer may reading be beside what is held: caches are shared with it."""
LARGEST_TICKETS_S = 1.0
LARGEST_STUCK_MB = 200.0
TICKET_ACTORS = 4
TICKET_GROUPS = 1024
SAMPLES = 16
GROUPS = 64
ARGS = SimpleNamespace(
    transferqueue_partition="train", transfer_queue_extra_data_fields=(), multimodal_keys=None, source_key="source",
    reward_key=None, loss_type="policy_loss", custom_reward_post_process_path=None, advantage_estimator="grpo",
    disable_grpo_std_normalization=False, hf_checkpoint="",
)  # fmt: skip
Side = Callable[[], object]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("stations", nargs="*", default=[], help="of those above (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side (default: 5)")
    parser.add_argument("--doublings", type=int, default=5, help="of the size (default: 5)")
    parser.add_argument("--held", type=int, default=24, help="million tokens held while reading (default: 24)")
    options = parser.parse_args()
    unknown = set(options.stations) - set(STATIONS)
    if unknown:
        parser.error(f"no station {', '.join(sorted(unknown))}; expected some of {', '.join(STATIONS)}")
    faults = []
    for name in options.stations or STATIONS:
        faults += STATIONS[name](options)
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


def read(options: argparse.Namespace) -> list[str]:
    """Return us of CPU per token, for one response with SAMPLES samples."""
    sizes = [256 << step for step in range(options.doublings + 1)]
    bodies = {size: answer_body(size) for size in sizes}
    held: list[list[int]] = []
    found: dict[tuple[int, bool], tuple[float, float]] = {}
    for is_held in (False, True):
        if is_held:
            held += [list(range(16_000)) for _ in range(options.held * 1_000_000 // 16_000)]
        for size, body in bodies.items():
            sides = (lambda body=body: before_read(body), lambda body=body: read_completions(body, SAMPLES, "engine"))
            before, now = measured(sides, options.repeats, freeze=(False, True))
            found[size, is_held] = (before / (SAMPLES * size) * 1e6, now / (SAMPLES * size) * 1e6)
    print("| an engine's JSON to numbers, us a token | before | now | before, beside what is held | now, beside it |")
    print("|---|---|---|---|---|")
    for size in sizes:
        costs = [*found[size, False], *found[size, True]]
        print(f"| {SAMPLES} samples of {size} tokens | {' | '.join(f'{cost:.2f}' for cost in costs)} |")
    faults = grown("read", sizes, [found[size, False][1] * size for size in sizes])
    share = statistics.median(found[size, True][1] / found[size, False][1] for size in sizes)
    print(f"held: {sum(map(len, held)) / 1e6:.0f} million tokens, which make reading {share:.2f} times as dear\n")
    if share > LARGEST_SHARE_OF_HELD:
        faults.append(f"read: {share:.2f} times as dear beside what is held, expected at most {LARGEST_SHARE_OF_HELD}")
    return faults


def worker(options: argparse.Namespace) -> list[str]:
    """Return us of CPU per token, from an engine's response to the stored bytes and the committed facts."""
    sizes = [256 << step for step in range(options.doublings + 1)]
    bodies = {size: answer_body(size) for size in sizes}
    held: list[EncodedGroup] = []
    found: dict[tuple[int, bool], float] = {}
    for is_held in (False, True):
        if is_held:  # as a worker holds finished groups until their round is written down
            held += [generated(0, bodies[sizes[-1]]) for _ in range(options.held * 1_000_000 // (SAMPLES * sizes[-1]))]
        for size, body in bodies.items():
            [now] = measured((lambda body=body: len(generated(0, body).record),), options.repeats, freeze=(True,))
            found[size, is_held] = now / (SAMPLES * size) * 1e6
    print("| an engine's JSON to a stored group, us a token | now | now, beside what is held |\n|---|---|---|")
    for size in sizes:
        print(f"| {SAMPLES} samples of {size} tokens | {found[size, False]:.2f} | {found[size, True]:.2f} |")
    faults = grown("worker", sizes, [found[size, False] * size for size in sizes])
    share = statistics.median(found[size, True] / found[size, False] for size in sizes)
    print(
        f"held: {len(held) * SAMPLES * sizes[-1] / 1e6:.0f} million tokens, which make it {share:.2f} times as dear\n"
    )
    if share > LARGEST_SHARE_OF_HELD:
        faults.append(f"worker: {share:.2f} times as dear beside what is held, expected {LARGEST_SHARE_OF_HELD}")
    return faults


def coordinator(options: argparse.Namespace) -> list[str]:
    """us of CPU a sample of a round of GROUPS groups: their facts read, checked and planned, and the ticket made. The
    sizes take turns: a moment in which the machine is slow is not one size's."""
    sizes = [256 << step for step in range(options.doublings + 2)]
    sides = []
    for size in sizes:
        groups = ((number, generated(number, None, size)) for number in range(GROUPS))
        leased = [(number, encode_facts(group.facts), len(group.chunks)) for number, group in groups]
        sides.append(lambda leased=leased: planned(leased))
    found = [seconds / (GROUPS * SAMPLES) * 1e6 for seconds in measured(tuple(sides), options.repeats)]
    print(f"| coordinator, round of {GROUPS} x {SAMPLES} samples, us a sample | now |\n|---|---|")
    for size, cost in zip(sizes, found, strict=True):
        print(f"| completions of {size} tokens | {cost:.1f} |")
    faults = grown("coordinator (a sample, by its tokens)", sizes, found)
    if max(found) > LARGEST_SHARE_OF_HELD * min(found):
        faults.append(f"coordinator: {min(found):.1f} to {max(found):.1f} us a sample; it must not depend on tokens")
    return faults


def rank(options: argparse.Namespace) -> list[str]:
    """us of CPU a token on a source rank: chunks read by key, rows cut out, columns packed."""
    sizes = [256 << step for step in range(options.doublings + 1)]
    print("| source rank, bytes to packed columns, us a token | now |\n|---|---|")
    found = []
    for size in sizes:
        store, group = MemoryStore(), generated(0, None, size)
        task = Task("train", 0, 1)
        handles = store.put("train", chunk_keys(task, len(group.chunks)), group.chunks)
        lengths = group.facts.rows["total_length"].tolist()
        made = plan_round(
            0, lengths, lengths, dp_size=1, samples_per_step=SAMPLES, micro_batch_size=SAMPLES,
            max_tokens_per_micro_batch=None, loads=None,
        )  # fmt: skip
        ticket = make_ticket(made, [(group.facts, handles)], partition="train")
        [now] = measured((lambda t=ticket, s=store: pack(list(read_rows(s, t, 0)[1].values())),), options.repeats)
        found.append(now / sum(lengths))
        print(f"| {SAMPLES} samples of {size} tokens | {found[-1] * 1e6:.3f} |")
    return grown("rank", sizes, [cost * size for cost, size in zip(found, sizes, strict=True)])


def generated(number: int, body: bytes | None, num_tokens: int = 0) -> EncodedGroup:
    """Make group `number` from an engine's response up to what is stored; without a body from numbers."""
    prompt = list(range(100))
    samples = []
    for at in range(SAMPLES):
        samples.append(Sample(group_index=number, index=number * SAMPLES + at, prompt="?" * 300, tokens=list(prompt)))
    if body is None:
        for sample in samples:
            spans = [VersionSpan(0, 0, num_tokens)]
            sample.append_response_tokens([7] * num_tokens, [-0.5] * num_tokens, versions=spans, text="x")
    else:
        for sample, answer in zip(samples, read_completions(body, SAMPLES, "engine"), strict=True):
            sample.append_response_tokens(answer.token_ids, answer.log_probs, versions=answer.versions, text="x")
    for at, sample in enumerate(samples):
        sample.reward, sample.status = float(at % 2), SampleStatus.COMPLETED
    group = encoded_group(ARGS, samples, producer_id="rollout-worker-0.1.abcdef", with_samples=True)
    payload_of(group, samples)
    return group


def planned(leased: list[tuple[int, bytes, int]]) -> RoundTicket:
    groups = [
        (decode_facts(number, data), chunk_keys(Task("train", number, 1), count)) for number, data, count in leased
    ]
    check_versions([facts for facts, _ in groups], 0, 0)
    rows = np.concatenate([facts.rows for facts, _ in groups])
    lengths = rows["total_length"].tolist()
    made = plan_round(
        0, lengths, rows["num_trainable"].tolist(), dp_size=8, samples_per_step=len(rows), micro_batch_size=1,
        max_tokens_per_micro_batch=None, loads=lengths,
    )  # fmt: skip
    return make_ticket(made, groups, partition="train_groups")


def plan(options: argparse.Namespace) -> list[str]:
    """s of CPU for the plan of a round."""
    chance = random.Random(0)
    sizes = [512 << step for step in range(options.doublings + 1)]
    print("| plan with --balance-data, 512 ranks | before, s | now, s |\n|---|---|---|")
    found = []
    for size in sizes:
        lengths = [chance.randint(200, 16_000) for _ in range(size)]
        sides = (
            lambda lengths=lengths: before_balanced(range(len(lengths)), lengths, 512),
            lambda lengths=lengths: plan_round(
                0, lengths, lengths, dp_size=512, samples_per_step=len(lengths), micro_batch_size=1,
                max_tokens_per_micro_batch=None, loads=lengths,
            ),
        )  # fmt: skip
        # The RolloutManager plans; a full collection here is not the plan's.
        before, now = measured(sides, options.repeats, freeze=(False, True))
        found.append(now)
        print(f"| {size} rows | {before:.3f} (the shares alone) | {now:.3f} |")
    return grown("plan", sizes, found)


class IdleRank:
    """Takes what `TrainerActor.train` takes and does nothing with it."""

    def train(self, work: RoundToTrain) -> None:
        pass

    def train_with_five(self, rollout_id: int, ticket: RoundTicket, version: int, given: Any, is_judged: bool) -> None:
        """As the call was until 2026-11-29."""


def tickets(options: argparse.Namespace) -> list[str]:
    """s of the driver's CPU (all its threads) until each rank has its ticket and has returned: one object in Ray's
    memory, a call to each rank, and the wait for them, as `Trainers.train` does."""
    import ray

    from vime.ray.actor import Actor, sent_once, start_actor
    from vime.ray.cluster import STOCK_WORKER, servers_alone
    from vime.ray.waits import wait_for

    group = generated(0, None, 64)
    facts, chunks = encode_facts(group.facts), len(group.chunks)
    ticket = planned([(number, facts, chunks) for number in range(TICKET_GROUPS)])
    is_mine = not ray.is_initialized()
    if is_mine:
        with servers_alone(STOCK_WORKER):  # as a run starts it
            ray.init(
                address="local", num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20,
                log_to_driver=False, configure_logging=False,
            )  # fmt: skip
    actors = [start_actor(IdleRank, {"num_cpus": 0}) for _ in range(TICKET_ACTORS)]

    def of(count: int) -> list[Actor[IdleRank]]:
        return [actors[rank % len(actors)] for rank in range(count)]

    def before(count: int) -> None:
        sent, given = sent_once(ticket), sent_once({})
        refs = [actor.ask(IdleRank.train_with_five, 0, sent, 0, given, True) for actor in of(count)]
        wait_for(refs, name="ranks to train", owner="trainer", deadline_s=300)

    def give(count: int) -> None:
        work = sent_once(
            RoundToTrain(rollout_id=0, ticket=ticket, version=Version(0), given={}, is_judged=True, num_begun=0)
        )
        refs = [actor.ask(IdleRank.train, work) for actor in of(count)]
        wait_for(refs, name="ranks to train", owner="trainer", deadline_s=300)

    try:
        give(len(actors))  # until all have started
        sizes = [128 << step for step in range(options.doublings + 1)]
        print("| driver, a ticket to each rank | before, s | now, s | now, us a rank |\n|---|---|---|---|")
        found = []
        for size in sizes:
            sides = (lambda size=size: before(size), lambda size=size: give(size))
            earlier, now = measured(sides, options.repeats)
            found.append(now)
            print(f"| {size} | {earlier:.3f} | {now:.3f} | {now / size * 1e6:.0f} |")
    finally:
        for actor in actors:
            actor.kill()
        if is_mine:
            ray.shutdown()
    faults = grown("tickets", sizes, found)
    if sizes[-1] <= 4096 and found[-1] > LARGEST_TICKETS_S:
        faults.append(f"tickets: {found[-1]:.2f} s for {sizes[-1]} ranks, expected at most {LARGEST_TICKETS_S}")
    return faults


def stuck(options: argparse.Namespace) -> list[str]:
    """s of CPU for the verdict on ranks of which all but one wait for all the others, and the peak of the memory that
    Python allocates for it, what is known of the ranks included."""
    sizes = [128 << step for step in range(options.doublings + 1)]
    print("| why-stuck, ranks that wait for their peers | before, s | now, s | now, peak MB |\n|---|---|---|---|")
    found, peaks = [], []
    for size in sizes:
        processes = ranks_that_wait(size)
        sides: tuple[Side, ...] = (
            lambda processes=processes: judge(processes, "not finished"),
            *([lambda processes=processes: before_visited(processes)] if size <= 1024 else []),
        )
        now, *before = measured(sides, options.repeats if size <= 512 else 1)
        found.append(now)
        peaks.append(peak_mb(lambda size=size: judge(ranks_that_wait(size), "not finished")))
        print(f"| {size} | {f'{before[0]:.3f}' if before else 'not run'} | {now:.4f} | {peaks[-1]:.1f} |")
    faults = grown("stuck", sizes, found)
    if sizes[-1] <= 4096 and peaks[-1] > LARGEST_STUCK_MB:
        faults.append(f"stuck: {peaks[-1]:.0f} MB for {sizes[-1]} ranks, expected at most {LARGEST_STUCK_MB:.0f}")
    return faults


def peak_mb(side: Side) -> float:
    """The most that Python's allocations of `side` come to at one time, without the interpreter and its modules."""
    tracemalloc.start()
    try:
        side()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


STATIONS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "read": read,
    "worker": worker,
    "coordinator": coordinator,
    "rank": rank,
    "plan": plan,
    "tickets": tickets,
    "stuck": stuck,
}


def measured(sides: tuple[Side, ...], repeats: int, freeze: tuple[bool, ...] = ()) -> list[float]:
    """CPU s of each side, medians of turns. `freeze`: the side runs as the RolloutManager does, with full collections
    when asked only."""
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for at, side in enumerate(sides):
            thresholds = gc.get_threshold()
            if freeze and freeze[at]:
                collect_when_asked()
            began = time.process_time()
            side()
            seconds[at].append(time.process_time() - began)
            gc.set_threshold(*thresholds)
            gc.unfreeze()
    return [statistics.median(turns) for turns in seconds]


def grown(name: str, sizes: list[int], costs: list[float]) -> list[str]:
    """The exponent of growth, least squares in logarithms; a fault when it is too large."""
    xs, ys = [math.log(size) for size in sizes], [math.log(max(cost, 1e-9)) for cost in costs]
    x_mean, y_mean = statistics.mean(xs), statistics.mean(ys)
    above = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    exponent = above / sum((x - x_mean) ** 2 for x in xs)
    print(f"{name}: cost grows as size^{exponent:.2f}\n")
    return (
        [f"{name}: exponent {exponent:.2f}, expected at most {LARGEST_EXPONENT}"] if exponent > LARGEST_EXPONENT else []
    )


def answer_body(num_tokens: int) -> bytes:
    """As vLLM 0.32 writes it."""
    chance = random.Random(num_tokens)
    choices = []
    for index in range(SAMPLES):
        tokens = [chance.randrange(150_000) for _ in range(num_tokens)]
        content = [
            {"token_id": token, "logprob": -chance.expovariate(1.0), "rank": 1, "top_logprobs": []} for token in tokens
        ]
        choices.append({
            "index": index, "token_ids": tokens, "finish_reason": "stop", "logprobs": {"content": content},
            "weight_versions": [{"version": "3", "start": 0, "end": num_tokens}],
        })  # fmt: skip
    return json.dumps({"choices": choices}).encode()


def before_read(body: bytes) -> list[Any]:
    choices = sorted(json.loads(body.decode(errors="replace"))["choices"], key=lambda choice: choice["index"])
    return [
        (list(choice["token_ids"]), [float(entry["logprob"]) for entry in choice["logprobs"]["content"]])
        for choice in choices
    ]


def before_balanced(rows: range, loads: list[int], dp_size: int) -> list[list[int]]:
    per_rank = len(rows) // dp_size
    shares: list[list[int]] = [[] for _ in range(dp_size)]
    totals = [0] * dp_size
    for row in sorted(rows, key=lambda row: (-loads[row], row)):
        rank = min((r for r in range(dp_size) if len(shares[r]) < per_rank), key=lambda r: (totals[r], r))
        shares[rank].append(row)
        totals[rank] += loads[row]
    return shares


def ranks_that_wait(count: int) -> list[RunProcess]:
    def wait(name: str) -> SeenWait:
        return SeenWait(name=name, owners=("trainer",), count=1, age_s=40.0, deadline_s=1800.0)

    ranks = [
        RunProcess(name=f"trainer-{rank}", pid=1, waits=(wait("its peers"),), last_seen=0.0, cpu_share=0.0)
        for rank in range(count - 1)
    ]
    late = RunProcess(name=f"trainer-{count - 1}", pid=1, state=State.STOPPED, last_seen=0.0, cpu_share=0.0)
    driver = RunProcess(name="driver", pid=1, waits=(wait("ranks to train"),), last_seen=0.0, cpu_share=0.0)
    return [driver, *ranks, late]


def before_visited(processes: list[RunProcess]) -> int:
    """The walk as it was: each link of each process is queued, and every name compared with every owner."""
    todo, visited = deque([processes[0]]), set()
    while todo:
        process = todo.popleft()
        if process.name in visited:
            continue
        visited.add(process.name)
        for wait in process.waits:
            for owner in wait.owners:
                pattern = re.compile(rf"{re.escape(owner)}\d*")
                named = [other for other in processes if pattern.fullmatch(other.name.lower().replace("-", ""))]
                todo.extend(other for other in named if other is not process)
    return len(visited)


if __name__ == "__main__":
    sys.exit(main())
