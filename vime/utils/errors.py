"""What is said of an error in a sentence."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Return the first line of the error's text, or its type where it has none: many libraries raise without a text."""
    return str(error).strip().partition("\n")[0].rstrip() or type(error).__name__
