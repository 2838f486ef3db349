"""The part of vLLM on each further node of an engine: `python -m vime.backends.vllm_utils.follower FLAGS`.

The same as `vllm serve --headless`, whose command needs vLLM's package by the name `vllm`: the CPU build has another.
"""

from __future__ import annotations

from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser(description="An engine's workers of one node.")).parse_args()
    validate_parsed_serve_args(arguments)
    arguments.api_server_count = 0
    run_headless(arguments)


if __name__ == "__main__":
    main()
