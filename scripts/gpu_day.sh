#!/usr/bin/env bash
# The first ten minutes on a machine with GPUs, what is worth most first. A step that fails ends nothing; a line for each says
# ok, FAILED or skipped, its seconds and its last line of output, of which OUT/<step>.log has the rest. Run ./scripts/install.sh before.
#   ./scripts/gpu_day.sh [OUT] [STEP ...]    OUT: runs/gpu-day (the default); no STEP: all of them, in the order below
# BUDGET=600: seconds in all; a step that comes too late is skipped. Exit code 1: a step failed; 2: there is no GPU, or nothing is installed.
#
#   step       GPUs  at most  what
#   trainer       1     90 s  log-probabilities and an optimizer step over NCCL, against transformers and plain torch
#   speed         1     60 s  tokens/s of the trainer, 0.5 B parameters, and how many plain torch makes of the same
#   run           1    200 s  train.py with real vLLM in fp32; two GPUs: weights by NCCL; four: trainer and engine at TP 2 too
#   layouts       2    120 s  TP2 with sequence parallelism, DP2, PP2, CP2, EP2 and FSDP against one process on the CPU
#   weights       2     60 s  weights from one GPU to another over NCCL have the hash of what was sent
#   colocated     1    120 s  trainer and engine take turns on one GPU
#   quickstart    1    200 s  30 rounds that must learn
#   run-bf16      1    200 s  `run` in bf16, dense and with experts
#   hash          1     40 s  GB/s at which a GPU hashes weights, and what that makes of an update of larger models
#   rest          1    600 s  every other test marked gpu
set -euo pipefail
cd "$(dirname "$0")/.."
STEPS=(trainer speed run layouts weights colocated quickstart run-bf16 hash rest)
OUT=${1:-runs/gpu-day}
CHOSEN=("${@:2}")
(($# > 1)) || CHOSEN=("${STEPS[@]}")
BUDGET=${BUDGET:-600}
PYTHON=${VIME_VENV:-.venv}/bin/python
for step in "${CHOSEN[@]}"; do
  [[ " ${STEPS[*]} " == *" $step "* ]] || { echo "gpu_day: no step $step; steps: ${STEPS[*]}" >&2; exit 2; }
done
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || {
  echo "gpu_day: nvidia-smi lists no GPU here. Run it on a machine with one; ./scripts/test.sh is for this one." >&2; exit 2; }
[ -x "$PYTHON" ] || { echo "gpu_day: no $PYTHON. Run ./scripts/install.sh first." >&2; exit 2; }
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null || {
  echo "gpu_day: torch of $PYTHON sees no CUDA device: a build for CPUs? Remove that environment, then ./scripts/install.sh." >&2; exit 2; }
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

gpus_of() { case $1 in layouts | weights) echo 2 ;; *) echo 1 ;; esac; }
limit_of() {
  case $1 in
    trainer) echo 90 ;; speed | weights) echo 60 ;; layouts | colocated) echo 120 ;;
    run | quickstart | run-bf16) echo 200 ;; hash) echo 40 ;; rest) echo 600 ;;
  esac
}
run_step() {
  local cluster=(--colocate --vllm-gpu-memory-utilization 0.5)
  ((GPUS < 2)) || cluster=(--rollout-num-gpus 1)
  case $1 in
    trainer) tests tests/gpu/test_trainer_nccl.py ;;
    speed) bounded "$PYTHON" benchmarks/gpu_trainer.py --size 0.5b --plain ;;
    run) tests tests/gpu/test_engine_gpu.py -k "a_run_on_the_gpu and tied and fp32" ;;
    layouts) tests tests/gpu/test_layouts_gpu.py ;;
    weights) tests tests/gpu/test_nccl_weights.py ;;
    colocated) tests tests/gpu/test_colocated_gpu.py ;;
    quickstart)
      bounded ./scripts/quickstart.sh --device cuda --actor-num-gpus-per-node 1 "${cluster[@]}" --run-dir "$OUT/run-$STAMP" &&
        "$PYTHON" examples/quickstart/check.py "$OUT/run-$STAMP" ;;
    run-bf16) tests tests/gpu/test_engine_gpu.py -k "a_run_on_the_gpu and bf16" ;;
    hash) bounded "$PYTHON" benchmarks/weight_hash.py --device cuda ;;
    rest)
      tests tests/gpu/test_attention_gpu.py tests/gpu/test_ipc_weights.py tests/gpu/test_families_gpu.py tests/gpu/test_gpu_figures.py \
        tests/gpu/test_engine_gpu.py -k "not (a_run_on_the_gpu and (bf16 or tied))" ;;
  esac
}
# pytest ends a session that is too long, and what it started; `timeout` is for the case that it cannot.
tests() { VIME_TEST_DEADLINE=$((LIMIT - 3)) bounded "$PYTHON" -m pytest -n0 -q -s -m gpu "$@"; }
bounded() { timeout --foreground --signal=INT --kill-after=20 "$LIMIT" "$@"; }

STAMP=$(date +%H%M%S) code=0
echo "gpu_day: $GPUS GPU(s), $(nvidia-smi --query-gpu=name --format=csv,noheader | sed -n 1p); $BUDGET s; output in $OUT"
for step in "${CHOSEN[@]}"; do
  began=$SECONDS outcome=ok failed=0 log=$OUT/$step.log
  LIMIT=$((BUDGET - SECONDS < $(limit_of "$step") ? BUDGET - SECONDS : $(limit_of "$step")))
  if ((GPUS < $(gpus_of "$step"))); then
    outcome=skipped last="needs $(gpus_of "$step") GPUs"
  elif ((LIMIT < 5)); then
    outcome=skipped last="no time left of $BUDGET s; BUDGET=900 $0 $OUT $step"
  else
    run_step "$step" >"$log" 2>&1 </dev/null || failed=$?
    last=$(grep -v '^[[:space:]]*$' "$log" | tail -n 1 | cut -c1-160) || last=''
    case $failed in
      0) [[ $last != *skipped* || $last == *passed* ]] || outcome=skipped ;;
      124 | 137 | 70) outcome=FAILED code=1 last="not done in $LIMIT s: $last" ;;
      *) outcome=FAILED code=1 last="exit code $failed: $last" ;;
    esac
  fi
  printf '%-7s %4d s  %-10s  %s\n' "$outcome" $((SECONDS - began)) "$step" "$last"
done
exit "$code"
