#!/usr/bin/env bash
# Sets up the Python environment .venv at the repository root, and does nothing where it is set up.
#
#   bash launch/install.sh [EXTRAS]      EXTRAS of setup.py, comma separated (default: test,plot)
#
# Environment:
#   PYTHON               interpreter to build .venv with (default: the first of python3, python3.13 ... 3.10
#                        that is 3.10 or newer)
#   MEGNORM_VENV         an existing environment to use in place of .venv: it is checked, nothing is installed
#   MEGNORM_INDEX_URL    a site's own package index, used in place of the default one and of PyTorch's
#   MEGNORM_ALLOW_CUDA   1: take torch's CUDA build (several GB) even where no GPU is seen
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CONSTRAINTS=$ROOT/launch/constraints.txt
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
EXTRAS=${1:-test,plot}
VENV=$ROOT/.venv
STAMP=$VENV/.megnorm-installed
LOG=$VENV/install.log

fail() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 2
}

# ---- an environment that exists: only look whether it has what is needed

check_existing() {
    local python=$MEGNORM_VENV/bin/python
    [ -x "$python" ] || fail "MEGNORM_VENV=$MEGNORM_VENV has no bin/python; name the folder of a virtual environment"
    "$python" - "$EXTRAS" <<'PY'
import importlib.util
import sys

if sys.version_info < (3, 10):
    sys.exit(f"install.sh: MEGNORM_VENV has Python {sys.version.split()[0]}; megnorm needs 3.10 or newer")
modules = "torch deepspeed numpy sentencepiece tensorboard pydantic yaml typer rich orjson safetensors psutil"
needed = modules.split() + (["pytest"] if "test" in sys.argv[1] else [])
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"install.sh: MEGNORM_VENV lacks {', '.join(missing)}; install them there, or unset MEGNORM_VENV")
PY
    echo "install.sh: using MEGNORM_VENV=$MEGNORM_VENV as it is; the command is: $MEGNORM_VENV/bin/python -m megnorm"
}

# ---- which interpreter, which build of torch

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON=$PYTHON is not a command"
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1); megnorm needs Python 3.10 or newer"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or newer found (python3 is: $(python3 --version 2>&1 || true)); install one, or name it with PYTHON=/path/to/python"
}

has_gpu() {
    [ -e /dev/nvidia0 ] || [[ "$(nvidia-smi -L 2>/dev/null)" == *GPU* ]]
}

pip_install() {
    "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-input \
        -c "$CONSTRAINTS" ${MEGNORM_INDEX_URL:+--index-url "$MEGNORM_INDEX_URL"} "$@" >>"$LOG" 2>&1
}

step() {
    local title=$1
    shift
    echo "install.sh: $title"
    "$@" && return
    echo "install.sh: failed; the end of $LOG:" >&2
    tail -n 20 "$LOG" >&2
    exit 1
}

# The plain pin of torch is a CUDA build on Linux, with about 3 GB of NVIDIA's libraries. So the CPU build is
# asked for by its full name: first from the index that pip is set to, then from PyTorch's own, where a short
# time-out keeps an unreachable one from hanging the install.
install_torch() {
    local pin
    pin=$(sed -n 's/^torch==//p' "$CONSTRAINTS")
    if [ "$(uname -s)" != Linux ] || [ "${MEGNORM_ALLOW_CUDA:-0}" = 1 ] || has_gpu; then
        step "torch $pin" pip_install "torch==$pin"
        return
    fi
    echo "install.sh: torch $pin, CPU build (no GPU seen)"
    pip_install "torch==$pin+cpu" && return
    if [ -z "${MEGNORM_INDEX_URL:-}" ]; then
        pip_install --retries 0 --timeout 15 --extra-index-url "$TORCH_CPU_INDEX" "torch==$pin+cpu" && return
    fi
    fail "no GPU is seen here, and no index offers torch $pin+cpu for $("$VENV/bin/python" --version)
(asked: ${MEGNORM_INDEX_URL:-the index that pip is set to, and $TORCH_CPU_INDEX}; details in $LOG).
The plain torch $pin would be the CUDA build, about 3 GB to download. Choose one:
  MEGNORM_INDEX_URL=URL     an index that has torch $pin+cpu
  PYTHON=...                another Python version, if the index has the CPU build for it
  MEGNORM_VENV=FOLDER       an environment that has torch already
  MEGNORM_ALLOW_CUDA=1      download the CUDA build all the same"
}

# ---- build .venv

version_of() {
    "$1" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null || echo none
}

# The stamp's first line says what .venv was installed from, the second with which extras.
stamp_key() {
    printf '%s %s' "$(cat "$ROOT/setup.py" "$CONSTRAINTS" | cksum)" "$ROOT"
}

venv_is_usable() {
    # Its pip names its own place: a folder that was moved or copied does not answer with $VENV.
    is_new_enough "$VENV/bin/python" && [[ "$("$VENV/bin/python" -m pip --version 2>/dev/null)" == *"$VENV/"* ]] &&
        { [ -z "${PYTHON:-}" ] || [ "$(version_of "$VENV/bin/python")" = "$(version_of "$PYTHON")" ]; }
}

is_installed() {
    local installed name
    [ -f "$STAMP" ] && [ "$(sed -n 1p "$STAMP")" = "$(stamp_key)" ] || return 1
    [ -z "${PYTHON:-}" ] || venv_is_usable || return 1
    "$VENV/bin/python" -c '' 2>/dev/null || return 1
    installed=$(sed -n 2p "$STAMP")
    for name in ${EXTRAS//,/ }; do
        case ",$installed," in *",$name,"*) ;; *) return 1 ;; esac
    done
}

make_venv() {
    local python output
    python=$(find_python)
    echo "install.sh: $VENV with $("$python" --version)"
    output=$("$python" -m venv --clear "$VENV" 2>&1) || fail "$python can't make a virtual environment:
$output
On Debian and Ubuntu the package python3-venv is missing; elsewhere install Python's venv and ensurepip modules."
}

install_all() {
    : >"$LOG"
    # DeepSpeed comes as source. It is built before torch and without an environment of its own, so that the
    # pinned setuptools builds it and it neither compiles nor looks for a GPU.
    step "build tools" pip_install setuptools wheel packaging ninja
    DS_BUILD_OPS=0 step "DeepSpeed" pip_install --no-build-isolation --no-deps deepspeed
    install_torch
    step "megnorm[$EXTRAS] and what it needs" pip_install --no-build-isolation -e "$ROOT[$EXTRAS]"
}

main() {
    if [ -n "${MEGNORM_VENV:-}" ]; then
        check_existing
        return
    fi
    is_installed && return
    if venv_is_usable; then
        [ -f "$STAMP" ] && EXTRAS=$(sed -n 2p "$STAMP"),$EXTRAS
    else
        make_venv
    fi
    rm -f "$STAMP"
    install_all
    printf '%s\n%s\n' "$(stamp_key)" "$EXTRAS" >"$STAMP"
    echo "install.sh: done. The command megnorm is there after: source .venv/bin/activate"
}

main
