#!/usr/bin/env bash
# A real Slurm on this machine, as root, with two nodes that are two slurmd of one host:
#
#   MEGNORM_VENV=/path/to/.venv bash tests/train/slurm_local.sh
#
# Where Slurm is missing, it installs Debian's packages slurm-wlm and munge first.
#
# 1. launch/slurm.sbatch trains on two nodes, one process each.
# 2. `megnorm sweep --backend slurm` submits an array whose task runs into its time limit: it saves on the signal,
#    goes back into the queue, and continues from its checkpoint in the same run directory.
#
# It takes about five minutes. Everything lies in a temporary folder; the daemons are ended by their ids.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export MEGNORM_VENV=${MEGNORM_VENV:-$ROOT/.venv}
PYTHON=$MEGNORM_VENV/bin/python
[ "$(id -u)" = 0 ] || { echo "a Slurm of its own needs root" >&2; exit 2; }
for program in slurmctld slurmd munged sbatch; do
    command -v "$program" >/dev/null && continue
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge >/dev/null ||
        { echo "no $program, and slurm-wlm and munge can't be installed" >&2; exit 2; }
    break
done

WORK=$(mktemp -d)
chmod 755 "$WORK"
pids=()
finish() {
    local code=$?
    scancel --me 2>/dev/null && wait_for 60 "an empty queue" bash -c '! squeue -h | grep -q .' || true
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    [ "$code" = 0 ] && rm -rf "$WORK" || echo "failed; what there is lies in $WORK" >&2
    exit "$code"
}
trap finish EXIT

wait_for() { # SECONDS WHAT COMMAND...
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$deadline" ] || { echo "waited in vain for $what" >&2; return 1; }
        sleep 1
    done
    echo "ok: $what"
}

# ---- the cluster
# The first node is called as this machine, since the workers look its name up.
HOST=$(hostname -s)
getent hosts "$HOST" >/dev/null || { echo "this machine's name $HOST doesn't resolve" >&2; exit 2; }
mkdir -p "$WORK"/{munge,state,spool1,spool2}
dd if=/dev/urandom of="$WORK/munge/key" bs=1024 count=1 status=none
chmod 700 "$WORK/munge" && chmod 400 "$WORK/munge/key"
# munged insists on folders of its own: the socket lies where others may reach it.
munged --foreground --force --key-file="$WORK/munge/key" --socket="$WORK/munge.socket" \
    --pid-file="$WORK/munge/pid" --log-file="$WORK/munge/log" --seed-file="$WORK/munge/seed" 2>"$WORK/munged.out" &
pids+=($!)
cat >"$WORK/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=17817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$WORK/munge.socket,cred_expire=10
StateSaveLocation=$WORK/state
SlurmdSpoolDir=$WORK/spool-%n
SlurmctldPidFile=$WORK/slurmctld.pid
SlurmdPidFile=$WORK/slurmd-%n.pid
SlurmctldLogFile=$WORK/slurmctld.log
SlurmdLogFile=$WORK/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=30
NodeName=$HOST NodeHostname=$HOST NodeAddr=127.0.0.1 Port=17818 CPUs=1
NodeName=${HOST}2 NodeHostname=$HOST NodeAddr=127.0.0.1 Port=17819 CPUs=1
PartitionName=all Nodes=$HOST,${HOST}2 Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$WORK/slurm.conf
wait_for 20 "munge" test -S "$WORK/munge.socket"
slurmctld -D >"$WORK/slurmctld.out" 2>&1 &
pids+=($!)
for node in "$HOST" "${HOST}2"; do
    slurmd -D -N "$node" >"$WORK/slurmd-$node.out" 2>&1 &
    pids+=($!)
done
wait_for 60 "two idle nodes" bash -c '[ "$(sinfo -h -N -o %T | sort -u)" = idle ]'

# ---- data and a small configuration
cd "$ROOT"
export PYTHONPATH=$ROOT OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
PYTHONPATH=$ROOT:$ROOT/tests:$ROOT/tests/train "$PYTHON" - "$WORK" <<'PY'
import sys
from pathlib import Path

import small_run
import yaml

work = Path(sys.argv[1])
small_run.write_data(work)
raw = small_run.raw_config(work, work / "two", train__steps=10, train__eval_every=0)
small_run.write_config(work / "two.yaml", raw)
raw = small_run.raw_config(work, work / "unused", train__steps=10_000_000, train__eval_every=0, checkpoint__every=0)
small_run.write_config(work / "long.yaml", raw)
(work / "sweep.yaml").write_text(yaml.safe_dump({
    "base": "long.yaml", "dir": str(work / "sweep"), "axes": {"seed": [1]},
    "slurm": {"time": "2", "notice": 50}}))
PY

# ---- 1: two tasks on two nodes
job=$(cd "$WORK" && sbatch --parsable --nodes=2 --chdir="$ROOT" --output="$WORK/two.log" --export=ALL,NPROC=1 \
    "$ROOT/launch/slurm.sbatch" "$WORK/two.yaml")
wait_for 240 "the two-task job has left the queue" bash -c "! squeue -h -j $job 2>/dev/null | grep -q ."
grep -q "DP=2" "$WORK/two.log" || { cat "$WORK/two.log" >&2; exit 1; }
tail -n 1 "$WORK/two/metrics.jsonl" | grep -q '"step": 10'
echo "ok: two tasks on two nodes trained 10 steps"

# ---- 2: a time limit, a signal, a requeue
"$PYTHON" -m megnorm sweep "$WORK/sweep.yaml" --backend slurm
cell=$WORK/sweep/cells/1
state() { "$PYTHON" -c "import json; s = json.load(open('$cell/status.json')); print(s['state'], s['attempts'])"; }
export -f state
export PYTHON cell
wait_for 120 "the cell runs" bash -c '[ "$(state)" = "running 1" ]'
wait_for 240 "it runs again after its time limit" bash -c '[ "$(state)" = "running 2" ]'
saved=$(sed -n 's/^stopped by SIGUSR1 after step \([0-9,]*\);.*/\1/p' "$cell/log.txt")
[ -n "$saved" ] || { cat "$cell/log.txt" >&2; exit 1; }
wait_for 120 "it resumed from the checkpoint of step $saved" grep -q "resumed from .*checkpoints/step-" "$cell/log.txt"
[ "$(grep -c '^---- attempt' "$cell/log.txt")" = 2 ]
echo "ok: stopped before the time limit at step $saved, requeued as the same job, resumed in the same run directory"
