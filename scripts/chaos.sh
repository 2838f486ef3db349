#!/usr/bin/env bash
# Kill every process of a small run in every phase and print what was lost (nothing may be): docs/faults.md.
#   ./scripts/chaos.sh OUT                                            each phase with each process it concerns, an hour
#   ./scripts/chaos.sh OUT --case trainer@trainer.optimizer:2         one
#   ./scripts/chaos.sh OUT --random 200 --seed 1                      anything, any time
# ROUNDS=4: enough for one case; ten in a run need the default. MODE=off|buffer|streaming: --transferqueue-mode.
# SCRIPT=train_async.py: the overlapped schedule; with PARTIAL=1 completions that a stop cuts are continued.
# WORKERS=2: rollout workers in processes of their own, which are killed too.
# ADAPTER=1: FSDP trains an adapter in place of the model.
# SECONDS_PER_LEASE=8: shorter than a stop (/stop) lasts.
# ENGINE=vllm: the quick start's model on vLLM under --reference-mode, instead of a scripted engine.
set -euo pipefail
cd "$(dirname "$0")/.."
export RAY_USAGE_STATS_ENABLED=0  # imports and processes that a start can do without
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
OUT=${1:?usage: ./scripts/chaos.sh OUT [--case ... | --random N]}; shift
PYTHON=${VIME_VENV:-.venv}/bin/python
MODEL=examples/quickstart/model
FLAGS=(
  --device cpu --input-key input --label-key label --rollout-batch-size 4 --n-samples-per-prompt 4 --keep-checkpoints 3
  --transferqueue-mode "${MODE:-streaming}"
)
if [ "${ENGINE:-scripted}" = vllm ]; then
  DATA=data/quickstart-seed0
  ROUNDS=${ROUNDS:-12}
  "$PYTHON" examples/quickstart/prepare.py --data-dir "$DATA" --seed 0
  FLAGS+=(
    --reference-mode --rm-type exact_match --advantage-estimator grpo --calculate-per-token-loss --weight-decay 0
    --rollout-max-response-len 48 --rollout-max-context-len 128 --lr 2e-4 --rollout-shuffle --rollout-seed 0
    --use-dynamic-batch-size --max-tokens-per-gpu 2048
  )
else
  DATA=data/chaos
  "$PYTHON" examples/quickstart/prepare.py --data-dir "$DATA" --num-train 64 --num-eval 8
  FLAGS+=(
    --debug-engine-module vime.backends.vllm_utils.scripted_server --custom-rm-path scripts/chaos_reward.py:even_share
    --rollout-max-response-len 12 --rollout-max-context-len 64 --lr 1e-3 --micro-batch-size 8
    --engine-health-interval-secs 1 --engine-health-timeout-secs 5
  )
fi
FLAGS+=(--hf-checkpoint "$MODEL" --prompt-data "$DATA/train.jsonl" --num-rollout "${ROUNDS:-60}")
[ "${MODE:-streaming}" != streaming ] || FLAGS+=(--transferqueue-lease-timeout-secs "${SECONDS_PER_LEASE:-8}")
[ -z "${WORKERS:-}" ] || FLAGS+=(--num-rollout-workers "$WORKERS")
[ -z "${PARTIAL:-}" ] || FLAGS+=(--partial-rollout)
[ -z "${ADAPTER:-}" ] || FLAGS+=(--train-backend fsdp --lora-rank 4 --lr 1e-2)
HOW=(--script "${SCRIPT:-train.py}")
[ "${SCRIPT:-train.py}" != train_async.py ] || FLAGS+=(--max-staleness 1)
[ "${SCRIPT:-train.py}" != train_async.py ] || HOW+=(--own-weights)
exec "$PYTHON" -m vime chaos "$OUT" "${HOW[@]}" "$@" -- "${FLAGS[@]}"
