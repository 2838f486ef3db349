#!/usr/bin/env bash
# The same trainer on a real pretrained model: SmolLM2-135M-Instruct learns few-shot arithmetic, on a CPU.
# Weights come out of a package of the package index (no hub). About 14 rounds; minutes, not seconds, per round on 2 cores.
#   ./scripts/run-smollm2-135m-cpu.sh [any train.py flag]
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
PYTHON=${VIME_VENV:-.venv}/bin/python
MODEL=models/smollm2-135m
DATA=data/smollm2

./scripts/install.sh smollm2
"$PYTHON" examples/smollm2/prepare.py --model-dir "$MODEL" --data-dir "$DATA"

MODEL_ARGS=(--hf-checkpoint "$MODEL")
DATA_ARGS=(--prompt-data "$DATA/train.jsonl" --input-key input --label-key label --rollout-shuffle)
ROLLOUT_ARGS=(
  --num-rollout 14 --rollout-batch-size 16 --n-samples-per-prompt 8
  --rollout-max-response-len 4 --rollout-max-context-len 128 --rollout-stop $'\n' --rm-type exact_match
)
EVAL_ARGS=(--eval-prompt-data held_out "$DATA/eval.jsonl" --eval-interval 14 --eval-temperature 0)
ALGO_ARGS=(--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --calculate-per-token-loss)
OPTIMIZER_ARGS=(--lr 1e-5 --lr-warmup-iters 3 --weight-decay 0 --adam-beta2 0.99 --clip-grad 1.0)
BATCH_ARGS=(--use-dynamic-batch-size --max-tokens-per-gpu 384)
QUEUE_ARGS=(--transferqueue-mode buffer)

exec "$PYTHON" train.py "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
  "${ALGO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${BATCH_ARGS[@]}" "${QUEUE_ARGS[@]}" "$@"
