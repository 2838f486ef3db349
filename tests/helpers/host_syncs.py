"""Where a trainer makes the processor wait for the device: each read of a tensor's value, with its place."""

from __future__ import annotations

import collections
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.megatron_models import make_plan, make_rows
from tests.helpers.megatron_worker import Bench

ASKED = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that give its values to the processor, which on a GPU waits for them."""
IN_A_LAYER = "in a layer: "
FOUND = ("aten::nonzero", "aten::equal", "aten::masked_select", "aten::unique_consecutive", "aten::_unique2")
"""Operators whose result is as large as what they find: the processor has to know."""


class Reads(TorchDispatchMode):
    """Counts them by the innermost place outside of torch: `file:function`."""

    def __init__(self) -> None:
        super().__init__()
        self.places: collections.Counter[str] = collections.Counter()
        self._usual = {name: getattr(torch.Tensor, name) for name in ASKED}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in FOUND:
            self._count()
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Reads:
        for name, usual in self._usual.items():
            setattr(torch.Tensor, name, self._counted(usual))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, usual in self._usual.items():
            setattr(torch.Tensor, name, usual)

    def _counted(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
            self._count()
            return usual(tensor, *args, **named)

        return read

    def _count(self) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        frames = [frame for frame in frames if frame.filename != __file__ or frame.name == reads_of_a_step.__name__]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].name}"
        is_inside = any(frame.name in ("forward", "backward") for frame in frames)
        self.places[IN_A_LAYER + where if is_inside else where] += 1


def reads_of_a_step(bench: Bench) -> dict[str, int]:
    """Place -> how often, of one optimizer step over all rows in one pack."""
    trainer, rows = bench.trainer(), make_rows()
    plan, numbered = make_plan(rows, dp_size=trainer.place.dp_size), dict(enumerate(rows))
    trainer.train_round(plan, numbered)  # what happens once is over
    with Reads() as reads:
        trainer.train_round(plan, numbered)
    trainer.backend.close()
    return dict(reads.places)
