#!/usr/bin/env bash
# Make .venv if missing and run every test tier but `gpu` and what is marked `nightly`. Arguments go to pytest:
#   ./scripts/test.sh                       everything, quick tiers first, and ./scripts/lint.sh beside them
#   ./scripts/test.sh tests/unit -k curve   a part
#   ./scripts/test.sh -m gpu                the GPU tier, on a machine with one
# The last line of the output is pytest's summary; what lint.sh found is an error in it. VIME_TEST_DEADLINE: seconds for the whole session (5000).
# VIME_TEST_WORKERS: processes that share the tests, a file at a time (2 without arguments, else 0: all in one process).
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE  # images of containers set it; each process of each run would compile torch and vLLM again
./scripts/install.sh smollm2 reasoning-gym
export VIME_TEST_DEADLINE=${VIME_TEST_DEADLINE:-5000} OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# For the test that opens report.html. Where npm is missing or does not respond, the test is skipped and says so.
[ -x .browser/chromium ] || ! command -v npm >/dev/null || timeout 120 ./scripts/get_browser.sh || true
WORKERS=(-n "${VIME_TEST_WORKERS:-$(($# == 0 ? 2 : 0))}" --dist loadfile --no-loadscope-reorder --max-worker-restart 0)
if (($# == 0)); then
  VIME_LINT_LOG=$(mktemp)  # tests/conftest.py reads it when the tests are over
  export VIME_LINT_LOG
  nice timeout --kill-after=10 1200 ./scripts/lint.sh >"$VIME_LINT_LOG" 2>&1 </dev/null &
fi
# tests/conftest.py ends a session that is too long and the processes it started; this is for the case that it cannot.
exec timeout --foreground --kill-after=60 $((VIME_TEST_DEADLINE + 90)) \
  "${VIME_VENV:-.venv}/bin/python" -m pytest "${WORKERS[@]}" -m "not gpu and not nightly" "$@" </dev/null
