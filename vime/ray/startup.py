"""Start every part of a run in the one order that works, and stop every part in reverse, whatever happens.

The queue starts before any actor that connects to it, all processes start side by side, the parts that fail most
cheaply (data, plug-ins) are waited for first, and no prompt is sent before every engine has confirmed the trainer's
weights.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from vime.config.agent_checks import host_and_port
from vime.config.algo_checks import check_policy_moves
from vime.config.colocation import sleep_level
from vime.config.parse import Config
from vime.config.queue_checks import EXTERNAL
from vime.config.schedule import steps_of_round
from vime.gateway.address import read_address
from vime.observability.events import EventKind, EventLog
from vime.observability.metrics import Tracker
from vime.observability.screen import Screen
from vime.ray.actor import Actor, Options, start_actor
from vime.ray.changes import FleetChanges
from vime.ray.checkpoint import Start, find_start, read_run_state
from vime.ray.checkpoint_damage import doubts
from vime.ray.cluster import MANAGER_CPUS, NO_PATIENCE, Patience, start_ray, stop_ray
from vime.ray.components import Components, Parts, Watchers
from vime.ray.engines import STOP_S as ENGINES_STOP_S
from vime.ray.engines import Engines
from vime.ray.interrupts import Interrupts, children_outlive_the_terminal, nothing_to_save
from vime.ray.ledger_choice import choose_ledger
from vime.ray.placement import Places, reserved
from vime.ray.queue_keeper import QueueKeeper
from vime.ray.rollout_manager import MAX_CALLS, ManagerInfo, RolloutManager
from vime.ray.round_metrics import RoundMetrics
from vime.ray.servers import watched_ray
from vime.ray.stream import Stream
from vime.ray.trainers import STOP_S as TRAINERS_STOP_S
from vime.ray.trainers import Trainers
from vime.ray.waits import wait_for
from vime.sessions.key_file import agent_key, key_path
from vime.utils.failpoints import Point, failpoint
from vime.utils.network import is_loopback
from vime.utils.waits import waiting
from vime.weights.versions import VersionLedger

if TYPE_CHECKING:
    from vime.handoff.queue_client import QueueAddress

STOP_S = 10.0


class Starter:
    """Shows on the screen and in the event log which part is waited for, and how long it took."""

    def __init__(self, screen: Screen, events: EventLog, interrupts: Interrupts) -> None:
        self._screen, self._events, self._interrupts = screen, events, interrupts
        self.is_done = False  # every part is up

    @contextlib.contextmanager
    def part(self, name: str, text: str) -> Iterator[None]:
        self.poll()  # not every start looks for a signal while it waits
        self._screen.stage(text)
        started = time.monotonic()
        yield
        self._events.emit(EventKind.PART_STARTED, part=name, waited_s=time.monotonic() - started)

    def tell_left_out(self, info: ManagerInfo) -> None:
        """Report prompts that are too long; the RolloutManager's log gives the reason for the first one."""
        if info.num_too_long:
            self._screen.warn(
                f"{info.num_too_long} of {info.num_prompts + info.num_too_long} prompts are too long and left out "
                "(--rollout-max-prompt-len, --rollout-max-context-len); --refuse-long-prompts ends the start instead."
            )

    def grace(self, stop_s: float) -> float:
        """Seconds to wait for a part to end."""
        return stop_s if self.is_done else 0.0

    def poll(self) -> None:
        self._interrupts.raise_if_asked("start-up")


