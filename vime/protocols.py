"""Protocols of the plug-in points and of the replaceable parts, and loading a plug-in by dotted path.

A plug-in is named by a dotted path (`package.module.name`) or by a file (`path/to/file.py:name`). It is checked when
it is loaded, at start-up, so that a wrong signature is refused before the first prompt is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, Required, TypedDict, runtime_checkable

from vime.data.rows import TrainRow
from vime.types import (
    ConfigError,
    EngineAddress,
    EngineReport,
    EngineSpec,
    PluginError,
    RankPlace,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    Sample,
    SamplingRule,
    Version,
    VimeError,
    is_machine_fault,
)

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from vime.batching.pack import PackedBatch
    from vime.config.lora import AdapterInfo
    from vime.config.parse import Args
    from vime.weights.plan import TensorMeta
    from vime.weights.update_info import UpdateInfo

logger = logging.getLogger(__name__)


class SamplingParams(TypedDict, total=False):
    """How a completion is sampled, in vLLM's names. Generate functions get it and pass it on; other keys may be
    added."""

    temperature: Required[float]
    max_tokens: Required[int]
    top_p: float
    top_k: int
    stop: list[str]
    stop_token_ids: list[int]
    seed: int


@runtime_checkable
class DataSource(Protocol):
    """The source of prompts. `get_samples(n)` returns n groups of N pending samples each."""

    def get_samples(self, num_groups: int) -> list[list[Sample]]: ...
    def add_samples(self, groups: list[list[Sample]]) -> None: ...
    def save(self, rollout_id: int) -> dict[str, object]: ...
    def load(self, state: dict[str, Any]) -> None: ...
    def __len__(self) -> int: ...


class RolloutFunction(Protocol):
    """Run one round of generation, or one evaluation."""

    def __call__(
        self, args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
    ) -> RolloutFnTrainOutput | RolloutFnEvalOutput: ...


LOSS_PARAMETERS = ("args", "logp_T", "entropy_T", "columns")
"""The parameters of --custom-loss-path, by position; see `LossFunction`."""


class LossFunction(Protocol):
    """--custom-loss-path: the loss of every token, [T] with graph. Vime masks it and divides by the step's
    denominators, so that no layout or packing changes it.

    T: packed tokens of a micro-batch. `logp_T` and `entropy_T` carry the graph and may be 0 where no response token is
    predicted; `columns` are constants by name: advantage, old_logp, rollout_logp, mask; ref_logp under --use-kl-loss or
    --kl-coef; value and return under ppo.
    """

    def __call__(self, args: Args, logp_T: Tensor, entropy_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResponse:
    """The responses of all engines to one bucket of weights; seconds are the slowest engine's."""

    pause_s: float  # of the first bucket: until no engine generated any more
    confirm_s: float  # of the last one: from loaded to confirmed
    reports: Sequence[EngineReport]  # of the last one


class EngineControl(Protocol):
    """Control of every engine of the fleet at once; each call reaches all engines or raises EngineError."""

    @property
    def addresses(self) -> Sequence[EngineAddress]: ...
    def world_sizes(self) -> list[int]: ...
    def init_transfer(self, init_info_by_engine: Sequence[Mapping[str, object]]) -> None: ...
    def update(
        self, update_info: UpdateInfo, *, version: Version, pause_mode: str, adapter: AdapterInfo | None = None
    ) -> UpdateResponse:
        """Send one bucket of `version`, of the model or of an adapter: the first one pauses the engines; after the last
        one they report what they hold."""
        ...

    def resume(self) -> None: ...


class PackLoss(Protocol):
    """The loss of one packed micro-batch (T tokens), as its share of the step's loss, and statistics [S] float64 that
    are summed alike over all packs and ranks.

    `value_T` and `entropy_T` carry the graph: log-probabilities of the labels and entropies of a language model;
    predicted returns and zeros of a model with a value head. The share is divided by the step's GLOBAL denominators
    already, so no layout, packing or number of micro-batches changes the sum. It is part of the graph, also for a pack
    without rows: every rank calls backward.
    """

    def __call__(self, value_T: Tensor, entropy_T: Tensor, batch: PackedBatch, /) -> tuple[Tensor, Tensor]: ...


class PendingSave(Protocol):
    """A checkpoint whose state was copied and whose bytes are still being written.

    `hashes` has size and hash of the files that this rank hashed while it wrote them, once `wait` has returned; it may
    be empty."""

    hashes: dict[Path, tuple[int, str]]

    def wait(self, deadline_s: float) -> None:
        """Wait until it is complete on every rank. Local. Raises CheckpointError on every rank when one could not
        write, and WaitTimeoutError."""
        ...


