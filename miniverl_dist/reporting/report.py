"""Writes summary.md and report.html into a run directory, finished or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miniverl_dist.errors import ConfigError
from miniverl_dist.observability.run_dir import write_atomic
from miniverl_dist.reporting.page import html_page
from miniverl_dist.reporting.run_data import RunData, load_run_data
from miniverl_dist.reporting.summary import markdown_summary


@dataclass(frozen=True)
class WrittenReport:
    """Where a report was written, and what it says in short."""

    summary: Path
    page: Path
    text: str
    """Content of summary.md."""
    notes: tuple[str, ...]
    """What was missing or damaged."""


def write_report(run_dir: Path, compare: Sequence[Path] = ()) -> WrittenReport:
    """Write both files into ``run_dir``; runs in ``compare`` are overlaid, not written to.

    Raises:
        ConfigError: one of the folders is not a run directory, or is given twice.
        RecordError: a file could not be written.
    """
    folders = (run_dir, *compare)
    _require_different(folders)
    runs = [load_run_data(path) for path in folders]
    name_apart(runs, folders)
    text = markdown_summary(runs)
    summary, page = run_dir / "summary.md", run_dir / "report.html"
    write_atomic(summary, text.encode())
    write_atomic(page, html_page(runs).encode())
    return WrittenReport(summary, page, text, tuple(note for run in runs for note in run.notes))


def name_apart(runs: Sequence[RunData], folders: Sequence[Path]) -> None:
    """Give runs whose folders have one name the name of the folder above, too."""
    names = Counter(run.label for run in runs)
    for run, folder in zip(runs, folders, strict=True):
        if names[run.label] > 1:
            run.label = f"{folder.resolve().parent.name}/{run.label}"


def _require_different(folders: Sequence[Path]) -> None:
    given = Counter(folder.resolve() for folder in folders)
    for folder in folders:
        if given[folder.resolve()] > 1:
            raise ConfigError(
                f"{folder} is given twice: compared with itself, a run shows no difference; "
                "expected the folder of another run in --compare"
            )
