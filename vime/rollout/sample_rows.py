"""Samples of several rows: the branches of one agent's session, which count as one sample of their group.

A plug-in that returns several `Sample`s for one prompt gives them one `index` when they are rows of one sample. They
follow each other, and have one reward. Group baselines, the loss and every number of samples count them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from vime.types import Sample

TURNS = "turns"
"""In the metadata of the row that a reward function is asked about: every turn of the session, until it is scored."""


def by_sample(rows: Sequence[Sample]) -> list[list[Sample]]:
    """Return the rows of each sample, in their order. Rows without an index are samples by themselves.

    Example: rows with the indices 4, 5, 5, 6 -> [4], [5, 5], [6].
    """
    found: list[list[Sample]] = []
    for (_, index), of_index in groupby(rows, key=lambda row: (row.group_index, row.index)):
        of_one = list(of_index)
        found += [of_one] if index is not None and index >= 0 else [[row] for row in of_one]
    return found
