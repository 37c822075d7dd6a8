#!/bin/sh
# Installs the trackers into an environment that sees $VENV's packages and keeps its own beside them:
# what they depend on cannot change what everything else is tested with.
set -eu

: "${VENV:=.venv}" "${TRACKING_VENV:=.venv-tracking}"
here="$(cd "$(dirname "$0")" && pwd)"
stamp="$TRACKING_VENV/.installed"

if [ -f "$stamp" ] && cmp -s "$here/lock/tracking.txt" "$stamp"; then
    echo "tracking: $TRACKING_VENV is up to date"
    exit 0
fi

[ -x "$TRACKING_VENV/bin/python" ] || "$VENV/bin/python" -m venv "$TRACKING_VENV"
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
packages "$VENV" >"$(packages "$TRACKING_VENV")/of_the_project.pth"
"$TRACKING_VENV/bin/python" -m pip install --quiet -r "$here/lock/tracking.txt"
cp "$here/lock/tracking.txt" "$stamp"
