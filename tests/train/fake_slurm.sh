#!/usr/bin/env bash
# Stand-ins for Slurm's commands: fake_slurm.sh COMMAND ARGUMENTS. State and log lie in $FAKE_SLURM.
# sbatch runs each task of the array at once, one after the other, and again while it asks to be requeued. The
# first run of task $FAKE_SIGNAL_TASK gets SIGUSR1, as before a time limit.
set -euo pipefail
command=$1
shift
mkdir -p "$FAKE_SLURM"
case $command in
sbatch)
    script=${!#}
    range=$(sed -n 's/^#SBATCH --array=0-\([0-9]*\)%.*/\1/p' "$script")
    job=$((100 + $(cat "$FAKE_SLURM/jobs" 2>/dev/null || echo 0)))
    echo 1 >"$FAKE_SLURM/jobs"
    for task in $(seq 0 "$range"); do
        export SLURM_ARRAY_JOB_ID=$job SLURM_ARRAY_TASK_ID=$task SLURM_JOB_ID=$((job + task)) SLURM_NNODES=1
        export SLURM_JOB_NODELIST=localhost
        for attempt in 1 2 3; do
            rm -f "$FAKE_SLURM/again"
            export FAKE_SIGNAL=0
            [ "$attempt" != 1 ] || [ "$task" != "${FAKE_SIGNAL_TASK:-none}" ] || FAKE_SIGNAL=1
            bash "$script" >>"$FAKE_SLURM/log" 2>&1 || true
            [ -e "$FAKE_SLURM/again" ] || break
        done
    done
    echo "$job"
    ;;
srun) # --kill-on-bad-exit=0 bash -c ...
    shift
    export SLURM_NODEID=0
    [ "$FAKE_SIGNAL" = 1 ] || exec "$@"
    "$@" &
    metrics=$(dirname "${@: -3:1}")/metrics.jsonl
    until [ -s "$metrics" ]; do sleep 0.02; done
    kill -USR1 $!
    wait $!
    ;;
scontrol)
    case $1 in
    show) echo localhost ;;
    requeue) echo "$2" >>"$FAKE_SLURM/requeued" && touch "$FAKE_SLURM/again" ;;
    esac
    ;;
squeue) ;;
esac
