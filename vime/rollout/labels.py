"""What a label must be for a reward that compares the completion with it.

A list or NaN equals nothing: every completion would score 0, and no message would say why.
"""

from __future__ import annotations

import math
import numbers


def label_fault(label: object) -> str:
    """Return why `label` equals no answer: what it is and what is expected; empty when it can be used."""
    if isinstance(label, str):
        return "" if label.strip() else f"the label is {label!r}, expected the text of the right answer"
    if isinstance(label, numbers.Number) and not isinstance(label, complex):
        is_finite = math.isfinite(float(label))  # type: ignore[arg-type]  # every real number has a float
        return "" if is_finite else f"the label is {label!r}, expected a finite number or text"
    shown = "null" if label is None else f"{type(label).__name__} {label!r:.60}"
    return f"the label is {shown}, expected text or a number"
