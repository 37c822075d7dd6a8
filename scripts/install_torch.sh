#!/bin/sh
# Install the pinned torch before anything else can pull another one.
# A torch that is already there stays. TORCH_INDEX names the package index of another build.
set -eu
: "${PYTHON:=python}" "${TORCH:=torch==2.13.0}" "${TORCH_INDEX:=}"
if "$PYTHON" -c 'import torch' 2>/dev/null; then
    echo "torch: $("$PYTHON" -c 'import torch; print(torch.__version__)') is installed, left as it is"
    exit 0
fi
echo "torch: installing $TORCH${TORCH_INDEX:+ from the index you gave}"
if [ -n "$TORCH_INDEX" ]; then
    "$PYTHON" -m pip install --quiet --index-url "$TORCH_INDEX" "$TORCH"
else
    # Takes a local CPU wheel where pip is configured to find one. The default index serves a CUDA
    # build on Linux (gigabytes): set TORCH_INDEX to the index of CPU builds to avoid that.
    "$PYTHON" -m pip install --quiet "$TORCH"
fi
