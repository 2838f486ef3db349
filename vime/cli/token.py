"""`vime token make|list|revoke RUN`: who may call the gateway of a run, before it starts and while it works."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vime.cli.commands import Commands
from vime.gateway.tokens import TOKENS_NAME, Scope, TokenFile
from vime.types import ConfigError

DAY_S = 86400.0


def add_parsers(commands: Commands) -> None:
    token = commands.add_parser("token", help="make, list and revoke tokens of external rollout jobs")
    actions = token.add_subparsers(dest="action", required=True)
    for name, text, call in (
        ("make", "make a token and print it; the run directory is made when it is missing", run_make),
        ("list", "the tokens of a run, without their secrets", run_list),
        ("revoke", "refuse a token from the next call on", run_revoke),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("run", type=Path, metavar="RUN", help="the run directory, as --run-dir names it")
        if name == "make":
            action.add_argument("name", metavar="NAME", help="of the producer: letters, digits, - and _")
            action.add_argument(
                "--scopes",
                default=f"{Scope.TRAIN},{Scope.EVAL}",
                help=f"comma-separated, of {', '.join(Scope)}: bring groups, evaluate, look at everything, or also end "
                "any job (default: train,eval)",
            )
            action.add_argument("--days", type=float, default=7.0, help="until it expires (default: 7)")
        elif name == "revoke":
            action.add_argument("id", metavar="ID", help="of the token, as `vime token list RUN` shows it")
        action.set_defaults(run_command=call)


def run_make(arguments: argparse.Namespace) -> None:
    """Print the token alone on stdout, for a script, and what it is on stderr."""
    scopes = [word.strip() for word in arguments.scopes.split(",") if word.strip()]
    wrong = [word for word in scopes if word not in list(Scope)]
    if wrong or not 0 < arguments.days <= 36500:
        raise ConfigError(
            f"--scopes {arguments.scopes} --days {arguments.days:g}: expected scopes of {', '.join(Scope)}, and 0 to "
            "36,500 days."
        )
    run: Path = arguments.run
    try:
        run.mkdir(parents=True, exist_ok=True)
        made = TokenFile(run).make(
            arguments.name, tuple(Scope(word) for word in dict.fromkeys(scopes)), seconds=arguments.days * DAY_S
        )
    except OSError as error:
        raise ConfigError(
            f"{run}: no token can be written there: {error}. Name the directory that the run has as --run-dir."
        ) from error
    token_id = made.split("_")[1]
    sys.stderr.write(
        f"Token {token_id} of producer {arguments.name}, scopes {', '.join(scopes)}, for {arguments.days:g} days. "
        f"It is shown this once. To end it: vime token revoke {run} {token_id}\n"
    )
    sys.stdout.write(f"{made}\n")


def run_list(arguments: argparse.Namespace) -> None:
    now, tokens = time.time(), _tokens(arguments.run).tokens()
    table = Table("id", "producer", "scopes", "expires", box=None)
    for token in tokens:
        ends = time.strftime("%Y-%m-%d %H:%M", time.localtime(token.expires))
        table.add_row(token.id, token.name, ", ".join(token.scopes), f"{ends} (over)" if token.expires <= now else ends)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(table if tokens else "no tokens")


def run_revoke(arguments: argparse.Namespace) -> None:
    _tokens(arguments.run).revoke(arguments.id)
    sys.stderr.write(f"Token {arguments.id} is refused from now on.\n")


def _tokens(run: Path) -> TokenFile:
    if not (run / TOKENS_NAME).is_file():
        raise ConfigError(
            f"{run}: has no {TOKENS_NAME}. Name a run directory in which `vime token make RUN NAME` made one."
        )
    return TokenFile(run)
