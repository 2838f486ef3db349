"""The whole way from argv to a checked `Config`, which train.py goes: parse, fill in, check."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from vime.config.checks import check, differences, resolve
from vime.config.hub import with_local_copies
from vime.config.parse import Config, collect
from vime.config.problems import Problems
from vime.config.readers import check_given


def parse_command_line(argv: Sequence[str] | None = None, *, program: str = "train.py") -> Config:
    """Parse, check and fill in derived defaults. All problems are one ConfigError; flags that are read differently from
    how they were written are reported on stderr. `program` is the name that --help shows."""
    problems, of_flags = Problems(), Problems()
    given, reading = collect(sys.argv[1:] if argv is None else argv, of_flags, program=program)
    os.environ.update(reading.environment)
    with of_flags.gathering():
        given = with_local_copies(given)
    config = resolve(given, problems)
    check(config, problems)
    check_given(given, config, problems)
    # a default may also be wrong when its flag was refused: a consequence that would only distract
    of_flags.add(*problems.not_about(reading.refused_flags))
    of_flags.raise_all()
    for line in [*reading.notes, *differences(given, config)]:
        sys.stderr.write(f"note: {line}\n")
    return config
