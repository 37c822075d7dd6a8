#!/bin/sh
# Submit a run to a Ray cluster as a job. The checkout is uploaded: the nodes need its
# requirements, not the checkout itself.
set -eu

usage() {
    cat <<'TEXT'
usage: scripts/submit.sh CONFIG [options] [-- ARGUMENTS OF train]
       scripts/submit.sh CONFIG|RUN --eval [options] -- ARGUMENTS OF eval
       scripts/submit.sh --resume RUN [options]

  --address URL        the cluster's job server, for instance http://127.0.0.1:8265
                       (default: $RAY_API_SERVER_ADDRESS, then $RAY_ADDRESS)
  --run-dir DIR        run directory, on storage that all nodes share
                       (default: $MINIVERL_RUNS/SUBMISSION-ID)
  --eval               evaluate instead of training; after --, for instance --policy teacher.
                       RUN, an absolute path on the nodes, is measured where it lies
  --resume RUN         continue the run in this directory instead of starting one
  --submission-id ID   the job's name (default: the recipe's name and the time)
  --python PROGRAM     Python on the nodes (default: python)
  --env NAME=VALUE     environment variable of the job; may be repeated
  --stop-wait SECONDS  time for a last checkpoint after `ray job stop` (default: 300)
  --entrypoint-num-cpus N, --entrypoint-resources JSON
                       what the driver reserves, and so where it runs (default: the head node)
  --max-mib N          largest upload (default: 64)
  --no-wait            return when the job is submitted instead of following its log
  --dry-run            check everything and show the request, submit nothing

RAY_AUTH_MODE is used as it is set. Unset, it becomes `token` where a token is found
(RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token), else `disabled` for a cluster on this
machine; any other cluster then needs one of the two to be chosen.
PYTHON names the Python that has this project and Ray here (default: .venv/bin/python, python3).
TEXT
}

fail() {
    echo "error: $*" >&2
    exit 2
}

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
address=${RAY_API_SERVER_ADDRESS:-${RAY_ADDRESS:-}}
config='' run_dir='' resume='' submission_id='' node_python=python stop_wait=300 max_mib=64
num_cpus='' resources='' no_wait='' dry_run='' is_eval=''
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
: >"$work/env"

while [ $# -gt 0 ]; do
    case $1 in
    --address | --run-dir | --resume | --submission-id | --python | --env | --stop-wait | --max-mib | \
        --entrypoint-num-cpus | --entrypoint-resources)
        [ $# -ge 2 ] || fail "$1 needs a value (see --help)"
        case $1 in
        --address) address=$2 ;;
        --run-dir) run_dir=$2 ;;
        --resume) resume=$2 ;;
        --submission-id) submission_id=$2 ;;
        --python) node_python=$2 ;;
        --env) printf '%s\n' "$2" >>"$work/env" ;;
        --stop-wait) stop_wait=$2 ;;
        --max-mib) max_mib=$2 ;;
        --entrypoint-num-cpus) num_cpus=$2 ;;
        --entrypoint-resources) resources=$2 ;;
        esac
        shift 2
        ;;
    --eval) is_eval=yes && shift ;;
    --no-wait) no_wait=yes && shift ;;
    --dry-run) dry_run=yes && shift ;;
    -h | --help) usage && exit 0 ;;
    --) shift && break ;;
    -*) fail "unknown option $1 (see --help; arguments of train come after --)" ;;
    *)
        [ -z "$config" ] || fail "one CONFIG is expected, found $config and $1"
        config=$1
        shift
        ;;
    esac
done

[ -n "$config$resume" ] || fail "no CONFIG (see --help)"
[ -z "$config" ] || [ -z "$resume" ] || fail "--resume keeps the run's own config: leave $config out"
[ -z "$resume" ] || [ -z "$is_eval" ] || fail "--resume continues a training run: leave --eval out"
[ -z "$resume" ] || [ $# -eq 0 ] || fail "--resume takes no arguments of train: $*"
if [ -n "$is_eval" ]; then
    case " $* " in
    *' --policy'* | *' --deploy'*) ;;
    *) fail "--eval needs a policy: add for instance -- --policy student" ;;
    esac
    # Recipes lie in the checkout, runs on storage that this machine may not even see.
    case $config in
    /*) [ -f "$config" ] || { resume=$config && config=''; } ;;
    esac
fi
case $stop_wait in '' | *[!0-9]*) fail "--stop-wait $stop_wait: expected whole seconds" ;; esac
case $max_mib in '' | *[!0-9]*) fail "--max-mib $max_mib: expected a whole number" ;; esac
# Ray would start a cluster of its own where it finds none.
[ -n "$address" ] || fail "no cluster: give --address URL, or set RAY_ADDRESS"

if [ -z "${RAY_AUTH_MODE:-}" ]; then
    if [ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ] || [ -f "${HOME:-}/.ray/auth_token" ]; then
        RAY_AUTH_MODE=token
    else
        case $address in
        auto | 127.* | localhost* | http://127.* | http://localhost* | 'http://[::1]'*)
            RAY_AUTH_MODE=disabled
            ;;
        *) fail "RAY_AUTH_MODE is not set and there is no token for $address: set RAY_AUTH_MODE=token \
with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, or RAY_AUTH_MODE=disabled if the cluster has none" ;;
        esac
    fi
fi
export RAY_AUTH_MODE

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x "$root/.venv/bin/python" ] || PYTHON=$root/.venv/bin/python
fi
asked=$address # whether a job server answers there
[ -z "$dry_run" ] || asked=''
request() {
    PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" "$root/scripts/job_request.py" \
        --work "$work" --config "$config" --resume "$resume" --run-dir "$run_dir" \
        --runs "${MINIVERL_RUNS:-}" --submission-id "$submission_id" --stop-wait "$stop_wait" \
        --max-mib "$max_mib" --address "$asked" -- "$@"
}
value() { cat "$work/$1"; }

request "$@"
submission_id=$(value submission_id)
run_dir=$(value run_dir)
echo "submission id: $submission_id"
echo "run directory: $run_dir"
if [ -n "$resume" ] && [ -n "$is_eval" ]; then
    set -- "$node_python" -m actors.launch eval "$run_dir" "$@"
elif [ -n "$resume" ]; then
    set -- "$node_python" -m actors.launch resume "$run_dir"
elif [ -n "$is_eval" ]; then
    # The same command on the same run directory plays only what is missing.
    set -- "$node_python" -m actors.launch eval "$(value config)" --output "$run_dir" "$@"
else
    set -- "$node_python" -m actors.launch train "$(value config)" --run-dir "$run_dir" "$@"
fi
set -- --address "$address" --submission-id "$submission_id" --working-dir "$work/source" \
    --metadata-json "$(value metadata.json)" --runtime-env-json "$(value runtime_env.json)" \
    ${num_cpus:+--entrypoint-num-cpus "$num_cpus"} \
    ${resources:+--entrypoint-resources "$resources"} ${no_wait:+--no-wait} -- "$@"
if [ -n "$dry_run" ]; then
    echo "RAY_AUTH_MODE: $RAY_AUTH_MODE"
    printf '%s\n' "$@"
    exit 0
fi
# Not exec: the copy of the checkout is removed when this ends.
"$PYTHON" -m ray.scripts.scripts job submit "$@"