class TrainEngine(Protocol):
    """One model on this rank: forward, learn, save, load, sleep, export. Each role is an engine; `vime/training` uses
    them.

    Every method but `weight_metadata` and `learning_rate` is collective: over the ranks of this replica for `forward`
    and `export_weights` (over all trainer ranks where experts or shards lie on several replicas), over all trainer
    ranks for the others. R: response tokens of a row.

    A frozen role refuses (VimeError) to learn, save and load; a sleeping engine refuses everything but `wake_up`,
    `sleep` and `rest`, which then do nothing, and `weight_metadata`; a resting one refuses what a frozen one does.
    """

    @property
    def takes_part_in_export(self) -> bool:
        """Return whether `export_weights` needs this rank."""
        ...

    @property
    def learning_rate(self) -> float:
        """Return the rate that the next `apply_gradients` uses."""
        ...

    def forward(self, batches: Sequence[Sequence[TrainRow]], rule: SamplingRule | None = None) -> list[list[Tensor]]:
        """Return [R] fp32 on the CPU per row of each micro-batch: log p of the response tokens at the sampling
        temperature, or with a value head the predicted return at each. [] where `RankPlace.holds_tokens` is False. No
        gradient.

        `rule`: log p under another rule than the run's (`algo.sampling.log_probs_under`), to record a mismatch;
        never for a value head."""
        ...

    def accumulate(
        self,
        batches: Sequence[Sequence[TrainRow]],
        columns: Sequence[Mapping[str, Sequence[Tensor]]],
        loss: PackLoss,
        *,
        is_first: bool = True,
        is_last: bool = True,
    ) -> list[Tensor]:
        """Run forward and backward over micro-batches of one optimizer step: all of them, or one early batch after
        another.

        The first early batch clears old gradients; after the last one the gradients are those of one pass over the
        micro-batches of all early batches. `forward` may be called between two early batches. `columns[i][name][j]` is
        the [R] tensor of a further column for `batches[i][j]`. Every rank passes the same number of micro-batches, of
        which some may be empty. Returns the statistics of each pack, [] off `RankPlace.holds_tokens`.
        """
        ...

    def apply_gradients(self, scale: float = 1.0) -> float:
        """Multiply the gradients by `scale`, clip, step, advance the schedule; return their global norm before
        clipping. If the norm is not finite, every rank returns it without touching the weights."""
        ...

    def finish_round(self) -> None:
        """Make the parameters those of the last step on every rank, for the next reader."""
        ...

    def save(self, directory: Path, *, in_background: bool = False) -> PendingSave:
        """Write model, optimizer, schedule and random states of this call into a new directory.

        In the background: returns when the state is copied to host memory, and the bytes are written while training
        continues; this save has ended before the next one begins. Otherwise everything is written when this returns.
        """
        ...

    def load(self, directory: Path) -> None:
        """Load what `save` wrote, also from another layout of the same backend."""
        ...

    def sleep(self) -> None:
        """Free device memory of parameters, gradients and optimizer; keep their values and the random states."""
        ...

    def rest(self) -> None:
        """As `sleep`, but the weights stay on the device, for a weight update. `sleep` then frees them too."""
        ...

    def wake_up(self) -> None:
        """Undo `sleep` and `rest`: nothing computed afterwards differs from a run without the pair."""
        ...

    def weight_metadata(self) -> list[TensorMeta]:
        """Return what `export_weights` will yield, in its order. Local."""
        ...

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield HF tensors of the present weights; every rank that takes part must exhaust it."""
        ...


class AdapterEngine(TrainEngine, Protocol):
    """A `TrainEngine` that may train a low-rank adapter instead of the model (--lora-rank). `export_weights` then
    yields the model with the adapter merged into it."""

    def export_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model without the adapter, which never moves, as `weight_metadata` says. Collective like
        `export_weights`."""
        ...

    def adapter_metadata(self) -> list[TensorMeta]:
        """Return what `export_adapter` will yield, in its order; [] without an adapter. Local."""
        ...

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the present adapter, fp32, by the names of PEFT's files. Collective like `export_weights`."""
        ...

    def base_only(self) -> AbstractContextManager[None]:
        """Inside, `forward` is that of the base, bit for bit. Local."""
        ...


class TrainBackend(Protocol):
    """One process among the trainer ranks: its device and process groups; engines are built in it, one per role."""

    @property
    def place(self) -> RankPlace: ...
    @property
    def replica_group(self) -> dist.ProcessGroup: ...
    @property
    def device(self) -> torch.device: ...
    def build(self, spec: EngineSpec) -> TrainEngine:
        """Build an engine. Collective over all trainer ranks, in the same order on each."""
        ...

    def close(self) -> None: ...


def load_plugin(path: str, flag: str, parameters: Iterable[str]) -> Callable[..., object]:
    """Import `path` (given by `flag`) and check that it can be called with `parameters` by position.

    Raises ConfigError naming the flag, what was found and what was expected.
    """
    plugin = import_object(path, flag)
    if not callable(plugin):
        raise ConfigError(
            f"{flag} {path}: expected a function, got {type(plugin).__name__} {plugin!r:.60}. Name a callable."
        )
    expected = list(parameters)
    try:
        signature = inspect.signature(plugin)
    except ValueError:  # C code without a signature
        return plugin
    try:
        signature.bind(*expected)
    except TypeError as error:
        raise ConfigError(
            f"{flag} {path}: cannot be called as ({', '.join(expected)}): {error}; its signature is {signature} (at "
            f"{_defined_at(plugin)}). Give it these parameters."
        ) from error
    return plugin


