#!/usr/bin/env bash
# The rollout job for scripts/run-external-trainer.sh: engines, router and rewards. It needs an address and a token.
#   vime token make runs/external my-job           on the trainer's machine: prints the token
#   VIME_TOKEN=... ADDRESS=http://127.0.0.1:8640 ./scripts/run-external-producer.sh [any flag of vime produce]
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTHON=${VIME_VENV:-.venv}/bin/python
ADDRESS=${ADDRESS:-http://127.0.0.1:8640}

./scripts/install.sh
MODEL_ARGS=(--hf-checkpoint examples/quickstart/model)
ROLLOUT_ARGS=(
  --rollout-batch-size 16 --n-samples-per-prompt 8
  --rollout-max-response-len 48 --rollout-max-context-len 128 --rm-type exact_match
)

exec "$PYTHON" -m vime produce "$ADDRESS" "${MODEL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "$@"
