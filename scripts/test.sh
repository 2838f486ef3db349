#!/usr/bin/env bash
# Make .venv if missing and run every test tier but `gpu`. Arguments go to pytest, for example:
#   ./scripts/test.sh                       everything, quick tiers first
#   ./scripts/test.sh tests/unit -k curve   a part
#   ./scripts/test.sh -m gpu                the GPU tier, on a machine with one
# The last line of the output is pytest's summary. VIME_TEST_DEADLINE: seconds for the whole session (4800).
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh smollm2 reasoning-gym
export VIME_TEST_DEADLINE=${VIME_TEST_DEADLINE:-4800} OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# tests/conftest.py ends a session that is too long and the processes it started; this is for the case that it cannot.
exec timeout --foreground --kill-after=60 $((VIME_TEST_DEADLINE + 90)) \
  "${VIME_VENV:-.venv}/bin/python" -m pytest -m "not gpu" "$@" </dev/null
