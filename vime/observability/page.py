"""One HTML file that needs nothing else: data, the drawing library and the page's own script are inside, compressed.

A page is sections of blocks, described in Python and drawn by page.html: curves, tables, completions. No text of a run
is ever read as HTML. The browser unpacks both parts by itself (`DecompressionStream`, in every browser since 2023).
"""

from __future__ import annotations

import base64
import gzip
import html
import importlib.resources
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

MAX_POINTS = 1000
"""Points of a curve: longer curves are means of equal intervals of rounds."""
MAX_BYTES = 10_000_000

Block = dict[str, object]
Points = Mapping[int, float]  # by round


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart: the key of its points, what the legend calls it, and the place of its colour."""

    key: str
    name: str
    colour: int | None = None


@dataclass(slots=True, kw_only=True)
class Page:
    """`badge`: a word beside the title, and good, bad, warn or nothing. Points are added first, then blocks that name
    them."""

    title: str
    subtitle: str
    badge: tuple[str, str]
    smoothing: float = 0.6
    sections: list[dict[str, object]] = field(default_factory=list)
    _xs: list[list[float]] = field(default_factory=list)
    _series: dict[str, tuple[int, list[float | None], bool]] = field(default_factory=dict)
    _places: dict[tuple[float, ...], int] = field(default_factory=dict)

    def add_points(self, key: str, points: Points) -> None:
        """Add points by round; values that are not finite are gaps."""
        xs, ys = thinned_points(points)
        place = self._places.setdefault(tuple(xs), len(self._xs))
        if place == len(self._xs):
            self._xs.append(xs)
        is_sparse = len(xs) > 1 and (xs[-1] - xs[0]) > 2 * (len(xs) - 1) and len(xs) < 200
        self._series[key] = (place, ys, is_sparse)

    def point_keys(self) -> list[str]:
        """Of all points."""
        return list(self._series)

    def add_section(self, title: str, blocks: Iterable[Block], note: str = "") -> None:
        """Add a section, unless it has no blocks."""
        shown = list(blocks)
        if shown:
            self.sections.append({"title": title, "note": note, "blocks": shown})

    def write(self, path: Path) -> Path:
        """Write the file, whole or not at all. Returns its path."""
        record = {
            "title": self.title,
            "subtitle": self.subtitle,
            "badge": list(self.badge),
            "smoothing": self.smoothing,
            "sections": self.sections,
            "xs": self._xs,
            "series": self._series,
        }
        data = json.dumps(record, allow_nan=False, separators=(",", ":"), default=str).encode("utf-8", "replace")
        template = (importlib.resources.files("vime.observability") / "page.html").read_text(encoding="utf-8")
        text = template.replace("{{TITLE}}", html.escape(self.title)).replace("{{DATA}}", _packed(data))
        text = text.replace("{{LIBRARY}}", _library())
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # of a disk that is full
        return path


def chart_block(
    title: str, lines: Sequence[Line], *, kind: str = "line", x: str = "round", note: str = "", is_log: bool = False
) -> Block:
    """Return a chart of points that the page has; `kind`: line, exact (a line that is never smoothed) or stack."""
    series = [
        {"key": line.key, "name": line.name} | ({} if line.colour is None else {"colour": line.colour})
        for line in lines
    ]
    return {"title": title, "series": series, "kind": kind, "x": x, "note": note, "log": is_log}


def table_block(columns: Sequence[str], rows: Sequence[Sequence[object]], *, closed: str = "") -> Block:
    """`closed`: the table is folded away under this title."""
    cells = [[_cell(cell) for cell in row] for row in rows]
    return {"kind": "table", "columns": list(columns), "rows": cells, "closed": closed}


def thinned_points(points: Points) -> tuple[list[float], list[float | None]]:
    """Return rounds and values with five digits, at most MAX_POINTS: of more, means of equal intervals. Values that are
    not finite are gaps, and left out of a mean."""
    items = sorted(points.items())
    size = max(1, -(-len(items) // MAX_POINTS))
    xs: list[float] = []
    ys: list[float | None] = []
    for start in range(0, len(items), size):
        part = items[start : start + size]
        finite = [value for _, value in part if math.isfinite(value)]
        xs.append(part[len(part) // 2][0])
        ys.append(float(f"{math.fsum(finite) / len(finite):.5g}") if finite else None)
    return xs, ys


def _cell(value: object) -> str | int | float | None:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


@cache
def _library() -> str:
    """Return Plotly's script from its Python package: 4.8 MB, 2 MB compressed in the page."""
    return _packed((importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes())