@contextlib.contextmanager
def calling_plugin(
    where: str,
    plugin: Callable[..., object],
    raises: type[VimeError] = PluginError,
    *,
    expected: str = "",
    on_device: bool = False,
) -> Iterator[None]:
    """Wrap a call of a plug-in: what it raises becomes `raises`, with the plug-in's own file and line in the message
    and the traceback in this process's log.

    This includes SystemExit and CancelledError: Python would take them for the end of the calling thread, loop or task,
    and the process that waits for the result would wait for ever. It excludes errors of Vime, a cancellation by us,
    and, for a plug-in that works `on_device` of a trainer rank, a fault of the device or of a peer.
    """
    try:
        yield
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, VimeError) or _is_cancelled_by_us(error) or (on_device and is_machine_fault(error)):
            raise
        logger.exception("%s raised", where)
        raise raises(
            f"{where}: raised {type(error).__name__}: {error} (at {_raised_at(error, plugin)}). {expected}".rstrip()
        ) from error


def _is_cancelled_by_us(error: BaseException) -> bool:
    if not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop here
        return False
    return task is not None and task.cancelling() > 0


def _defined_at(plugin: Callable[..., object]) -> str:
    code = getattr(inspect.unwrap(plugin), "__code__", None)
    if code is None:  # a class, or an instance with __call__
        return f"{getattr(plugin, '__module__', '?')}.{getattr(plugin, '__qualname__', type(plugin).__qualname__)}"
    return f"{code.co_filename}:{code.co_firstlineno}"


def _raised_at(error: BaseException, plugin: Callable[..., object]) -> str:
    """Return the last line of the plug-in's own file that led to `error`, `file.py:12`; without one, the last line of
    all."""
    while isinstance(plugin, functools.partial):
        plugin = plugin.func
    function = inspect.unwrap(plugin)
    code = getattr(function, "__code__", None)  # an instance with __call__ has none: then the last line of all
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}"


def import_object(path: str, flag: str) -> object:
    """Resolve `package.module.name` or `file.py:name`."""
    module_name, separator, name = path.rpartition(":") if ".py:" in path else path.rpartition(".")
    if not separator or not name:
        raise ConfigError(f"{flag} {path}: expected package.module.name or path/to/file.py:name.")
    module = _import_module(module_name, f"{flag} {path}")
    if not hasattr(module, name):
        public = [entry for entry in dir(module) if not entry.startswith("_")]
        raise ConfigError(
            f"{flag} {path}: {module_name} has no {name!r}; it has {', '.join(public[:20])}. Name one of them."
        )
    found: object = getattr(module, name)
    return found


def _import_module(name: str, where: str) -> ModuleType:
    """Import the module of a plug-in. It runs the user's code, which may raise anything. The error names file and line
    of the plug-in itself, not of the library that it called last."""
    is_file = name.endswith(".py")
    try:
        return _import_file(name) if is_file else importlib.import_module(name)
    except FileNotFoundError as error:
        raise ConfigError(f"{where}: {error}. Expected path/to/file.py:name; check the path.") from error
    except ModuleNotFoundError as error:
        if not is_file and error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{where}: cannot import {name}: there is no module {error.name!r}. Expected "
                "package.module.name or path/to/file.py:name; check the spelling and PYTHONPATH."
            ) from error
        raise ConfigError(
            f"{where}: it imports {error.name!r}, which is not installed (at {_imported_at(error, name)}). Install it "
            "beside Vime, or remove the import."
        ) from error
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ConfigError(
            f"{where}: is not Python: {error.msg} (at {error.filename}:{error.lineno}): {line!r:.80}. Correct "
            "that line."
        ) from error
    except (Exception, SystemExit) as error:  # boundary: the user's module may raise anything when it is imported
        raise ConfigError(
            f"{where}: importing it raised {type(error).__name__}: {error} (at {_imported_at(error, name)}). Correct "
            "that line."
        ) from error


def _imported_at(error: BaseException, name: str) -> str:
    """Return the last line of the plug-in's own file, or of the first file that is not part of Python's import
    system."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    frames = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
    own = [frame for frame in frames if frame.filename == str(Path(name).expanduser().resolve())]
    if not frames:
        return name
    last = (own or frames[:1])[-1]
    return f"{last.filename}:{last.lineno}"


def _import_file(file: str) -> ModuleType:
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"vime_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while it is being executed
    try:
        spec.loader.exec_module(module)
    except BaseException:  # boundary: half of a module is not kept, so that the next import raises the same error
        del sys.modules[spec.name]
        raise
    return module
