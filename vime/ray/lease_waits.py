"""What rollout jobs outside of the run owe it, as waits of the ledger's process.

Nothing of such a job can be looked at. So the ledger says which groups it has and since when it is silent, and
`vime why-stuck` finds there a job that is gone, before its leases end.
"""

from __future__ import annotations

from collections.abc import Sequence

from vime.handoff.ledger_types import EXTERNAL, Lent
from vime.utils.waits import JOB, Stretch, waiting

SHOWN_GROUPS = 8


class LeaseWaits:
    """One wait for each job that has leases, since it was heard of."""

    def __init__(self, lease_timeout_s: float) -> None:
        self._lease_timeout_s = lease_timeout_s
        self._open: dict[str, Stretch] = {}

    def show(self, lent: Sequence[Lent]) -> None:
        """Replace what was shown before."""
        for stretch in self._open.values():
            stretch.__exit__(None, None, None)
        self._open = {}
        for each in lent:
            if each.producer.startswith(EXTERNAL):
                owner = JOB + each.producer.removeprefix(EXTERNAL)
                stretch = waiting(_named(each.groups), owner, deadline_s=self._lease_timeout_s).__enter__()
                stretch.since -= each.silent_s
                self._open[each.producer] = stretch


def _named(groups: Sequence[int]) -> str:
    more = f" and {len(groups) - SHOWN_GROUPS} more" if len(groups) > SHOWN_GROUPS else ""
    return f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups[:SHOWN_GROUPS]))}{more}"
