#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns few-shot arithmetic as in run-smollm2-135m-cpu.sh, by a low-rank adapter: the model itself
# stays as it is, and a hundredth of it travels to the engine each round.
#   ./scripts/run-smollm2-135m-lora-cpu.sh [any train.py flag]
set -euo pipefail
cd "$(dirname "$0")/.."
exec ./scripts/run-smollm2-135m-cpu.sh --train-backend fsdp --lora-rank 16 --lr 2e-4 "$@"
