#!/usr/bin/env bash
# A model that reads pictures learns to look at them, on a CPU: a tiny Idefics3, taught to guess a colour, is rewarded for the right
# one. Real vLLM generates, FSDP trains. Minutes on two cores; docs/images.md has the figures.
#   ./scripts/run-images-cpu.sh [any train.py flag]      SEED=1 ./scripts/run-images-cpu.sh     other pictures, weights and samples
# Ends with exit code 1, and says so, when it did not learn what docs/images.md promises.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
SEED=${SEED:-0}
PYTHON=${VIME_VENV:-.venv}/bin/python
DATA=data/images-seed$SEED

./scripts/install.sh
"$PYTHON" examples/images/prepare.py --data-dir "$DATA" --seed "$SEED"
RUN=runs/images-$(date +%Y%m%d-%H%M%S)

MODEL_ARGS=(--hf-checkpoint "$DATA/model" --train-backend fsdp --seed "$((1234 + SEED))")
DATA_ARGS=(
  --prompt-data "$DATA/train.jsonl" --input-key input --label-key label --apply-chat-template
  --multimodal-keys '{"image": "images"}' --rollout-shuffle --rollout-seed "$SEED"
)
ROLLOUT_ARGS=(
  --num-rollout 120 --rollout-batch-size 24 --n-samples-per-prompt 8
  --rollout-max-response-len 4 --rollout-max-context-len 64 --rm-type exact_match
)
EVAL_ARGS=(
  --eval-prompt-data held_out "$DATA/eval.jsonl" swapped "$DATA/swapped.jsonl" --eval-interval 120 --eval-temperature 0
)
ALGO_ARGS=(--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --calculate-per-token-loss)
OPTIMIZER_ARGS=(--lr 1.5e-3 --lr-warmup-iters 5 --weight-decay 0 --adam-beta2 0.95 --clip-grad 1.0)
BATCH_ARGS=(--use-dynamic-batch-size --max-tokens-per-gpu 2048)
QUEUE_ARGS=(--transferqueue-mode buffer)

TRAIN=(
  "$PYTHON" train.py --run-dir "$RUN" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}"
  "${ALGO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${BATCH_ARGS[@]}" "${QUEUE_ARGS[@]}"
)
[ $# -eq 0 ] || exec "${TRAIN[@]}" "$@"  # so that a signal to this script is one to train.py
"${TRAIN[@]}"
"$PYTHON" examples/images/check.py "$RUN"
