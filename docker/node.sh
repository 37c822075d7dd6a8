#!/bin/sh
# A Ray node in a container: `node.sh head [OPTIONS OF ray start]`, `node.sh worker HOST:PORT [...]`.
# On SIGTERM the cluster's jobs are stopped first and get the time for their last checkpoint; only
# then does the node end. RAY_API_SERVER_ADDRESS names the job server of another head than ours.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
: "${PYTHON:=python3}" "${RAY_JOB_STOP_WAIT_TIME_S:=300}"
export RAY_JOB_STOP_WAIT_TIME_S

role=${1:?'head, or worker HOST:PORT'}
shift
case $role in
head)
    : "${RAY_API_SERVER_ADDRESS:=http://127.0.0.1:8265}"
    set -- --head --port 6379 --dashboard-host 0.0.0.0 --dashboard-port 8265 "$@"
    ;;
worker)
    gcs=${1:?'HOST:PORT of the head'}
    shift
    : "${RAY_API_SERVER_ADDRESS:=http://${gcs%:*}:8265}"
    until ray health-check --address "$gcs" >/dev/null 2>&1; do sleep 1; done
    set -- --address "$gcs" "$@"
    ;;
*)
    echo "error: $role: expected head, or worker HOST:PORT" >&2
    exit 2
    ;;
esac

ray start --block --disable-usage-stats --metrics-export-port 8080 "$@" &
node=$!
stop() {
    trap '' TERM INT
    "$PYTHON" "$here/stop_jobs.py" --address "$RAY_API_SERVER_ADDRESS" \
        --within-s "$((RAY_JOB_STOP_WAIT_TIME_S + 10))" || true
    kill -TERM "$node" 2>/dev/null || true
    wait "$node" || true
    exit 0
}
trap stop TERM INT
wait "$node"
