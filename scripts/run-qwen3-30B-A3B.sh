#!/usr/bin/env bash
# GRPO on Qwen3-30B-A3B, two nodes of 8 GPUs of 80 GB: all 16 train (experts over 8, optimizer over 16), then the same 16
# generate (8 engines of 2 GPUs). Submits to the Ray cluster that runs already; it starts and stops nothing else.
#   ray start --head --num-gpus 8               on the first node, then on the other
#   ray start --address HEAD:6379 --num-gpus 8
#   MODEL_DIR=/models DATA_DIR=/data OUT_DIR=/mnt/out ./scripts/run-qwen3-30B-A3B.sh
# Both nodes need model, data and OUT_DIR under the same paths. It runs on what scripts/install.sh installs. `vime plan`
# with these flags counts what a GPU holds while it trains. Metrics on wandb, once `wandb login` was said on the head
# node: USE_WANDB=1.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/models/qwen3-30B-A3B.sh
DATA_DIR=$(realpath -m "${DATA_DIR:-data}")
OUT_DIR=$(realpath -m "${OUT_DIR:-.}")
RUN_NAME=${RUN_NAME:-qwen3-30B-A3B-grpo}

CLUSTER_ARGS=(
  --device cuda --ray-address auto
  --actor-num-nodes 2 --actor-num-gpus-per-node 8
  --colocate --rollout-num-gpus-per-engine 2
)
CKPT_ARGS=(--run-dir "$OUT_DIR/runs/$RUN_NAME" --save-interval 20
  --save "$OUT_DIR/checkpoints/$RUN_NAME" --load "$OUT_DIR/checkpoints/$RUN_NAME")
DATA_ARGS=(
  --prompt-data "$DATA_DIR/dapo-math-17k.jsonl" --input-key prompt --label-key label
  --apply-chat-template --rollout-shuffle --rm-type math
)
ROLLOUT_ARGS=(
  --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
  --rollout-max-prompt-len 1024 --rollout-max-response-len 8192 --rollout-max-context-len 16384 --rollout-temperature 1
  --over-sampling-batch-size 64 --generate-timeout-secs 3600 --start-timeout-secs 1800
  --dynamic-sampling-filter-path vime.rollout.filter_hub.check_reward_nonzero_std
)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data aime "$DATA_DIR/aime-2024.jsonl" --n-samples-per-eval-prompt 16
  --eval-max-response-len 16000 --eval-top-p 0.7)
PERF_ARGS=(
  --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
  --bf16 --use-distributed-optimizer
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  --use-dynamic-batch-size --max-tokens-per-gpu 9216 --balance-data
)
GRPO_ARGS=(--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28
  --use-rollout-routing-replay)
OPTIMIZER_ARGS=(--lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98)
QUEUE_ARGS=(--enable-vime-transfer-queue --transferqueue-mode buffer)
ENGINE_ARGS=(--vllm-gpu-memory-utilization 0.8)
TRACKING_ARGS=()
[ -z "${USE_WANDB:-}" ] || TRACKING_ARGS=(--use-wandb --wandb-project vime --wandb-group "$RUN_NAME")

exec ray job submit --address "${RAY_DASHBOARD_ADDRESS:-http://127.0.0.1:8265}" --working-dir . -- python3 train.py \
  "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
  "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${QUEUE_ARGS[@]}" "${ENGINE_ARGS[@]}" \
  "${TRACKING_ARGS[@]}" "$@"
