"""What a run says about itself in its metrics and events, for the audit to compare with other records."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

from vime.data.claims import RunClaims
from vime.observability.events import EventKind, read_events
from vime.observability.metrics import METRICS_FILE, read_metrics
from vime.observability.run_dir import config_value, read_config
from vime.types import DataError, Version


def read_claims(run: Path) -> RunClaims:
    """Read the claims of a run directory, in which metrics or events may be missing."""
    receipts, hashes = defaultdict[int, set[str]](set), defaultdict[Version, set[str]](set)
    for event in read_events(run, "driver", with_spans=False) if (run / "events").is_dir() else []:
        if event.kind == EventKind.ROUND_TRAINED and "receipt" in event.fields:
            receipts[int(str(event.fields["rollout_id"]))].add(str(event.fields["receipt"]))
        elif event.kind == EventKind.WEIGHTS_CONFIRMED:
            hashes[int(str(event.fields["version"]))].add(str(event.fields["content_hash"]))
    rounds = read_metrics(run) if (run / METRICS_FILE).is_file() else {}
    sizes: dict[int, tuple[int, int]] = {}
    for round_id, metrics in rounds.items():
        tokens = metrics.get("train/num_tokens", math.nan)
        # a run of an older version has no train/num_rows: its samples were its rows
        rows = metrics.get("train/num_rows", metrics.get("train/num_samples", math.nan))
        if math.isfinite(rows) and math.isfinite(tokens):
            sizes[round_id] = int(rows), int(tokens)
    return RunClaims(
        receipts=dict(receipts),
        hashes=dict(hashes),
        sizes=sizes,
        trained={round_id for round_id in sizes if "train/num_rows" in rounds[round_id]},  # younger than receipts
        has_unique_groups=_has_unique_groups(run),
    )


def _has_unique_groups(run: Path) -> bool:
    """Return whether the groups are those of Vime's own data source, which numbers them on over epochs and restarts.
    Records that are replayed, and data sources and rollout functions of the user, may repeat a number."""
    try:
        config = read_config(run)
    except DataError:
        return False
    source = config_value(config, "data", "data_source_path")
    function = config_value(config, "rollout", "rollout_function_path")
    is_replayed = bool(config_value(config, "debug", "load_debug_rollout_data"))
    is_ours = str(source).startswith("vime.rollout.data_source.") and str(function).startswith("vime.rollout.")
    return is_ours and not is_replayed
