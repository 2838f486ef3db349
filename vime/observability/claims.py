"""What a run says about itself in its metrics and events, for the audit to compare with other records."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from vime.data.claims import RunClaims
from vime.observability.events import EventKind, read_events
from vime.observability.metrics import METRICS_FILE, read_metrics
from vime.types import Version


def read_claims(run: Path) -> RunClaims:
    """Read the claims of a run directory, in which metrics or events may be missing."""
    receipts, hashes = defaultdict[int, set[str]](set), defaultdict[Version, set[str]](set)
    for event in read_events(run, "driver", with_spans=False) if (run / "events").is_dir() else []:
        if event.kind == EventKind.ROUND_TRAINED and "receipt" in event.fields:
            receipts[int(str(event.fields["rollout_id"]))].add(str(event.fields["receipt"]))
        elif event.kind == EventKind.WEIGHTS_CONFIRMED:
            hashes[int(str(event.fields["version"]))].add(str(event.fields["content_hash"]))
    rounds = read_metrics(run) if (run / METRICS_FILE).is_file() else {}
    names = ("train/num_samples", "train/num_tokens")
    sizes = {  # a run of an older version has no train/num_rows: its samples were its rows
        round_id: (int(metrics.get("train/num_rows", metrics[names[0]])), int(metrics[names[1]]))
        for round_id, metrics in rounds.items()
        if all(name in metrics for name in names)
    }
    return RunClaims(receipts=dict(receipts), hashes=dict(hashes), sizes=sizes)