@contextlib.contextmanager
def start_components(
    config: Config,
    run_dir: Path,
    screen: Screen,
    interrupts: Interrupts,
    events: EventLog,
    on_ray_lost: Callable[[str], None],
    *,
    patience: Patience = NO_PATIENCE,
) -> Iterator[Components]:
    """Start every part and confirm the weights; on exit stop every part. `on_ray_lost`: as in `watched_ray`.
    `patience`: with nodes of a joined cluster.

    When the start fails or the user ends it, no part has work to finish, so none is waited for.
    """
    start = find_start(config.model.load)
    starter = Starter(screen, events, interrupts)
    interrupts.has_work = nothing_to_save
    with contextlib.ExitStack() as stack:
        with children_outlive_the_terminal():
            tracker = Tracker(config.tracking, run_dir, config.to_dict(), start_round=start.rollout_id)
        round_metrics = RoundMetrics(tracker, screen)
        stack.callback(round_metrics.close)
        if start.checkpoint is not None and (saved := read_run_state(start.checkpoint)).metrics is not None:
            round_metrics.retell(saved.rollout_id, saved.version, saved.metrics)
        places = _places_in_ray(config, starter, stack, on_ray_lost, patience)
        # before the queue: engines take longest to start, and Ray has few workers ready
        has_engines = config.cluster.num_engines > 0 and not config.debug.debug_train_only
        engines, trainers = None, None
        if has_engines and not config.cluster.colocate:
            engines = _engines(config, run_dir, events, screen, places)
        address, queue = None, None
        if config.queue.transferqueue_mode != "off":
            with starter.part("transfer_queue", "starting TransferQueue"):
                queue = QueueKeeper(config, events)
            address = queue.address
            stack.callback(queue.close)
        behind_the_parts = stack.enter_context(contextlib.ExitStack())  # what ends after all parts
        if config.cluster.colocate:
            trainers = _trainers(config, run_dir, address, starter, stack, places)
            with starter.part("gpus", "placing the trainer ranks"):
                rank_gpus = trainers.gpus(starter.poll)
            engines = _engines(config, run_dir, events, screen, places, rank_gpus)
        cursor = None if start.checkpoint is None else read_run_state(start.checkpoint).data_source
        parts = _start_parts(config, run_dir, address, engines, trainers, starter, stack, cursor, places)
        if config.queue.has_ledger:
            with starter.part("ledger", "opening the ledger"):
                parts.stream, parts.queue = _open_stream(config, run_dir, parts, start, places.home), queue
                behind_the_parts.callback(parts.stream.end)
                stack.callback(parts.stream.close)
                stack.callback(_watch(queue, parts).close_watch)
            if config.queue.transferqueue_mode == EXTERNAL:
                url = read_address(run_dir)
                screen.note(f"rollout jobs: {url} (`vime token make {run_dir} NAME` makes a token for one)")
        if config.agents.agent_listen is not None:
            _tell_agents(config, config.agents.agent_listen, run_dir, screen)
        versions = VersionLedger()
        if start.checkpoint is not None:
            with starter.part("checkpoint", f"loading {start.checkpoint}"):
                for doubt in doubts(start.checkpoint, config.model.load):
                    screen.warn(doubt)
                _restore(parts, start.checkpoint, versions)
        if engines is not None:
            engines.changes = FleetChanges(config, run_dir, engines, screen.note)
        watchers = Watchers(screen=screen, interrupts=interrupts, events=events, round_metrics=round_metrics)
        components = Components(config, run_dir, parts, watchers, versions, start)
        stack.callback(components.receipts.close)
        with starter.part("first_weights", "bringing the weights to the engines"):
            components.publish()
        if parts.stream is not None:
            parts.stream.begin()
        if start.rollout_id == 0 and not config.eval.skip_eval_before_train:
            components.evaluate(0)
        elif start.rollout_id > 0 and tracker.lacks(start.rollout_id - 1, "eval/"):
            components.evaluate_if_due(start.rollout_id - 1)  # the previous run ended before its evaluation
        screen.begin(start.rollout_id, parts.num_rollout)
        starter.is_done, interrupts.has_work = True, components.has_work
        yield components
        failpoint(Point.STOP)
        screen.stage("stopping")


def _places_in_ray(
    config: Config,
    starter: Starter,
    stack: contextlib.ExitStack,
    on_ray_lost: Callable[[str], None],
    patience: Patience,
) -> Places:
    stack.callback(stop_ray)
    with starter.part("ray", "starting Ray"), children_outlive_the_terminal():
        start_ray(config, starter.poll, patience=patience)
    stack.enter_context(watched_ray(on_ray_lost))
    return stack.enter_context(reserved(config, starter.poll, patience=patience))


def _start_parts(
    config: Config,
    run_dir: Path,
    queue_address: QueueAddress | None,
    engines: Engines | None,
    trainers: Trainers | None,
    starter: Starter,
    stack: contextlib.ExitStack,
    cursor: dict[str, object] | None,
    places: Places,
) -> Parts:
    deadline_s = config.cluster.start_timeout_secs
    options: Options = {"num_cpus": MANAGER_CPUS, "max_concurrency": MAX_CALLS, **places.home}
    manager = start_actor(RolloutManager, options, config, str(run_dir), queue_address)
    stack.callback(_stop_manager, manager, starter)
    if engines is not None:
        stack.callback(lambda: engines.stop(starter.grace(ENGINES_STOP_S)))
    if trainers is None and not config.debug.debug_rollout_only:
        trainers = _trainers(config, run_dir, queue_address, starter, stack, places)
    with starter.part("rollout_manager", "reading prompts and plug-ins"):
        [info] = wait_for(
            [manager.ask(RolloutManager.prepare, cursor)],
            name="prompts to load",
            owner="RolloutManager",
            deadline_s=deadline_s,
            on_poll=starter.poll,
        )
    starter.tell_left_out(info)
    num_rollout = _num_rollout(config, info)
    total_steps = num_rollout * steps_of_round(config)
    if trainers is not None and not config.cluster.colocate:
        trainers.start(total_steps, starter.poll)
    if engines is not None:
        is_outside = bool(config.cluster.rollout_external_engine_addrs)
        count = config.engine.vllm_router_count
        what = f"{'reaching' if is_outside else 'starting'} {len(engines)} vLLM engine(s), starting "
        what += "the router" if count == 1 else f"{count} routers"
        with starter.part("engines", what if is_outside else f"{what}, about 15 s"):
            [node_id] = wait_for(
                [manager.ask(RolloutManager.node)], name="its node", owner="RolloutManager", deadline_s=30
            )
            connected = engines.wait_ready(node_id, starter.poll)
        wait_for(
            [manager.ask(RolloutManager.connect, connected, engines.generate_key)],
            name="the routers' address",
            owner="RolloutManager",
            deadline_s=30,
        )
    if trainers is not None and engines is not None and config.cluster.colocate:
        # a vLLM engine takes its share of a GPU that it finds free, so no model of a trainer may be there yet
        engines.sleep(sleep_level(config))
        trainers.start(total_steps, starter.poll)
    if trainers is not None:
        with starter.part("trainers", f"building the model on {len(trainers)} trainer rank(s)"):
            trainers.wait_ready(starter.poll)
    return Parts(manager, trainers, engines, num_rollout)


