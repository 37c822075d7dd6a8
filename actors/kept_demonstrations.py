"""The file that a run learns stored episodes from: the same one whenever the run goes on.

The manifest holds its checksum, never a path. A relative path of the recipe belongs to the folder
in which the run was started, so the run notes where the file lies as seen from itself: a resume
from another folder finds it, and both can be moved together.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Final

from miniverl_dist.backends.weights_io import read_json, write_json
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import ConfigError, ResumeError
from miniverl_dist.observability.run_dir import MANIFEST

DEMONSTRATIONS: Final = "demonstrations"
"""What the manifest says of the file: ``name`` and ``sha256``."""
PLACE_FILE: Final = "demonstrations.json"
_FIELD: Final = "demonstrations.trajectories"


def keep_demonstrations(config: RunConfig, run_dir: Path) -> dict[str, Any] | None:
    """What the manifest is to say of the file; None where nothing stored is learned.

    Raises:
        ConfigError: a new run, whose file cannot be read.
        ResumeError: see `kept_file`.
    """
    if config.demonstrations is None or config.demonstrations.trajectories is None:
        return None
    written = config.demonstrations.trajectories
    if (noted := _noted(run_dir)) is not None:
        kept_file(written, run_dir)
        return noted
    sha256, problem = _looked_at(written)
    if sha256 is None:
        raise ConfigError(f"{_FIELD}: {problem}")
    if place := _seen_from(run_dir, written):
        write_json(run_dir / PLACE_FILE, {"place": place})
    return {"name": written.name, "sha256": sha256}


def kept_file(written: Path, run_dir: Path) -> Path:
    """Where the file lies that the run was started with.

    Args:
        written: As in the recipe.
        run_dir: Of the run; one of an earlier version has no note, and takes what is there.

    Raises:
        ResumeError: it has changed, or has gone.
    """
    noted = _noted(run_dir)
    if noted is None:
        return written
    places = [written]
    if (run_dir / PLACE_FILE).is_file():
        places.append(run_dir.resolve() / str(read_json(run_dir / PLACE_FILE)["place"]))
    expected, problems = str(noted.get("sha256")), []
    for place in places:
        found, problem = _looked_at(place)
        if found == expected:
            return place
        problems.append(problem)
    raise ResumeError(
        f"{_FIELD}: {'; '.join(dict.fromkeys(problems))}; expected SHA-256 {expected[:12]}, what "
        "the run was started with: restore the file, or start a new run"
    )


def _noted(run_dir: Path) -> dict[str, Any] | None:
    noted = read_json(run_dir / MANIFEST).get(DEMONSTRATIONS)
    return noted if isinstance(noted, dict) else None


def _looked_at(path: Path) -> tuple[str | None, str]:
    """SHA-256 (hex) of a file, None without one; and in words what is there."""
    whole = os.path.normpath(path.absolute())
    try:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return None, f"cannot read {whole}: {error.strerror or error}"
    return found, f"found {whole} with SHA-256 {found[:12]}"


def _seen_from(run_dir: Path, written: Path) -> str | None:
    """The way from the run to the file, unless it would tell every folder above them."""
    run, file = run_dir.resolve(), written.parent.resolve() / written.name
    if written.is_absolute() or os.path.commonpath([run, file]) == run.anchor:
        return None
    return os.path.relpath(file, run)
