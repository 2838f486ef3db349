#!/usr/bin/env bash
# GRPO on Qwen3-30B-A3B, two nodes of 8 GPUs of 80 GB: all 16 train (experts over 8, optimizer over 16), then the same 16
# generate (8 engines of 2 GPUs). Submits to the Ray cluster that runs already; it starts and stops nothing else.
#   ray start --head --num-gpus 8               on the first node, then on the other
#   ray start --address HEAD:6379 --num-gpus 8
#   MODEL_DIR=/models DATA_DIR=/data OUT_DIR=/mnt/out ./scripts/run-qwen3-30B-A3B.sh
# Both nodes need model, data and OUT_DIR under the same paths. It runs on what scripts/install.sh installs. `vime plan`
# with these flags counts what a GPU holds while it trains. That engines report their experts
# (--use-rollout-routing-replay) has never run (docs/never-run.md): without the flag, trainer and engine choose experts
# each for itself. Metrics on wandb, once `wandb login` was said on the head
# node: USE_WANDB=1.
set -euo pipefail
cd "$(dirname "$0")/.."
RUN_NAME=${RUN_NAME:-qwen3-30B-A3B-grpo}
source scripts/models/qwen3-30B-A3B.sh
source scripts/models/qwen3-math.sh

CLUSTER_ARGS=(
  --device cuda --ray-address auto
  --actor-num-nodes 2 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --sequence-parallel
  --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --use-rollout-routing-replay
  --colocate --rollout-num-gpus-per-engine 2 --vllm-gpu-memory-utilization 0.8
  --generate-timeout-secs 3600 --start-timeout-secs 1800
)

submit train.py "${CLUSTER_ARGS[@]}" "$@"
