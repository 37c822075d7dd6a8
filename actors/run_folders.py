"""Where commands put what nobody gave a folder for: below ``runs``, under the config's name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Final

from miniverl_dist.errors import ConfigError
from miniverl_dist.observability.step_names import step_name

RUNS: Final = Path("runs")


def free_folder(name: str, *, goes_on: Callable[[Path], bool] | None = None) -> Path:
    """``runs/<name>``, or the first ``runs/<name>-<n>``, that does not exist yet.

    Args:
        name: Of the run.
        goes_on: Tells of a folder that exists whether it may be taken nevertheless.
    """
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    folders = (RUNS / each for each in names)
    return next(
        folder for folder in folders if not folder.exists() or (goes_on and goes_on(folder))
    )


def find_checkpoint(source: Path, given: Path) -> Path:
    """A checkpoint by its name or step within a run, by its path, or the newest of another run.

    Args:
        source: The run, or a recipe, which has none.
        given: As on a command line; a bare name is looked for within the run first.

    Raises:
        ConfigError: there is none.
    """
    from miniverl_dist.observability.run_dir import CHECKPOINT_MARKER, CHECKPOINTS
    from miniverl_dist.training.checkpoint import list_checkpoints, newest_checkpoint

    name = step_name(int(given.name)) if given.name.isdecimal() else given.name
    is_bare = given.name == str(given)
    if is_bare and (within := source / CHECKPOINTS / name).is_dir():
        return within
    if (given / CHECKPOINT_MARKER).is_file():
        return given
    if (newest := newest_checkpoint(given / CHECKPOINTS)) is not None:
        return newest
    kept = ", ".join(path.name for path in list_checkpoints(source / CHECKPOINTS))
    found = f"{source} has {kept}" if kept else "name the path of one, RUN/checkpoints/STEP"
    raise ConfigError(f"--checkpoint {given}: there is no such checkpoint; {found}")
