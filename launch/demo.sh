#!/usr/bin/env bash
# From nothing to a trained model: installs, makes a corpus of this Python's own library, trains a tokenizer,
# writes the training files, trains configs/demo.yaml on two processes and reports. About five minutes on two
# cores. Steps that are done are skipped, and an interrupted run continues.
#
#   bash launch/demo.sh [key=value ...]      changes to the configuration
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/install.sh
PYTHON=${MEGNORM_VENV:-$PWD/.venv}/bin/python
DATA=data/demo
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# run_once MARK COMMAND...: the command, unless it was carried through before. The mark is written last, so
# that a step that was cut off is run again.
run_once() {
    local mark=$DATA/.done-$1
    shift
    [ -e "$mark" ] && return
    "$@"
    touch "$mark"
}

preprocess() {
    "$PYTHON" tools/preprocess_data.py --input "$DATA/$1.jsonl" --output-prefix "$DATA/$1" \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$DATA/tokenizer.model" --append-eod --workers 2
}

mkdir -p "$DATA"
run_once corpus "$PYTHON" tools/stdlib_corpus.py --output-dir "$DATA"
run_once tokenizer "$PYTHON" tools/train_tokenizer.py --input "$DATA/train.jsonl" --vocab-size 4096 \
    --output "$DATA/tokenizer"
run_once train preprocess train
run_once valid preprocess valid

"$PYTHON" -m megnorm train configs/demo.yaml --nproc 2 "$@"
RUN_DIR=runs/demo
for change in "$@"; do
    case $change in run_dir=*) RUN_DIR=${change#run_dir=} ;; esac
done
"$PYTHON" tools/demo_report.py "$RUN_DIR"
