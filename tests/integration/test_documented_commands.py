"""Every command in docs/quickstart.md is run, on a run that is small enough; docs/ can be built."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.cli import app

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "docs" / "quickstart.md"
OVERRIDES = (
    'tasks.train=["calculator_easy_000", "calculator_easy_001"]',
    'tasks.eval=["calculator_easy_000"]',
    "student.warmup.num_steps=2",
    "student.warmup.traces_per_task=2",
    "teacher.fit.num_steps=2",
    "teacher.fit.traces_per_task=2",
    "rollout.max_new_tokens=12",
    "loop.num_steps=1",
    "loop.num_groups=2",
    "loop.group_size=2",
    "loop.num_minibatches=1",
    "evaluation.episodes_per_task=1",
)
"""The recipe's shape, and next to nothing to do."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(document: Path) -> list[list[str]]:
    """Words of each command in the shell blocks of a document."""
    blocks = [text for kind, text in FENCE.findall(document.read_text()) if kind in ("", "sh")]
    found, begun = [], ""
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        begun += line
        try:
            words = shlex.split(begun, comments=True)
        except ValueError:  # a quotation goes on in the next line
            begun += "\n"
            continue
        begun = ""
        if words:
            found.append(words)
    assert not begun, f"{document.name}: a quotation without an end: {begun[:80]}"
    return found


def test_quickstart_is_made_of_commands_that_we_know() -> None:
    found = commands(QUICKSTART)
    assert len(found) >= 12
    assert {words[0] for words in found} == {"make", "miniverl-dist"}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {words[1] for words in found if words[0] == "make"} <= set(targets)


def test_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, as a reader would, from a folder in which nothing has run yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    runner = CliRunner()
    for words in commands(QUICKSTART):
        if words[0] != "miniverl-dist":
            continue
        if words[1] == "train":
            words += [word for override in OVERRIDES for word in ("-o", override)]
        result = runner.invoke(app, words[1:])
        allowed = (0, 1) if words[1] == "doctor" else (0,)  # 1: this machine lacks something
        assert result.exit_code in allowed, (words, result.output)
    for name in ("first", "second"):
        manifest = json.loads((tmp_path / "runs" / name / "manifest.json").read_text())
        assert manifest["status"] == "finished"
    rows = json.loads((tmp_path / "runs" / "first" / "eval.json").read_text())["rows"]
    assert {row["policy"] for row in rows} >= {"student", "oracle", "null"}
    assert {row["pass_rate"] for row in rows if row["policy"] == "oracle"} == {1.0}


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_commands_of_other_pages_have_names_and_options_that_exist(document: Path) -> None:
    """The long ones are not run, but what they ask for is known to the command line."""
    for words in commands(document):
        if Path(words[0]).name != "miniverl-dist":
            continue
        names = [word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word)]
        depth = 2 if names[0] in ("serve", "cache") else 1
        result = CliRunner().invoke(app, [*names[:depth], "--help"], terminal_width=200)
        assert result.exit_code == 0, words
        options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        unknown = {option for option in options if option not in result.output}
        assert unknown == set(), (words, unknown)


@pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed"
)
def test_the_site_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    config = ROOT / "docs" / "site" / "mkdocs.yml"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", config, "-d", tmp_path],
        check=True,
    )
    pages = list(tmp_path.glob("*.html"))
    assert {"concepts.html", "quickstart.html", "configuration.html"} <= {p.name for p in pages}
    loaded = re.compile(r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="(https?://[^"]*)"')
    for page in pages:
        assert loaded.findall(page.read_text()) == [], page.name
