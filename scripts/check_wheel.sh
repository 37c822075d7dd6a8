#!/bin/sh
# Build the wheel, install it without extras into a fresh environment, and use it from elsewhere:
# the base install must work without torch, Ray or any tokenizer package.
set -eu
: "${PYTHON:=python3}" "${VENV:=.venv}"
here=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$here/$VENV/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$work/dist" "$here"
"$PYTHON" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --constraint "$here/scripts/lock/constraints.txt" "$work"/dist/*.whl
cp -r "$here/configs" "$work/configs"
cd "$work"
"$work/venv/bin/miniverl-dist" validate configs/*.yaml
"$work/venv/bin/python" - <<'PY'
import importlib.util, sys
present = [n for n in ("torch", "ray", "transformers", "tokenizers", "bfcl_eval") if importlib.util.find_spec(n)]
sys.exit(f"error: the base install brought {present}" if present else 0)
PY
mkdir -p "$here/dist" && cp "$work"/dist/*.whl "$here/dist/"
echo "wheel is good: $(ls "$work"/dist)"
