"""The file of stored episodes: remembered at the start, found and compared at a resume."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from actors.kept_demonstrations import PLACE_FILE, keep_demonstrations, kept_file
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import ConfigError, ResumeError
from tests.fakes import run_config

WRITTEN = Path("data/stored.jsonl")
TEXT = b'{"one": 1}\n'
SHA256 = hashlib.sha256(TEXT).hexdigest()


def recipe(path: Path | None = WRITTEN) -> RunConfig:
    told = None if path is None else str(path)
    return run_config(objective="sft", demonstrations={"trajectories": told})


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the file, and a run that is started in it."""
    (tmp_path / "project/data").mkdir(parents=True)
    (tmp_path / "project" / WRITTEN).write_bytes(TEXT)
    (tmp_path / "project/runs/a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    note(Path("runs/a"), None)
    return tmp_path / "project"


def note(run: Path, told: dict[str, Any] | None) -> None:
    (run / "manifest.json").write_text(json.dumps({"demonstrations": told}))


def start(run: Path) -> None:
    note(run, keep_demonstrations(recipe(), run))


def test_the_note_is_a_checksum_and_no_path(project: Path) -> None:
    told = keep_demonstrations(recipe(), Path("runs/a"))
    assert told == {"name": "stored.jsonl", "sha256": SHA256}
    note(Path("runs/a"), told)
    assert keep_demonstrations(recipe(), Path("runs/a")) == told  # a resume says the same
    assert json.loads(Path("runs/a", PLACE_FILE).read_text()) == {"place": f"../../{WRITTEN}"}


def test_nothing_is_kept_of_scripted_episodes(project: Path) -> None:
    assert keep_demonstrations(recipe(None), Path("runs/a")) is None
    assert keep_demonstrations(run_config(), Path("runs/a")) is None


def test_a_resume_from_another_folder_finds_the_same_file(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(Path("runs/a"))
    assert kept_file(WRITTEN, Path("runs/a")) == WRITTEN
    monkeypatch.chdir(project.parent / "elsewhere")
    assert kept_file(WRITTEN, project / "runs/a").resolve() == project / WRITTEN
    # One of the same name that lies here is not it.
    WRITTEN.parent.mkdir()
    WRITTEN.write_text("other episodes\n")
    assert kept_file(WRITTEN, project / "runs/a").resolve() == project / WRITTEN
    project.rename(project.parent / "moved")
    moved = project.parent / "moved"
    assert kept_file(WRITTEN, moved / "runs/a").resolve() == moved / WRITTEN


def test_another_text_is_refused_with_both_checksums_and_the_whole_path(project: Path) -> None:
    start(Path("runs/a"))
    WRITTEN.write_bytes(TEXT + TEXT)
    found = hashlib.sha256(TEXT + TEXT).hexdigest()[:12]
    told = (
        f"found {project / WRITTEN} with SHA-256 {found}; expected SHA-256 {SHA256[:12]}, what "
        "the run was started with: restore the file, or start a new run"
    )
    for ask in (
        lambda: kept_file(WRITTEN, Path("runs/a")),
        lambda: keep_demonstrations(recipe(), Path("runs/a")),
    ):
        with pytest.raises(ResumeError) as caught:
            ask()
        assert str(caught.value) == f"demonstrations.trajectories: {told}"


def test_a_file_that_has_gone_is_missed_where_it_was_and_where_it_is_written(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(Path("runs/a"))
    WRITTEN.unlink()
    elsewhere = project.parent / "elsewhere"
    monkeypatch.chdir(elsewhere)
    with pytest.raises(ResumeError) as caught:
        kept_file(WRITTEN, project / "runs/a")
    for place in (elsewhere / WRITTEN, project / WRITTEN):
        assert f"cannot read {place}: No such file" in str(caught.value)


def test_a_new_run_without_its_file_is_no_resume(project: Path) -> None:
    WRITTEN.unlink()
    with pytest.raises(ConfigError, match=f"cannot read {project / WRITTEN}: No such file"):
        keep_demonstrations(recipe(), Path("runs/a"))


def test_a_run_of_an_earlier_version_takes_what_is_there(project: Path) -> None:
    Path("runs/a/manifest.json").write_text("{}")
    assert kept_file(WRITTEN, Path("runs/a")) == WRITTEN
    told = keep_demonstrations(recipe(), Path("runs/a"))
    assert told == {"name": "stored.jsonl", "sha256": SHA256}  # and knows it from now on


def test_an_edited_note_is_no_excuse(project: Path) -> None:
    note(Path("runs/a"), {"name": "stored.jsonl"})
    with pytest.raises(ResumeError, match="expected SHA-256 None"):
        kept_file(WRITTEN, Path("runs/a"))


def test_no_place_is_noted_that_would_be_a_whole_path(project: Path) -> None:
    whole = project / WRITTEN
    note(Path("runs/a"), keep_demonstrations(recipe(whole), Path("runs/a")))
    assert not Path("runs/a", PLACE_FILE).exists()  # its author has written it
    assert kept_file(whole, Path("runs/a")) == whole
    # With nothing but the root above both, the way between them names every folder.
    far = Path(os.path.relpath("/dev/null"))
    note(Path("runs/a"), None)
    assert keep_demonstrations(recipe(far), Path("runs/a")) is not None
    assert not Path("runs/a", PLACE_FILE).exists()
