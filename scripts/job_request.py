"""What `scripts/submit.sh` sends to a cluster: the checkout's files, metadata, environment.

The files are copied to a folder of their own first: what is measured against the limit is then
exactly what is uploaded, whatever ignore files say.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Final

from miniverl_dist import __version__
from miniverl_dist.config.load import load_config
from miniverl_dist.errors import ConfigError, MiniverlError
from miniverl_dist.observability.environment import git_commit

ROOT: Final = Path(__file__).resolve().parents[1]
LEFT_OUT: Final = (
    *(".*", "__pycache__", "*.pyc", "*.egg-info", "venv", "dist", "build"),
    *("runs", "secrets"),
)
"""Names (of folders and files, at any depth) that no job needs or may have: hidden ones, caches,
results, tokens."""
_MIB: Final = 1024 * 1024
_NUM_LARGEST_SHOWN: Final = 3
_ANSWER_WITHIN_S: Final = 10


@dataclass(frozen=True)
class JobRequest:
    """One job. ``config`` (relative to the checkout) is trained, or ``run_dir`` resumed."""

    submission_id: str
    run_dir: PurePosixPath
    config: PurePosixPath | None
    metadata: Mapping[str, str]
    env_vars: Mapping[str, str]

    def write(self, folder: Path) -> None:
        """One file per value, for a shell to read."""
        (folder / "submission_id").write_text(self.submission_id)
        (folder / "run_dir").write_text(str(self.run_dir))
        (folder / "config").write_text(str(self.config or ""))
        (folder / "metadata.json").write_text(json.dumps(self.metadata))
        (folder / "runtime_env.json").write_text(json.dumps({"env_vars": dict(self.env_vars)}))


def checkout_files(root: Path) -> Iterator[Path]:
    """Files that a job gets, relative to ``root``; links to folders are not followed."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not _is_left_out(name))
        for name in sorted(names):
            path = Path(folder, name)
            if not _is_left_out(name) and path.is_file():
                yield path.relative_to(root)


def _is_left_out(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in LEFT_OUT)


def stage(root: Path, target: Path, *, max_bytes: int) -> int:
    """Copy a checkout's files to a new folder and return their size in bytes.

    Raises:
        ConfigError: they are larger than ``max_bytes`` together; nothing has been copied then.
    """
    sizes = {path: (root / path).stat().st_size for path in checkout_files(root)}
    total = sum(sizes.values())
    if total > max_bytes:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:_NUM_LARGEST_SHOWN]
        shown = ", ".join(f"{path} ({sizes[path] / _MIB:.1f} MiB)" for path in largest)
        raise ConfigError(
            f"the checkout holds {total / _MIB:.1f} MiB to upload with the job, at most "
            f"{max_bytes / _MIB:.0f} are expected; the largest files: {shown}. Move data to "
            "storage that the nodes share, or raise --max-mib"
        )
    for path in sizes:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, target / path)
    return total


def train_request(
    config: Path,
    train_arguments: Sequence[str],
    *,
    run_dir: str | None,
    runs: str | None,
    submission_id: str | None,
    env_vars: Mapping[str, str],
) -> JobRequest:
    """A job that starts a run; the recipe is checked here, before anything is sent.

    Args:
        config: Recipe inside the checkout.
        train_arguments: What else `train` gets; its overrides belong to the recipe.
        run_dir: Where the run goes on the cluster, an absolute path.
        runs: Folder for runs on the cluster, used (with the submission id) without ``run_dir``.
        submission_id: Ray's name for the job; None makes one of the recipe's name and the time.
        env_vars: Environment variables of the job.

    Raises:
        ConfigError: the recipe is wrong or not inside the checkout, or the run has no folder.
    """
    try:
        inside = config.resolve().relative_to(ROOT)
    except ValueError:
        raise ConfigError(
            f"{config} is not in the checkout, which is all that a job gets: copy it to configs/"
        ) from None
    loaded = load_config(config, _overrides(train_arguments))
    name = loaded.config.name
    identity = submission_id or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder = _shared_folder(run_dir or (f"{runs}/{identity}" if runs else None))
    metadata = {
        "name": name,
        "config": inside.as_posix(),
        "config_digest": loaded.digest,
        "objective": loaded.config.objective,
        **_common_metadata(folder),
    }
    return JobRequest(identity, folder, PurePosixPath(inside.as_posix()), metadata, env_vars)


