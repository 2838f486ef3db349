"""Write the table of model families into README.md from the cases that the tests run over.

python scripts/make_families_table.py            write the table
python scripts/make_families_table.py --check    exit 1 when README.md does not hold what would be written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the cases of this checkout, not those of an installed one

from tests.helpers.families import EXPORTS_BY_NIGHT, FSDP, MEGATRON, RUNS, RUNS_BY_DAY, Family  # noqa: E402

PAGE = ROOT / "README.md"
BEGIN, END = "<!-- written by scripts/make_families_table.py -->", "<!-- end of the table -->"
LABELS = {
    "single": "1 rank", "tp2": "TP2", "tp2-sequence": "TP2 + SP", "pp2": "PP2", "cp2": "CP2", "tp2-pp2": "TP2 x PP2",
    "vpp2": "PP2 x VPP2", "dp2-distributed": "DP2 with a cut optimizer", "recompute": "recomputation", "ep2": "EP2",
    "ep2-tp2": "EP2 x TP2 + SP", "ep2-cp2": "EP2 x CP2", "ep2-pp2": "EP2 x PP2",
    "ep4-distributed": "EP4 with a cut optimizer", "ep2-tp2-grouped": "EP2 x TP2 + SP with grouped experts",
}  # fmt: skip
LEGEND = (
    "Shown on tiny random models, *in italics* by `scripts/nightly.sh` only. **parity**: log-probabilities (1e-5), and "
    "loss, gradient norm (1e-5 of it) and\nweights after two steps (2e-6), are those of transformers in plain torch; "
    "what is exported is the file, bit for bit. **export**: vLLM loads a trained\nexport and its log-probabilities are "
    "the trainer's (1e-4). **run**: train.py with real vLLM and `--check-weight-update-equal`; engine\nand trainer "
    "agree in each round (1e-4), and every version has other weights."
)
HEAD = "| family | backend | layouts | engine | shown |\n|---|---|---|---|---|"


def table() -> str:
    """Return one row for each family and backend, those of the default backend first."""
    lines = ["", LEGEND, "", HEAD]
    for family in MEGATRON:
        engine = "vLLM" if family.exports else "none"
        lines.append(f"| {family.title} | `megatron` | {_layouts(family)} | {engine} | {_shown(family)} |")
    for title, worlds in FSDP.items():
        ranks = ", ".join("1 rank" if world == 1 else f"{world} ranks" for world in worlds)
        lines.append(f"| {title} | `fsdp` | {ranks} | none | parity |")
    return "\n".join([*lines, ""])


def _layouts(family: Family) -> str:
    return ", ".join([*(LABELS[name] for name in family.day), *(f"*{LABELS[name]}*" for name in family.night)])


def _shown(family: Family) -> str:
    parts = ["parity"]
    if family.exports:
        parts.append("*export*" if set(family.exports) <= set(EXPORTS_BY_NIGHT) else "export")
    if set(family.exports) & {*RUNS, *RUNS_BY_DAY}:
        parts.append("run" if set(family.exports) & set(RUNS_BY_DAY) else "*run*")
    return ", ".join(parts)


def written(text: str) -> str:
    """Return `text` with the table between its two marks made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    text = PAGE.read_text()
    if parser.parse_args().check:
        is_current = text == written(text)
        if not is_current:
            print(f"the table of families in {PAGE.name} is out of date: run python scripts/make_families_table.py")
        return int(not is_current)
    PAGE.write_text(written(text))
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
