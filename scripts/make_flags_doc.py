"""Write docs/flags.md from the flags themselves.

python scripts/make_flags_doc.py            write the page
python scripts/make_flags_doc.py --check    exit 1 when the page is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the flags of this checkout, not those of an installed one

from vime.config.parse import iter_flags  # noqa: E402

PAGE = ROOT / "docs" / "flags.md"
HEAD = """# Flags

Written by `scripts/make_flags_doc.py` from the sections in `vime/config/`; do not edit. The same text is in
`python train.py --help`. A switch also has a `--no-...` form. Flags of the installed vLLM are given as `--vllm-<flag>`,
flags of vllm-router as `--router-<flag>`. Unknown and contradicting flags are refused before any process starts.

`--config FILE` reads flags from a TOML file (`rollout_batch_size = 32`, `bf16 = true`, `rollout-stop = ["a", "b"]`;
tables only group), or takes the `config.json` or the directory of an earlier run, whose configuration then comes out
the same. Flags beside it win, and of several files the later one. Paths are relative to where the run is started.
"""


def page() -> str:
    """The whole page: one table per section, flags in the order of --help."""
    lines, section = [HEAD.rstrip()], ""
    for title, flag, spec in iter_flags():
        if title != section:
            lines += ["", f"## {title}", "", "| flag | default | meaning |", "|---|---|---|"]
            section = title
        names = ", ".join(f"`{name}`" for name in (flag, *spec.metadata["aliases"]))
        lines.append(f"| {names} | {_default(spec.default)} | {_meaning(spec.metadata)} |")
    return "\n".join(lines) + "\n"


def _default(default: object) -> str:
    if default is None or default in ((), ""):
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default}`"


def _meaning(metadata: dict) -> str:
    text = metadata["help"]
    if metadata["choices"]:
        text += ". One of " + ", ".join(f"`{choice}`" for choice in metadata["choices"])
    low, high = metadata["minimum"], metadata["maximum"]
    if low is not None and high is not None:
        text += f". {low:g} to {high:g}"
    elif low is not None:
        text += f". At least {low:g}"
    elif high is not None:
        text += f". At most {high:g}"
    return text.replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        is_current = PAGE.is_file() and PAGE.read_text() == page()
        if not is_current:
            print(f"{PAGE.relative_to(ROOT)} is out of date: run python scripts/make_flags_doc.py")
        return int(not is_current)
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
