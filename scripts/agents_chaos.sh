#!/usr/bin/env bash
# Six agent programs over SDKs of others, random kills of every part, one answer in ten lost; nothing may be lost, trained
# twice or differ from what the engines say that they generated: benchmarks/agent_sdks/judge.py, docs/faults.md.
#   ./scripts/agents_chaos.sh OUT [SESSIONS] [KILLS] [SEED]      default: 96 sessions, at most 10 kills, seed 0
# ENGINE=vllm: vLLM and a model that was taught to call a tool, instead of a scripted engine.
# The weights of the attempts of the run are compared with each other only: --reference-mode is refused with an agent, and
# without it the same round trained in another life may differ in the last bit of a gradient (docs/log.md).
# MODEL=DIR: made by benchmarks/agent_sdks/chat_model.py before.
# WORKERS=2: rollout workers in processes of their own, each with its server of sessions, which are killed too.
# ENGINES=2: of several engines, one that is killed gives its requests to the others and starts again alone.
# ELSEWHERE=1: the programs are no children of the run: they claim its samples through a front, and go on with their
# sessions when the run, or a part of it, is killed (--agent-listen; not with WORKERS).
# WORK_SECS=24: kills come up to so many seconds after the first weights of each start. Default: 60.
# MODE=external: the run has a gateway for jobs outside, which is killed too. Default: streaming.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:?usage: ./scripts/agents_chaos.sh OUT [SESSIONS] [KILLS] [SEED]}
SESSIONS=${2:-96} KILLS=${3:-10} SEED=${4:-0}
GROUPS_A_ROUND=4 SAMPLES=6
ROUNDS=$(((SESSIONS + GROUPS_A_ROUND * SAMPLES - 1) / (GROUPS_A_ROUND * SAMPLES)))
export RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
PYTHON=$PWD/${VIME_VENV:-.venv}/bin/python
[ ! -e "$OUT" ] || { echo "agents_chaos: $OUT is there already. Name a new directory." >&2; exit 2; }
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
PYTHON=$PYTHON benchmarks/agent_sdks/install.sh
ENGINE=${ENGINE:-scripted}
[ "$ENGINE" = vllm ] && STEPS=500 || STEPS=0
MODEL=${MODEL:-$OUT/model}
[ -e "$MODEL/train.jsonl" ] || "$PYTHON" -m benchmarks.agent_sdks.chat_model "$MODEL" --steps "$STEPS" --prompts $((GROUPS_A_ROUND * ROUNDS))
FLAGS=(
  --device cpu --hf-checkpoint "$MODEL" --prompt-data "$MODEL/train.jsonl" --input-key input --label-key label
  --transferqueue-mode "${MODE:-streaming}" --transferqueue-lease-timeout-secs 60
  --num-rollout "$ROUNDS" --rollout-batch-size $GROUPS_A_ROUND --n-samples-per-prompt $SAMPLES --keep-checkpoints 3
  --debug-engine-module "benchmarks.agent_sdks.${ENGINE}_engine"
  --custom-rm-path scripts/chaos_reward.py:even_share --lr 1e-4 --use-dynamic-batch-size --max-tokens-per-gpu 4096
  --rollout-max-response-len 192 --rollout-max-context-len 2048
  --agent-timeout-secs 120 --agent-tool-parser hermes
  --engine-health-interval-secs 1 --engine-health-timeout-secs 5
)
[ -z "${ENGINES:-}" ] || FLAGS+=(--rollout-num-engines "$ENGINES")
[ -z "${WORKERS:-}" ] || FLAGS+=(--num-rollout-workers "$WORKERS")
JUDGED=(--rounds "$ROUNDS" --groups $GROUPS_A_ROUND --samples $SAMPLES)
if [ -n "${ELSEWHERE:-}" ]; then
  PORT=$("$PYTHON" -c 'from vime.utils.network import free_port; print(free_port())')
  FLAGS+=(--agent-listen "127.0.0.1:$PORT" --agent-key-file "$OUT/agent-key")
  JUDGED+=(--sessions-outlive)
  "$PYTHON" -m vime sessions-front "http://127.0.0.1:$PORT" --patience-secs 600 >"$OUT/front" 2>"$OUT/front.err" &
  STARTED=($!)
  trap 'kill "${STARTED[@]}" 2>/dev/null || true' EXIT
else
  FLAGS+=(--agent-command "$PYTHON benchmarks/agent_sdks/launch.py")
fi
begin_programs() {  # with the variables of this phase
  [ -n "${ELSEWHERE:-}" ] || return 0
  until [ -s "$OUT/front" ]; do sleep 0.1; done
  "$PYTHON" -m benchmarks.agent_sdks.elsewhere "$(cat "$OUT/front")" "$OUT/agent-key" 2>>"$OUT/elsewhere.err" &
  STARTED[1]=$!
}
end_programs() { [ -z "${ELSEWHERE:-}" ] || kill "${STARTED[1]}"; }
judge() { "$PYTHON" -m benchmarks.agent_sdks.judge "$1" "$1/journal" "${JUDGED[@]}"; }

mkdir "$OUT/calm" "$OUT/chaos"
export VIME_ENGINE_JOURNAL=$OUT/calm/journal VIME_LOST_ANSWERS=$OUT/calm/lost
begin_programs
"$PYTHON" train.py "${FLAGS[@]}" --run-dir "$OUT/calm/run" --save-debug-rollout-data "$OUT/calm/rollout_{rollout_id}.jsonl"
end_programs
"$PYTHON" -m vime audit "$OUT/calm/run"
echo "without a kill, $(wc -l <"$VIME_LOST_ANSWERS") answers lost:"
judge "$OUT/calm"
[ "$KILLS" != 0 ] || exit 0

export VIME_ENGINE_JOURNAL=$OUT/chaos/journal VIME_LOST_ANSWERS=$OUT/chaos/lost
touch "$VIME_LOST_ANSWERS"
begin_programs
failed=0  # the judge speaks also about a run that failed
"$PYTHON" -m vime chaos "$OUT/chaos/runs" --own-weights --undisturbed "$OUT/calm/run" --random "$KILLS" --kills-per-run "$KILLS" \
  --most-runs 1 --work-secs "${WORK_SECS:-60}" --seed "$SEED" \
  -- "${FLAGS[@]}" --save-debug-rollout-data "$OUT/chaos/rollout_{rollout_id}.jsonl" || failed=1
end_programs
echo "with kills, $(wc -l <"$VIME_LOST_ANSWERS") answers lost:"
judge "$OUT/chaos" || failed=1
if [ -s "$OUT/elsewhere.err" ]; then
  echo "agents elsewhere whose session broke:"
  cat "$OUT/elsewhere.err"
  failed=1
fi
exit "$failed"
