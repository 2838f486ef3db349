#!/usr/bin/env bash
# The quick start's task with the trainer alone: every completion comes from rollout jobs outside, through the gateway.
# Start it, then scripts/run-external-producer.sh in another terminal, or on another machine. docs/external-jobs.md.
#   RUN=runs/external ADDRESS=127.0.0.1:8640 ./scripts/run-external-trainer.sh [any train.py flag]
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTHON=${VIME_VENV:-.venv}/bin/python
RUN=${RUN:-runs/external} ADDRESS=${ADDRESS:-127.0.0.1:8640}
MODEL=examples/quickstart/model DATA=data/quickstart-seed0

./scripts/install.sh
"$PYTHON" examples/quickstart/prepare.py --data-dir "$DATA" --seed 0
QUEUE_ARGS=(--transferqueue-mode external --transferqueue-address "$ADDRESS" --rollout-num-engines 0)
MODEL_ARGS=(--hf-checkpoint "$MODEL")
DATA_ARGS=(--prompt-data "$DATA/train.jsonl" --input-key input --label-key label --rollout-shuffle)
ROLLOUT_ARGS=(
  --num-rollout 30 --rollout-batch-size 16 --n-samples-per-prompt 8
  --rollout-max-response-len 48 --rollout-max-context-len 128 --rm-type exact_match
)
ALGO_ARGS=(--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --calculate-per-token-loss)
OPTIMIZER_ARGS=(--lr 2e-4 --lr-warmup-iters 5 --weight-decay 0 --adam-beta2 0.95 --clip-grad 1.0)
BATCH_ARGS=(--use-dynamic-batch-size --max-tokens-per-gpu 2048)

exec "$PYTHON" train.py --run-dir "$RUN" "${QUEUE_ARGS[@]}" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
  "${ALGO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${BATCH_ARGS[@]}" "$@"
