"""Print, as JSON, what the installed vLLM's parser says of each flag of a server. Run as a module by `launch.py`: the
import takes about ten seconds, which only the first run with a --vllm-* flag pays."""

from __future__ import annotations

import dataclasses
import json
import sys

from vime.backends.vllm_utils.flag_values import shape_of

BOUNDS = ("gt", "ge", "lt", "le")


def main() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    bounds = _bounds()
    shapes = {
        option: dataclasses.asdict(shape_of(action, bounds.get(option)))
        for action in make_arg_parser(FlexibleArgumentParser())._actions  # noqa: SLF001 - argparse has no public list
        for option in action.option_strings
    }
    sys.stdout.write("\n" + json.dumps(shapes) + "\n")


def _bounds() -> dict[str, dict[str, float]]:
    """Of the entries of vLLM's configuration, which its flags are named after; an entry that two classes bound
    otherwise has none."""
    import vllm.config

    found: dict[str, list[dict[str, float]]] = {}
    for section in vars(vllm.config).values():
        fields: dict[str, object] = getattr(section, "__pydantic_fields__", {})
        for name, spec in fields.items():
            limits = {
                kind: float(limit)
                for mark in getattr(spec, "metadata", ())
                for kind in BOUNDS
                if isinstance(limit := getattr(mark, kind, None), int | float)
            }
            found.setdefault("--" + name.replace("_", "-"), []).append(limits)
    return {
        name: limits[0] for name, limits in found.items() if limits[0] and all(each == limits[0] for each in limits)
    }


if __name__ == "__main__":
    main()
