#!/bin/sh
# Set up the virtual environment: pinned torch first, then the locked packages, then this checkout.
set -eu
: "${PYTHON:=python3}" "${VENV:=.venv}"
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
cd "$here/.."

"$PYTHON" - <<'PY' || exit 1
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 12):
    sys.exit(f"error: Python 3.11 or 3.12 is needed, found {sys.version.split()[0]} ({sys.executable}); "
             "choose one with: make setup PYTHON=python3.11")
PY

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
python="$VENV/bin/python"
PYTHON="$python" sh scripts/install_torch.sh
"$python" -m pip install --quiet --constraint scripts/lock/constraints.txt --editable '.[local,ray,dev]'
PYTHON="$python" sh scripts/install_bfcl.sh
PYTHON="$python" sh scripts/install_megatron.sh
echo "ready: $VENV ($("$python" -c 'import torch; print("torch", torch.__version__)'))"
