# What the launches of Qwen3 on mathematics share; sourced by run-qwen3-*.sh in the repository's root. They say layout
# and lengths of time, and set RUN_NAME and MODEL_ARGS before.
DATA_DIR=$(realpath -m "${DATA_DIR:-data}")
OUT_DIR=$(realpath -m "${OUT_DIR:-.}")

CKPT_ARGS=(--run-dir "$OUT_DIR/runs/$RUN_NAME" --save-interval 20
  --save "$OUT_DIR/checkpoints/$RUN_NAME" --load "$OUT_DIR/checkpoints/$RUN_NAME")
DATA_ARGS=(
  --prompt-data "$DATA_DIR/dapo-math-17k.jsonl" --input-key prompt --label-key label
  --apply-chat-template --rollout-shuffle --rm-type math
)
ROLLOUT_ARGS=(
  --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
  --rollout-max-prompt-len 1024 --rollout-max-response-len 8192 --rollout-max-context-len 16384 --rollout-temperature 1
  --over-sampling-batch-size 64
  --dynamic-sampling-filter-path vime.rollout.filter_hub.check_reward_nonzero_std
)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data aime "$DATA_DIR/aime-2024.jsonl" --n-samples-per-eval-prompt 16
  --eval-max-response-len 16000 --eval-top-p 0.7)
MEMORY_ARGS=(
  --bf16 --use-distributed-optimizer --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  --use-dynamic-batch-size --max-tokens-per-gpu 9216 --balance-data
)
OPTIMIZER_ARGS=(--lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98)
QUEUE_ARGS=(--enable-vime-transfer-queue --transferqueue-mode buffer)
TRACKING_ARGS=()
[ -z "${USE_WANDB:-}" ] || TRACKING_ARGS=(--use-wandb --wandb-project vime --wandb-group "$RUN_NAME")

# submit PROGRAM FLAGS: one job; of a flag that is given twice the last counts.
submit() {
  exec ray job submit --address "${RAY_DASHBOARD_ADDRESS:-http://127.0.0.1:8265}" --working-dir . -- python3 "$1" \
    "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${MEMORY_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${QUEUE_ARGS[@]}" "${TRACKING_ARGS[@]}" --advantage-estimator grpo --eps-clip 0.2 \
    --eps-clip-high 0.28 "${@:2}"
}
