#!/usr/bin/env bash
# Runs the checks that take hours; ./scripts/test.sh has a small version of each. It ends with a table of what passed and how
# long it took; exit code 1: something failed. The output of each part is in OUT/<part>.log.
#   ./scripts/nightly.sh OUT                every part
#   ./scripts/nightly.sh OUT tests inputs   some
# SEED=1: of random kills and flipped bits (the day's date without it). KILLS=60: how many each part of random kills does (agents, in one run: at most).
# DEADLINE=7200: seconds that a part may take.
#
#   part     what                                                         of it in ./scripts/test.sh
#   tests    pytest -m nightly: more layouts, recipes and modes           docs/faults.md lists both
#   matrix   every phase of a run with each process it concerns           two cases, tests/e2e/run/test_documented_commands.py
#   random   anything is killed at any time                               the drawing of faults, tests/unit/cli
#   workers  the same with two rollout workers in processes of their own  tests/e2e/run/test_rollout_workers.py
#   vllm     the same on vLLM, few                                        tests/e2e/run/test_streaming_run.py
#   fleet    each part in a run of its own: back at full speed, alone     tests/e2e/run/test_lost_engines.py and its like
#   agents   six agent programs over SDKs of others, killed and judged    the judge, tests/unit/project; SDKs, tests/contract
#   fuzz     over 10,000 inputs to every endpoint of gateway and sessions  a tenth of them, tests/contract
#   flips    a flipped bit in any file of a run directory                 one in each kind of file, test_streaming_run.py
#   figures  goals in seconds and GB/s, and the forecast of ten runs      none: nothing is timed there
#   inputs   train.py with each broken input, in processes of their own   all of them in one process, tests/unit/ray
set -euo pipefail
cd "$(dirname "$0")/.."
PARTS=(tests matrix random workers vllm fleet agents fuzz flips figures inputs)
FLEET=(engine router worker queue ledger gateway manager trainer ray driver)
FUZZ=(tests/contract/gateway/test_gateway_fuzz.py tests/contract/sessions/test_session_fuzz.py)
OUT=${1:?usage: ./scripts/nightly.sh OUT [PART ...]; parts: ${PARTS[*]}}
shift
CHOSEN=("${@:-${PARTS[@]}}")
SEED=${SEED:-$(date +%Y%m%d)}
export -n SEED  # scripts that tests and parts start have a seed of their own
KILLS=${KILLS:-60}
DEADLINE=${DEADLINE:-7200}
for part in "${CHOSEN[@]}"; do
  [[ " ${PARTS[*]} " == *" $part "* ]] || { echo "nightly: no part $part; parts: ${PARTS[*]}" >&2; exit 2; }
done
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
./scripts/install.sh smollm2 reasoning-gym
PYTHON=${VIME_VENV:-.venv}/bin/python
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

run_part() {
  case $1 in
    tests) VIME_TEST_DEADLINE=$DEADLINE ./scripts/test.sh -m "nightly and not gpu" ;;
    matrix) bounded ./scripts/chaos.sh "$OUT/matrix" ;;
    random) bounded ./scripts/chaos.sh "$OUT/random" --random "$KILLS" --seed "$SEED" ;;
    workers) WORKERS=2 bounded ./scripts/chaos.sh "$OUT/workers" --random "$KILLS" --seed "$SEED" ;;
    vllm) ENGINE=vllm bounded ./scripts/chaos.sh "$OUT/vllm" --random $(((KILLS + 9) / 10)) --seed "$SEED" ;;
    fleet) bounded "$PYTHON" benchmarks/fleet.py --part "${FLEET[@]}" --kills $(((KILLS + 14) / 15)) --seed "$SEED" ;;
    agents) MODE=external WORKERS=2 bounded ./scripts/agents_chaos.sh "$OUT/agents" $((KILLS * 10)) "$KILLS" "$SEED" ;;
    fuzz) VIME_TEST_DEADLINE=$DEADLINE VIME_FUZZ_EXAMPLES=200 ./scripts/test.sh "${FUZZ[@]}" ;;
    flips) bounded "$PYTHON" -m tests.helpers.run_flips "$OUT/flips" --seed "$SEED" ;;
    figures) run_figures ;;
    inputs) bounded "$PYTHON" -m tests.helpers.broken_inputs ;;
  esac
}
run_figures() {
  local code=0
  bounded "$PYTHON" benchmarks/weight_hash.py --at-least 5 || code=1
  bounded "$PYTHON" benchmarks/control_client.py --engines 1000 --buckets 1 --tensors 18432 --at-most 2 || code=1
  bounded "$PYTHON" benchmarks/forecast.py || code=1
  return "$code"
}
# SIGINT, upon which every part ends what it started; nothing else ends the processes of a session of their own.
bounded() { timeout --foreground --signal=INT --kill-after=180 "$DEADLINE" "$@"; }

table='' failed=0
for part in "${CHOSEN[@]}"; do
  started=$SECONDS code=0
  echo "nightly: $part, output in $OUT/$part.log"
  run_part "$part" >"$OUT/$part.log" 2>&1 </dev/null || code=$?
  case $code in
    0) outcome=passed ;;
    124 | 137 | 70) outcome="FAILED: not done in $DEADLINE s" failed=1 ;;
    *) outcome="FAILED: exit code $code" failed=1 ;;
  esac
  last=$(grep -v '^[[:space:]]*$' "$OUT/$part.log" | tail -n 1 | tr '|' '/' | cut -c1-160) || last=''
  table+="| $part | $outcome | $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s | $last |"$'\n'
done
printf '\n%s\n%s\n%s' "| part (seed $SEED) | outcome | took | its last line |" "|---|---|---|---|" "$table"
exit "$failed"
