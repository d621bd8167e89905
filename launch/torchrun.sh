#!/usr/bin/env bash
# Training on several machines with torchrun: run this on each of them.
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 NPROC=8 bash launch/torchrun.sh configs/hybrid_star_1.2b.yaml [key=value ...]
#
# Environment:
#   NNODES        machines (default 1)              NODE_RANK    this machine's number, from 0 (default 0)
#   MASTER_ADDR   address of machine 0 (default 127.0.0.1)    MASTER_PORT  a free port there (default 29500)
#   NPROC         processes per machine (default: GPUs seen, else 1)
#
# `megnorm train --nnodes ...` does the same with a better end: it hands signals to the workers, exits 75 after
# a saved stop, and names the rank that died on every machine. This script is for sites that want torchrun.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BIN=${MEGNORM_VENV:-$ROOT/.venv}/bin

NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-29500}
if [ -z "${NPROC:-}" ]; then
    NPROC=$(nvidia-smi -L 2>/dev/null | grep -c GPU || true)
    [ "$NPROC" -gt 0 ] || NPROC=1
fi
if [ $# -eq 0 ]; then
    echo "usage: NNODES=n NODE_RANK=r MASTER_ADDR=host NPROC=p bash launch/torchrun.sh CONFIG.yaml [key=value ...]" >&2
    exit 2
fi
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}

# Threads, malloc, OpenMP: the same settings as `megnorm train` gives its workers.
settings=$("$BIN/python" -m megnorm.launcher --print-env "$NPROC" --nnodes "$NNODES")
eval "$settings"
# After a signal the workers save before they end; torchrun would kill them after 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}

exec "$BIN/python" -m torch.distributed.run \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    --signals-to-handle SIGTERM,SIGINT,SIGUSR1 \
    -m megnorm train "$@"
