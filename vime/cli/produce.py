"""`vime produce ADDRESS [FLAGS]`: a rollout job for a run on another machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vime.cli.commands import Commands

COMMAND = "produce"
USAGE = """\
usage: vime produce ADDRESS [FLAGS]

Generate for a run of --transferqueue-mode external: take prompts at ADDRESS (http://HOST:PORT or https://HOST:PORT, as
RUN/gateway.json of that run says), with engines, rewards and plug-ins of this job, and bring finished groups back.

VIME_TOKEN in the environment is the token that `vime token make RUN NAME` printed. FLAGS are those of train.py about
the model, engines, generation and rewards (vime train --help); prompts, training and the queue are the run's.
The exit code is 0 when the run has no prompt left, 2 for a refused command line, 3 after a failure, 130 when stopped.
"""


def add_parsers(commands: Commands) -> None:
    """List it in the help of `vime`; `run_produce` gets its flags unparsed, because they have their own parser."""
    commands.add_parser(COMMAND, help="a rollout job for a run of mode external, on any machine", add_help=False)


def run_produce(words: Sequence[str]) -> int:
    """Produce. Returns the exit code."""
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if words else 2
    try:
        from vime.ray.produce import main  # imports Ray, which takes a second, in which the user may press Ctrl-C

        return main(words[0], words[1:])
    except KeyboardInterrupt:  # a started job handles it itself
        sys.stderr.write("\nstopped: nothing was started.\n")
        return 130
