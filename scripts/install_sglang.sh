#!/bin/sh
# Installs SGLang for the CPU into an environment of its own: its pins differ from ours (transformers
# among them). SGLANG_VENV names the folder; TORCH_INDEX the package index of another torch build.
set -eu

: "${PYTHON:=python3.11}" "${SGLANG_VENV:=.venv-sglang}" "${TORCH:=torch==2.13.0}" "${TORCH_INDEX:=}"
here="$(cd "$(dirname "$0")" && pwd)"
stamp="$SGLANG_VENV/.installed"

if [ "$(uname -s)" != "Linux" ]; then
    echo "sglang: skipped, its CPU engine needs Linux (found $(uname -s))"
    exit 0
fi
if [ -f "$stamp" ] && cmp -s "$here/lock/sglang.txt" "$stamp"; then
    echo "sglang: $SGLANG_VENV is up to date"
    exit 0
fi

[ -x "$SGLANG_VENV/bin/python" ] || "$PYTHON" -m venv "$SGLANG_VENV"
python="$SGLANG_VENV/bin/python"
# torch first, and with what it depends on: the lock file then sets those versions right.
PYTHON="$python" TORCH="$TORCH" TORCH_INDEX="$TORCH_INDEX" sh "$here/install_torch.sh"
"$python" -m pip install --quiet --no-deps -r "$here/lock/sglang.txt"
"$python" - <<'PYTHON'
from importlib.metadata import version

import torch

print("sglang is ready:", version("sglang"), "beside torch", torch.__version__)
PYTHON
cp "$here/lock/sglang.txt" "$stamp"
