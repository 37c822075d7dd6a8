#!/bin/sh
# Installs megatron-core into the environment of $PYTHON (default: python). Needs torch there.
set -eu

python="${PYTHON:-python}"
here="$(cd "$(dirname "$0")" && pwd)"

# triton has wheels for nothing else.
if [ "$(uname -s) $(uname -m)" != "Linux x86_64" ]; then
    echo "megatron-core: skipped, it needs Linux on x86-64 (found $(uname -s) $(uname -m))"
    exit 0
fi

"$python" -m pip install --no-deps --ignore-requires-python -r "$here/lock/megatron.txt"
# A module of megatron imports triton. CUDA builds of torch pin one of their own: that one stays.
if ! "$python" -c 'import triton' 2>/dev/null; then
    "$python" -m pip install --no-deps triton==3.9.0
fi
"$python" - <<'PYTHON'
from importlib.metadata import version

import megatron.core

print("megatron-core is ready:", version("megatron-core"))
PYTHON
