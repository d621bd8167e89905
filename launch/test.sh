#!/usr/bin/env bash
# Installs what is needed and runs the tests.
#
#   bash launch/test.sh                          all tiers, quick ones first: arch, unit, dist, train
#   bash launch/test.sh tests/unit -k norm -x    anything else goes to pytest as it stands
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/install.sh
PYTHON=${MEGNORM_VENV:-$PWD/.venv}/bin/python

# Several ranks share few cores: threads that wait must sleep, and each rank gets one.
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
export DS_ACCELERATOR=cpu TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 MPLBACKEND=Agg

if [ $# = 0 ]; then
    # One process a test, so two at a time; a dist test takes all cores by itself.
    "$PYTHON" -m pytest -n 2 --dist loadfile tests/arch tests/unit </dev/null
    set -- tests/dist tests/train
fi
exec "$PYTHON" -m pytest "$@" </dev/null
