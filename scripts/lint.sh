#!/usr/bin/env bash
# Every check that reads the code without running it: ruff, its format, package layers and file sizes, the flags page,
# the table of model families, mypy (strict). All of them run, also after a failure; the last line lists the failures. Exit code 1: one failed.
#   ./scripts/lint.sh                       the whole repository; mypy takes a minute without its cache
#   ./scripts/lint.sh vime/algo tests/unit  ruff and mypy of these paths; the other checks cover everything
# `./scripts/test.sh` without arguments, which is what .ci/run calls, runs this beside the tests and fails with it.
set -euo pipefail
cd "$(dirname "$0")/.."
./scripts/install.sh
PYTHON=${VIME_VENV:-.venv}/bin/python
failed=()
check() {
  local name=$1 started=$SECONDS
  shift
  if "$@"; then
    echo "lint: $name passed in $((SECONDS - started)) s"
  else
    echo "lint: $name failed: $*"
    failed+=("$name")
  fi
}

check "ruff" "$PYTHON" -m ruff check "${@:-.}"
check "format" "$PYTHON" -m ruff format --check "${@:-.}"
check "shape" "$PYTHON" tests/helpers/shape_check.py vime
check "flags page" "$PYTHON" scripts/make_flags_doc.py --check
check "families" "$PYTHON" scripts/make_families_table.py --check
check "mypy" "$PYTHON" -m mypy "$@"
if ((${#failed[@]})); then
  echo "lint: FAILED: $(printf '%s, ' "${failed[@]}" | sed 's/, $//')"
  exit 1
fi
echo "lint: passed"
