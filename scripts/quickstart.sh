#!/usr/bin/env bash
# From a clean clone to a learning curve, on a machine without a GPU: install, write the data, train a tiny model with
# real megatron-core, vLLM, Ray and TransferQueue, show what it learned. A second run skips what is there.
#   ./scripts/quickstart.sh [any train.py flag]       SEED=1 ./scripts/quickstart.sh       other data, other samples
# Ends with exit code 1, and says so, when it did not learn what docs/quickstart.md promises.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
SEED=${SEED:-0}
PYTHON=${VIME_VENV:-.venv}/bin/python
MODEL=examples/quickstart/model
DATA=data/quickstart-seed$SEED

echo "[1/3] install"
./scripts/install.sh
echo "[2/3] data (the model, which was taught to guess, is in $MODEL)"
"$PYTHON" examples/quickstart/prepare.py --data-dir "$DATA" --seed "$SEED"
RUN=runs/$(date +%Y%m%d-%H%M%S)
echo "[3/3] train: it may guess, or write its steps first; only the answer is rewarded"

MODEL_ARGS=(--hf-checkpoint "$MODEL" --seed "$((1234 + SEED))")
DATA_ARGS=(
  --prompt-data "$DATA/train.jsonl" --input-key input --label-key label
  --rollout-shuffle --rollout-seed "$SEED"
)
ROLLOUT_ARGS=(
  --num-rollout 30 --rollout-batch-size 16 --n-samples-per-prompt 8
  --rollout-max-response-len 48 --rollout-max-context-len 128 --rm-type exact_match
)
EVAL_ARGS=(--eval-prompt-data held_out "$DATA/eval.jsonl" --eval-interval 30)
ALGO_ARGS=(--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --calculate-per-token-loss)
OPTIMIZER_ARGS=(--lr 2e-4 --lr-warmup-iters 5 --weight-decay 0 --adam-beta2 0.95 --clip-grad 1.0)
BATCH_ARGS=(--use-dynamic-batch-size --max-tokens-per-gpu 2048)
QUEUE_ARGS=(--transferqueue-mode buffer)

TRAIN=(
  "$PYTHON" train.py --run-dir "$RUN" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}"
  "${ALGO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${BATCH_ARGS[@]}" "${QUEUE_ARGS[@]}"
)
[ $# -eq 0 ] || exec "${TRAIN[@]}" "$@"  # so that a signal to this script is one to train.py
"${TRAIN[@]}"
"$PYTHON" examples/quickstart/check.py "$RUN"
