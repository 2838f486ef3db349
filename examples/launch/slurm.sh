#!/usr/bin/env bash
# A run on a Slurm allocation: Ray's head on the first node, a worker on each of the others, train.py on the head.
#   sbatch --nodes 2 --gpus-per-node 8 --ntasks-per-node 1 --cpus-per-task 64 examples/launch/slurm.sh FLAGS OF TRAIN.PY
# Every node must see this directory, its .venv, the model, the data and the run directory under the same paths.
#SBATCH --job-name=vime
#SBATCH --exclusive
# TERM to this shell alone, 10 minutes before the time limit, or by `scancel --batch --signal=TERM JOB`: the run saves and
# ends. A plain `scancel` ends Ray in the same moment, and what was trained since the last checkpoint is lost.
#SBATCH --signal=B:TERM@600
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export RAY_worker_niceness=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')  # of this job alone
# Since Slurm 22.05 `srun` does not take this over from `sbatch`: each step would have one CPU.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
BIN=$PWD/.venv/bin
GPUS=${SLURM_GPUS_ON_NODE:-8}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)  # not `head`, which ends before scontrol: SIGPIPE
PORT=$((20000 + SLURM_JOB_ID % 20000))

srun --nodes 1 --ntasks 1 --nodelist "$HEAD" --overlap \
  "$BIN/ray" start --head --port "$PORT" --num-gpus "$GPUS" --disable-usage-stats --block &
RAYS=($!)
sleep 10  # a worker that finds no head tries again by itself
if ((SLURM_JOB_NUM_NODES > 1)); then
  srun --nodes $((SLURM_JOB_NUM_NODES - 1)) --ntasks $((SLURM_JOB_NUM_NODES - 1)) --exclude "$HEAD" --overlap \
    "$BIN/ray" start --address "$HEAD:$PORT" --num-gpus "$GPUS" --block &
  RAYS+=($!)
fi
trap 'kill "${RAYS[@]}" 2>/dev/null || true' EXIT

# Every node has to be there before the run counts what is free.
srun --nodes 1 --ntasks 1 --nodelist "$HEAD" --overlap "$BIN/python" - "$HEAD:$PORT" "$SLURM_JOB_NUM_NODES" <<'PYTHON'
import sys, time
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
ends = time.monotonic() + 300
while (there := sum(node["Alive"] for node in ray.nodes())) < int(sys.argv[2]):
    if time.monotonic() > ends:
        sys.exit(f"{there} of {sys.argv[2]} nodes have joined within 300 s; see the output of their `ray start`.")
    time.sleep(1)
PYTHON

srun --nodes 1 --ntasks 1 --nodelist "$HEAD" --overlap \
  "$BIN/python" train.py --device cuda --ray-address "$HEAD:$PORT" "$@" &
TRAIN=$!
trap 'waits=1; kill -TERM "$TRAIN"' TERM  # srun hands it on; the signal ends `wait`, and the next one has the exit code
waits=1
while ((waits)); do
  waits=0 code=0
  wait "$TRAIN" || code=$?
done
exit "$code"
