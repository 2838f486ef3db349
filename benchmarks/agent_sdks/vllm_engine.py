"""vLLM's server on a CPU with the journal in front: `--debug-engine-module benchmarks.agent_sdks.vllm_engine`."""

import sys

from vime.backends.vllm_utils.cpu_server import main

if __name__ == "__main__":
    sys.argv += ["--middleware", "benchmarks.agent_sdks.journal.Middleware"]
    main()
