#!/usr/bin/env bash
# Install the packages of programs/ beside Vime, never into its environment: DIR/py and DIR/node_modules.
#   benchmarks/agent_sdks/install.sh [DIR]       default: data/agent-sdks, where launch.py looks; about 300 MB
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
DIR=${1:-$HERE/../../data/agent-sdks}
mkdir -p "$DIR"
cd "$DIR"
if ! cmp -s "$HERE/requirements.txt" requirements.txt; then
  [ -x py/bin/python ] || "${PYTHON:-python3.11}" -m venv py
  py/bin/python -m pip install --quiet --disable-pip-version-check -r "$HERE/requirements.txt"
  cp "$HERE/requirements.txt" .
fi
if ! cmp -s "$HERE/package.json" package.json || [ ! -d node_modules ]; then
  cp "$HERE/package.json" .
  npm install --silent --no-audit --no-fund
fi