def _engines(
    config: Config,
    run_dir: Path,
    events: EventLog,
    screen: Screen,
    places: Places,
    rank_gpus: Sequence[Sequence[str]] = (),
) -> Engines:
    """Begin to start the engines. Without trainers they generate with the checkpoint."""
    awaits_update = not config.debug.debug_rollout_only
    return Engines(
        config, run_dir, events, screen.warn, places=places, rank_gpus=rank_gpus, awaits_update=awaits_update
    )


def _trainers(
    config: Config,
    run_dir: Path,
    queue_address: QueueAddress | None,
    starter: Starter,
    stack: contextlib.ExitStack,
    places: Places,
) -> Trainers:
    trainers = Trainers(config, run_dir, queue_address, places)
    stack.callback(lambda: trainers.stop(starter.grace(TRAINERS_STOP_S)))
    return trainers


def _open_stream(config: Config, run_dir: Path, parts: Parts, start: Start, home: Options) -> Stream:
    is_resumed = start.checkpoint is not None
    return Stream.open(
        config,
        run_dir,
        parts.manager,
        num_rollout=parts.num_rollout,
        checkpoint_round=start.rollout_id - 1 if is_resumed else None,
        choice=choose_ledger(run_dir, start.checkpoint),
        home=home,
    )


def _watch(queue: QueueKeeper | None, parts: Parts) -> QueueKeeper:
    assert queue is not None, "mode streaming has one"
    queue.watch(parts.manager, parts.trainers)
    return queue


def _tell_agents(config: Config, address: str, run_dir: Path, screen: Screen) -> None:
    """Make the key of agents elsewhere, and say where it lies and where they ask."""
    path = key_path(config, run_dir)
    agent_key(path)
    screen.note(f"agents elsewhere: http://{address}/v1/sessions, from the first prompt on, with the key in {path}")
    if not is_loopback(host_and_port(address)[0]):
        screen.note(
            f"--agent-listen {address}: prompts and keys are not encrypted. On a network that others can listen to, "
            "listen on loopback and use a tunnel or a reverse proxy with TLS."
        )


def _restore(parts: Parts, checkpoint: Path, versions: VersionLedger) -> None:
    """Load the model on every rank, the data cursor in the manager and the version in the round's metrics."""
    state = read_run_state(checkpoint)
    if parts.trainers is not None:
        parts.trainers.load(checkpoint)
    wait_for(
        [parts.manager.ask(RolloutManager.load_state, state.data_source)],
        name="the data cursor to be restored",
        owner="RolloutManager",
        deadline_s=60,
    )
    versions.restore(state.version)


def _num_rollout(config: Config, info: ManagerInfo) -> int:
    if config.rollout.num_rollout is not None:
        return config.rollout.num_rollout
    per_epoch = max(1, info.num_prompts // config.rollout.rollout_batch_size)
    num_epoch = config.rollout.num_epoch or 1
    num_rollout = per_epoch * num_epoch
    check_policy_moves(config.critic, num_rollout, said_by=f"--num-epoch {num_epoch}, which is {num_rollout} rounds")
    return num_rollout


def _stop_manager(manager: Actor[RolloutManager], starter: Starter) -> None:
    if grace_s := starter.grace(STOP_S):
        with waiting("the RolloutManager to close", "rollout-manager", deadline_s=grace_s):
            ray.wait([manager.ask(RolloutManager.close)], timeout=grace_s)
    manager.kill()
