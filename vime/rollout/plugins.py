"""Loads and checks every dotted-path flag in one place, before any process starts.

A plug-in is loaded once per process: a file is not executed again for each sample.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import cast

from vime.config.parse import Args
from vime.protocols import LOSS_PARAMETERS, DataSource, RolloutFunction, SamplingParams, calling_plugin, load_plugin
from vime.rollout.reasoning_gym_tasks import task_names
from vime.rollout.slime_aliases import CallArgs, dialect_faults, install, sglang_params, speaks_slime
from vime.types import ConfigError, Sample

SIGNATURES: dict[str, tuple[str, ...]] = {
    "data_source_path": ("args",),
    "rollout_function_path": ("args", "rollout_id", "data_source", "evaluation"),
    "custom_generate_function_path": ("args", "sample", "sampling_params"),
    "custom_rm_path": ("args", "sample"),
    "custom_reward_post_process_path": ("args", "groups"),
    "dynamic_sampling_filter_path": ("args", "samples"),
    "rollout_sample_filter_path": ("args", "groups"),
    "buffer_filter_path": ("args", "rollout_id", "buffer", "num_samples"),
    "custom_loss_path": LOSS_PARAMETERS,
    "agent_function": ("task",),
    "environment": (),
}
"""Flag -> the parameters that Vime passes to the plug-in, by position."""

_ANSWERS_AT_ONCE = (
    *("rollout_function_path", "custom_reward_post_process_path", "dynamic_sampling_filter_path"),
    *("rollout_sample_filter_path", "buffer_filter_path", "custom_loss_path"),
)
_OF_ENVIRONMENT = ("reset", "step", "reward")
_METHODS = ("get_samples", "add_samples", "save", "load", "__len__")


def check_plugins(args: Args) -> None:
    """Load every plug-in that is named and check its signature; ConfigError names the flag."""
    for name in SIGNATURES:
        found = plugin(args, name)
        if found is not None:
            _check_kind(found, name, getattr(args, name))
    generate = plugin(args, "custom_generate_function_path")
    if args.partial_rollout and generate is not None and not getattr(generate, "resumes", False):
        raise ConfigError(
            f"--partial-rollout with --custom-generate-function-path {args.custom_generate_function_path}: it does not "
            "declare that it can continue a sample that has response tokens. When it can, set `resumes = True` on the "
            "function (docs/customization.md); else leave --partial-rollout out."
        )
    for attribute, methods, told in (
        ("data_source_path", _METHODS, "A data source has {}."),
        ("environment", _OF_ENVIRONMENT, "An environment has {} (docs/agents.md)."),
    ):
        given = plugin(args, attribute)
        missing = [method for method in methods if not hasattr(given, method)]
        if isinstance(given, type) and missing:
            raise ConfigError(
                f"--{attribute.replace('_', '-')} {getattr(args, attribute)}: the class has no {', '.join(missing)}. "
                f"{told.format(', '.join(methods))}"
            )
    if args.rm_type in ("math", "boxed_math", "deepscaler") and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"--rm-type {args.rm_type}: math-verify is not installed. Run ./scripts/install.sh.")
    if args.group_rm and args.custom_rm_path is None:
        raise ConfigError("--group-rm needs --custom-rm-path: built-in rewards score one sample at a time.")
    if args.reasoning_gym:
        task_names(args)


def _check_kind(found: Callable[..., object], name: str, path: str) -> None:
    """Check that a plug-in that is awaited is `async def` and another one is not; a generator is refused."""
    flag = "--" + name.replace("_", "-")
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise ConfigError(f"{flag} {path}: is a generator (it has `yield`). Return one value instead.")
    if name in _ANSWERS_AT_ONCE and inspect.iscoroutinefunction(found):
        raise ConfigError(f"{flag} {path}: is `async def`, but it is not awaited. Write `def`.")


def plugin(args: Args, name: str) -> Callable[..., object] | None:
    """Return the plug-in of flag `name` (as in SIGNATURES), or None when the flag is empty."""
    path = getattr(args, name)
    return None if path is None else _load(path, name)


def load_data_source(args: Args) -> DataSource:
    """Return the data source of --data-source-path, with its data loaded."""
    kind = _load(args.data_source_path, "data_source_path")
    defined = vars(kind).get("__init__", kind) if isinstance(kind, type) else kind
    with calling_plugin(f"--data-source-path {args.data_source_path}", defined):
        source = kind(args)
    if not isinstance(source, DataSource):
        missing = [method for method in _METHODS if not hasattr(source, method)]
        raise ConfigError(
            f"--data-source-path {args.data_source_path}: {type(source).__name__} has no {', '.join(missing)}. A data "
            f"source has {', '.join(_METHODS)}."
        )
    return source


def load_rollout_function(args: Args) -> RolloutFunction:
    """Return the function of --rollout-function-path."""
    return cast("RolloutFunction", _load(args.rollout_function_path, "rollout_function_path"))


def generate_call(
    function: Callable[..., object], args: Args, sample: Sample, params: SamplingParams, *, evaluation: bool
) -> Callable[[], Awaitable[object]]:
    """Return the call of a generate function. One written for slime gets sampling parameters under SGLang's names, and
    an `args` on which it may set attributes of its own while it runs."""
    more = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    if is_of_slime(function):
        call = partial(function, CallArgs(args), sample, sglang_params(params), **more)
    else:
        call = partial(function, args, sample, params, **more)
    return cast("Callable[[], Awaitable[object]]", call)


def is_of_slime(function: Callable[..., object]) -> bool:
    """Return whether a plug-in was written for slime: its file imports from it."""
    try:
        return _file_speaks_slime(function)
    except TypeError:  # an instance with __call__, perhaps one that has no hash, or a built-in
        return False


@lru_cache(maxsize=64)  # asked for each sample, and looking for a function's file takes as long as a small reward
def _file_speaks_slime(function: Callable[..., object]) -> bool:
    file = inspect.getsourcefile(inspect.unwrap(function))
    return file is not None and speaks_slime(file)


def plugin_args(function: Callable[..., object], args: Args) -> Args | CallArgs:
    """Return `args` in the form that the plug-in expects."""
    return CallArgs(args) if is_of_slime(function) else args


def _refuse_dialect(path: str, flag: str) -> None:
    """Raise ConfigError for what a plug-in uses of slime that Vime does not have."""
    name = path.rpartition(":")[0] if ".py:" in path else path.rpartition(".")[0]
    file = Path(name).expanduser() if name.endswith(".py") else None
    if file is None:
        with contextlib.suppress(ImportError, ValueError):  # reported when it is imported
            spec = importlib.util.find_spec(name)
            file = Path(spec.origin) if spec is not None and spec.origin is not None else None
    faults = [] if file is None else dialect_faults(file)
    if faults:
        raise ConfigError(f"{flag} {path}: written for slime, and uses what Vime does not have: {' '.join(faults)}")


@lru_cache(maxsize=64)
def _load(path: str, name: str) -> Callable[..., object]:
    flag = "--" + name.replace("_", "-")
    if not path.startswith("vime."):
        install()
        _refuse_dialect(path, flag)
    return load_plugin(path, flag, SIGNATURES[name])
