#!/usr/bin/env bash
# run-qwen3-4B.sh with generation and training at the same time: a group trains when it is at most one version older than
# the weights, an update keeps completions that are under way, and tokens of an older version are weighted (TIS).
#   MODEL_DIR=/models DATA_DIR=/data OUT_DIR=/mnt/out ./scripts/run-qwen3-4B-async-streaming.sh
set -euo pipefail
export TRAIN=train_async.py RUN_NAME=${RUN_NAME:-qwen3-4B-async-streaming}
exec "$(dirname "$0")/run-qwen3-4B.sh" --transferqueue-mode streaming --max-staleness 1 --partial-rollout \
  --off-policy-correction tis "$@"
