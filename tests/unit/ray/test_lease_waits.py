"""What jobs outside owe, as waits of the ledger's process."""

from pathlib import Path

from vime.handoff.ledger_types import Lent
from vime.observability.waits import read_run
from vime.ray.lease_waits import LeaseWaits
from vime.utils.waits import close_registry, open_registry


def shown(directory: Path) -> list[tuple[str, tuple[str, ...], int, float | None]]:
    open_registry(directory, "ledger")
    close_registry()
    [process] = read_run(directory, sample_s=0)
    return [(wait.name, wait.owners, int(wait.age_s), wait.deadline_s) for wait in process.waits]


def test_each_job_outside_is_one_wait_since_it_was_heard_of_and_workers_of_the_run_are_none(tmp_path: Path) -> None:
    waits = LeaseWaits(60.0)
    waits.show(
        [
            Lent(producer="external/a", groups=(3,), silent_s=20.0),
            Lent(producer="external/b", groups=tuple(range(10)), silent_s=40.0),
            Lent(producer="rollout-worker-0", groups=(11,), silent_s=30.0),
        ]
    )
    assert shown(tmp_path) == [
        ("groups 0, 1, 2, 3, 4, 5, 6, 7 and 2 more", ("job://b",), 40, 60.0),
        ("group 3", ("job://a",), 20, 60.0),
    ]
    waits.show([Lent(producer="external/a", groups=(3, 4), silent_s=5.0)])
    assert shown(tmp_path) == [("groups 3, 4", ("job://a",), 5, 60.0)]
    waits.show([])
    assert shown(tmp_path) == []
