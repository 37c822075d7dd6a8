#!/bin/sh
# Installs what the BFCL environment needs, into the environment of $PYTHON (default: python).
set -eu

python="${PYTHON:-python}"
here="$(cd "$(dirname "$0")" && pwd)"

"$python" -m pip install --no-deps -r "$here/lock/bfcl.txt"

# The import that the environment makes; never bfcl_eval.utils, which creates folders beside the
# installed package.
"$python" - <<'PYTHON'
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code import math_api

print("bfcl-eval is ready:", multi_turn_checker.multi_turn_checker.__name__, math_api.MathAPI.__name__)
PYTHON
