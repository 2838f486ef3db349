#!/usr/bin/env bash
# Every check that reads the code without running it: ruff, its format, floors and sizes of the rooms, the page of flags,
# mypy (strict). All of them run, also behind one that failed; the last line says which did. Exit code 1: one failed.
#   ./scripts/lint.sh                       the whole repository; mypy takes a minute where it has no cache
#   ./scripts/lint.sh vime/algo tests/unit  ruff and mypy of these paths; the other checks are of the whole
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
check "mypy" "$PYTHON" -m mypy "$@"
if ((${#failed[@]})); then
  echo "lint: FAILED: $(printf '%s, ' "${failed[@]}" | sed 's/, $//')"
  exit 1
fi
echo "lint: passed"
