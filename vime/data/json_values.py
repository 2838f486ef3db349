"""Which values of a record a sample can carry.

Ledger, spool, checkpoints, dumps and services of rewards have samples as JSON. What JSON does not give back unchanged
would end the run at the first finished group, so it is refused where records are read.
"""

from __future__ import annotations

import json
import math

_PLAIN = frozenset((str, int, bool, type(None)))


def json_fault(name: str, value: object) -> str:
    """Return what in `value` JSON cannot carry and what to do about it; empty when it can be stored. It is asked for
    every record: a place is written only for what is not plain."""
    left = [] if type(value) in _PLAIN else [(name, value)]
    while left:
        place, one = left.pop()
        if isinstance(one, dict):
            if odd := [key for key in one if not isinstance(key, str)]:
                return f"{place} has the key {odd[0]!r:.60}, which JSON makes text of. Expected text as keys. Convert it."
            left += [(f"{place}.{key}", entry) for key, entry in one.items() if type(entry) not in _PLAIN]
        elif isinstance(one, list):
            left += [(f"{place}[{at}]", entry) for at, entry in enumerate(one) if type(entry) not in _PLAIN]
        elif not (isinstance(one, float) and math.isfinite(one)):
            way_out = "Make it an object" if isinstance(one, tuple) else "Convert it to text"
            return (
                f"{place} is {type(one).__name__} {one!r:.60}, which JSON cannot carry. Expected text, finite numbers, "
                "true, false, null, and lists or objects of these. "
                f"{'Write a finite number or null' if isinstance(one, float) else way_out}."
            )
    return ""


def text_fault(name: str, value: object) -> str:
    """Return why a tokenizer refuses the text in `value`: half of a UTF-16 pair is no character. Empty when all is
    text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    try:
        _ = text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        return (
            f"{name} has {text[error.start]!r}, which is half of a UTF-16 pair and no character. Expected text that "
            "UTF-8 can encode. Write the whole character, or remove it."
        )
    return ""
