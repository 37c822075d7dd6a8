"""`miniverl-dist cache`: look at a run's stored teacher targets, check them, make them fewer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miniverl_dist.errors import ConfigError, MiniverlError

if TYPE_CHECKING:
    from miniverl_dist.lab.teacher_cache import CacheStats, TeacherCache

EXIT_DAMAGED = 2
_MAX_READINGS = 3

cache = typer.Typer(help="Stored teacher targets of a run.", no_args_is_help=True)

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@cache.command()
def stats(run: RunFolder, as_json: AsJson = False) -> None:
    """Say what is stored, for which teacher, and how large it is."""
    found = _open(run).stats()
    typer.echo(json.dumps(found.model_dump(mode="json")) if as_json else _shown(found))


@cache.command()
def validate(run: RunFolder, as_json: AsJson = False) -> None:
    """Read every byte; exit code 2 and one line per damaged entry where something is wrong."""
    problems, num_entries = _problems(run)
    if as_json:
        typer.echo(json.dumps({"num_entries": num_entries, "problems": problems}))
    elif problems:
        for problem in problems:
            typer.secho(f"error: {problem}", err=True, fg=typer.colors.RED)
    else:
        typer.echo(f"ok: {run}: {num_entries} entries with right checksums")
    if problems:
        raise SystemExit(EXIT_DAMAGED)


@cache.command()
def prune(
    run: RunFolder,
    keep_versions: Annotated[
        int | None, typer.Option(min=1, help="Keep so many newest policy versions.")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=0, help="Remove the oldest until no more is left.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove old entries; refused while the run is going on."""
    if keep_versions is None and max_bytes is None:
        raise ConfigError("cache prune: give --keep-versions or --max-bytes, found neither")
    from miniverl_dist.observability.run_dir import RunDirectory

    with RunDirectory.open(run, writable=True):
        pruned = _open(run).prune(keep_versions=keep_versions, max_bytes=max_bytes)
    if as_json:
        typer.echo(json.dumps(pruned.model_dump(mode="json")))
        return
    versions = ", ".join(map(str, pruned.versions)) or "none"
    typer.echo(
        f"removed {pruned.num_entries} entries, {pruned.num_bytes} bytes; policy versions of which "
        f"nothing is left: {versions}"
    )


def _open(run: Path) -> TeacherCache:
    from miniverl_dist.lab.teacher_cache import TEACHER_CACHE, TeacherCache
    from miniverl_dist.observability.run_dir import RunDirectory

    return TeacherCache.read(RunDirectory.open(run).path / TEACHER_CACHE)


def _problems(run: Path) -> tuple[list[str], int]:
    """What is wrong, and the number of entries.

    A run that is going on may prune a shard while it is read: then the index is another one
    afterwards, and everything is read again.
    """
    for _ in range(_MAX_READINGS):
        try:
            opened = _open(run)
        except ConfigError:
            raise
        except MiniverlError as error:
            return [str(error)], 0
        problems = opened.validate()
        if not problems or opened.is_current():
            break
    return problems, len(opened)


def _shown(found: CacheStats) -> str:
    made, versions = found.identity, found.entries_by_version.items()
    lines = (
        ("Teacher", f"{made.teacher}, weights {made.teacher_checksum[:12]}"),
        ("Asked", f"mode {made.mode}, rendering {made.rendering}, selection {made.selection}"),
        ("Rows", f"top_k {made.top_k}, temperature {made.temperature:g}"),
        (
            "Tokenizers",
            f"student {made.student_fingerprint[:12]}, teacher {made.teacher_fingerprint[:12]}",
        ),
        (
            "Entries",
            f"{found.num_entries}, {found.num_rows} rows of {found.num_candidates} candidates "
            f"({found.queried_position_ratio:.1%})",
        ),
        ("Versions", ", ".join(f"{v}: {n} entries" for v, n in versions) or "none"),
        (
            "Shards",
            f"{found.num_shards}, {found.num_bytes} bytes, {found.num_replaced_bytes} of them of "
            "replaced entries",
        ),
    )
    return "\n".join(f"{label:<15}{text}" for label, text in lines)
