"""Every dotted-path flag, loaded and checked in one place, before anything is started.

A plug-in is loaded once per process: a file is not executed again for each sample.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from vime.rollout.reasoning_gym_tasks import task_names
from vime.seams import LOSS_PARAMETERS, DataSource, RolloutFunction, load_plugin
from vime.types import ConfigError

SIGNATURES: dict[str, tuple[str, ...]] = {
    "data_source_path": ("args",),
    "rollout_function_path": ("args", "rollout_id", "data_source", "evaluation"),
    "custom_generate_function_path": ("args", "sample", "sampling_params"),
    "custom_rm_path": ("args", "sample"),
    "custom_reward_post_process_path": ("args", "groups"),
    "dynamic_sampling_filter_path": ("args", "samples"),
    "rollout_sample_filter_path": ("args", "groups"),
    "custom_loss_path": LOSS_PARAMETERS,
}
"""Flag -> the parameters Vime calls the plug-in with, by position."""

_METHODS = ("get_samples", "add_samples", "save", "load", "__len__")


def check_plugins(args: Any) -> None:
    """Load every plug-in that is named and check its signature; ConfigError names the flag."""
    for name in SIGNATURES:
        plugin(args, name)
    generate = plugin(args, "custom_generate_function_path")
    if args.partial_rollout and generate is not None and not getattr(generate, "resumes", False):
        raise ConfigError(
            f"--partial-rollout with --custom-generate-function-path {args.custom_generate_function_path}: it does not "
            "say that it can go on with a sample that has response tokens. When it can, set `resumes = True` on the "
            "function (docs/customization.md); else leave --partial-rollout out."
        )
    source = plugin(args, "data_source_path")
    missing = [method for method in _METHODS if not hasattr(source, method)]
    if isinstance(source, type) and missing:
        raise ConfigError(
            f"--data-source-path {args.data_source_path}: the class has no {', '.join(missing)}. A data source has "
            f"{', '.join(_METHODS)}."
        )
    if args.rm_type is not None:
        from vime.rollout.rm_hub import BUILT_IN

        if args.rm_type not in BUILT_IN:
            raise ConfigError(f"--rm-type {args.rm_type}: expected one of {', '.join(BUILT_IN)}.")
    if args.rm_type == "math" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError("--rm-type math: math-verify is not installed. Run ./scripts/install.sh.")
    if args.group_rm and args.custom_rm_path is None:
        raise ConfigError("--group-rm needs --custom-rm-path: built-in rewards score one sample at a time.")
    if args.reasoning_gym:
        task_names(args)


def plugin(args: Any, name: str) -> Callable[..., Any] | None:
    """The plug-in of flag `name` (as in SIGNATURES), or None when the flag is empty."""
    path = getattr(args, name)
    return None if path is None else _load(path, name)


def load_data_source(args: Any) -> DataSource:
    """The data source of --data-source-path, standing on its data."""
    source = _load(args.data_source_path, "data_source_path")(args)
    if not isinstance(source, DataSource):
        missing = [method for method in _METHODS if not hasattr(source, method)]
        raise ConfigError(
            f"--data-source-path {args.data_source_path}: {type(source).__name__} has no {', '.join(missing)}. A data "
            f"source has {', '.join(_METHODS)}."
        )
    return source


def load_rollout_function(args: Any) -> RolloutFunction:
    """The function of --rollout-function-path."""
    return _load(args.rollout_function_path, "rollout_function_path")


@lru_cache(maxsize=64)
def _load(path: str, name: str) -> Callable[..., Any]:
    return load_plugin(path, "--" + name.replace("_", "-"), SIGNATURES[name])
