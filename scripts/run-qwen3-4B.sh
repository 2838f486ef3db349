#!/usr/bin/env bash
# GRPO on Qwen3-4B, 8 GPUs: 4 train (TP2 x DP2), 4 generate. Submits to the Ray cluster that runs already; it starts and
# stops nothing else. Start one first on the head node:   ray start --head --num-gpus 8
#   MODEL_DIR=/models DATA_DIR=/data OUT_DIR=/mnt/out ./scripts/run-qwen3-4B.sh
# The job runs in a copy of this directory that Ray throws away, so every path handed to it is absolute. It runs on what
# scripts/install.sh installs. Faster layers, once Transformer Engine is built (docs/gpu-launch.md): append
# --transformer-impl transformer_engine. Metrics on wandb, once `wandb login` was said on the head node: USE_WANDB=1.
set -euo pipefail
cd "$(dirname "$0")/.."
RUN_NAME=${RUN_NAME:-qwen3-4B-grpo}
source scripts/models/qwen3-4B.sh
source scripts/models/qwen3-math.sh

CLUSTER_ARGS=(
  --device cuda --ray-address auto
  --actor-num-nodes 1 --actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --sequence-parallel
  --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1 --vllm-gpu-memory-utilization 0.85
  --generate-timeout-secs 1800 --start-timeout-secs 900
)
KL_ARGS=(--use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl)

submit "${TRAIN:-train.py}" "${CLUSTER_ARGS[@]}" "${KL_ARGS[@]}" "$@"