def resume_request(
    run_dir: str, *, submission_id: str | None, env_vars: Mapping[str, str]
) -> JobRequest:
    """A job that continues the run in ``run_dir``, which only the cluster has to see."""
    folder = _shared_folder(run_dir)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    identity = submission_id or f"{folder.name}-resumed-{stamp}-{secrets.token_hex(2)}"
    metadata = {"name": folder.name, "resumes": "true", **_common_metadata(folder)}
    return JobRequest(identity, folder, None, metadata, env_vars)


def _common_metadata(folder: PurePosixPath) -> dict[str, str]:
    commit = git_commit(ROOT)
    found = {"version": __version__, "run_dir": str(folder)}
    return found | ({"git_commit": commit} if commit else {})


def _shared_folder(text: str | None) -> PurePosixPath:
    if text is None:
        raise ConfigError(
            "no run directory: a job's working directory is removed with the job, so name one on "
            "storage that all nodes share with --run-dir, or its parent with MINIVERL_RUNS"
        )
    folder = PurePosixPath(text)
    if not folder.is_absolute():
        raise ConfigError(
            f"run directory {text!r} is relative to a folder that is removed with the job: give "
            "an absolute path on storage that all nodes share"
        )
    return folder


def _overrides(arguments: Sequence[str]) -> list[str]:
    """Values of ``-o`` and ``--override`` among the arguments of `train`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-o", "--override", action="append", default=[])
    found: list[str] = parser.parse_known_args(arguments)[0].override
    return found


def _env_vars(lines: Sequence[str], stop_wait_s: int) -> dict[str, str]:
    """The job's variables. Ray's job supervisor reads the first one from the job's own environment.

    Source:
        ``RAY_JOB_STOP_WAIT_TIME_S`` of Ray: seconds between SIGTERM and SIGKILL, 3 by default.
    """
    found = {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_s)}
    for line in lines:
        name, equals, value = line.partition("=")
        if not equals or not name:
            raise ConfigError(f"--env {line}: expected NAME=VALUE")
        found[name] = value
    return found


def require_job_server(address: str) -> None:
    """Fail early and in one line; Ray would answer with a traceback.

    Raises:
        ConfigError: nothing answers at a URL. Addresses of other kinds are Ray's to resolve.
    """
    if not address.startswith(("http://", "https://")):
        return
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/api/version", timeout=_ANSWER_WITHIN_S):
            pass
    except urllib.error.HTTPError:
        return  # it answers; whether it lets us in is settled when the job is submitted
    except OSError as error:
        raise ConfigError(
            f"no job server answers at {address}: {error}. Expected the URL of a cluster's "
            "dashboard, port 8265 unless it was changed"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", type=Path, required=True, help="folder for what is sent")
    parser.add_argument("--stop-wait", type=int, required=True, help="seconds")
    parser.add_argument("--max-mib", type=int, required=True)
    for name in ("--config", "--resume", "--run-dir", "--runs", "--submission-id", "--address"):
        parser.add_argument(name, type=lambda text: text or None, help="empty: not given")
    parser.add_argument("train_arguments", nargs="*")
    return parser


def main() -> None:
    """Write the request and the files to upload below ``--work``, which holds ``env`` already."""
    given = _parser().parse_args()
    try:
        env_vars = _env_vars((given.work / "env").read_text().splitlines(), given.stop_wait)
        if given.resume:
            request = resume_request(
                given.resume, submission_id=given.submission_id, env_vars=env_vars
            )
        else:
            request = train_request(
                Path(given.config),
                given.train_arguments,
                run_dir=given.run_dir,
                runs=given.runs,
                submission_id=given.submission_id,
                env_vars=env_vars,
            )
        if given.address:
            require_job_server(given.address)
        size = stage(ROOT, given.work / "source", max_bytes=given.max_mib * _MIB)
        request.write(given.work)
    except MiniverlError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"upload: {size / _MIB:.1f} MiB")


if __name__ == "__main__":
    main()
