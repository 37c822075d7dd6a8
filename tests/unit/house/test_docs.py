"""The tables in docs/ are true: every place resolves by import, every test exists."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DESIGN, DEFECTS = ROOT / "docs" / "design.md", ROOT / "docs" / "defects.md"
PACKAGES = ("miniverl_dist", "rollout_server", "teacher_server", "actors")
NUM_ANCESTOR_INVARIANTS, NUM_PEER_BUGS, NUM_TUTORIAL_DEFECTS = 18, 39, 20

_CODE = re.compile(r"`([^`]+)`")
_LATER = re.compile(r"later: .{10,}")


@dataclass(frozen=True)
class Row:
    """One row of a table: its line in the document, and its cells by column."""

    line: int
    cells: dict[str, str]

    def codes(self, column: str) -> list[str]:
        return _CODE.findall(self.cells.get(column, ""))


def rows(text: str) -> list[Row]:
    """Rows of all tables whose columns are named like ``test`` or ``place``."""
    found: list[Row] = []
    columns: list[str] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("|"):
            columns = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if columns is None:
            columns = [cell.lower() for cell in cells]
        elif set("".join(cells)) - set(":-") and {"test", "place"} & set(columns):
            # Cells that the line lacks are empty, which is a problem of its own.
            padded = cells + [""] * (len(columns) - len(cells))
            found.append(Row(number, dict(zip(columns, padded, strict=False))))
    return found


@cache
def names_of_tests(path: Path) -> frozenset[str]:
    """``test_x`` and ``TestClass::test_x`` of a file, read from its syntax tree."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            names |= {
                f"{node.name}::{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return frozenset(name for name in names if name.split("::")[-1].startswith("test_"))


def unknown_test(test_id: str) -> str | None:
    """Why a test id names no test; None where it does."""
    file, separator, name = test_id.partition("::")
    path = ROOT / file
    if not separator or not path.name.startswith("test_") or not path.is_file():
        return f"{test_id}: no such test file"
    return None if name in names_of_tests(path) else f"{test_id}: {file} has no such test"


def unknown_place(place: str) -> str | None:
    """Why ``module::Class.method`` does not resolve; None where it does."""
    module, separator, path = place.partition("::")
    if not separator or module.split(".")[0] not in PACKAGES:
        return f"{place}: expected module::symbol of one of {', '.join(PACKAGES)}"
    try:
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        return f"{place}: {error}"
    return None


def problems(text: str) -> list[str]:
    """Everything in a document's tables that is not true."""
    found = []
    for row in rows(text):
        where = f"line {row.line}"
        if "place" in row.cells:
            places = row.codes("place")
            found += [f"{where}: names no place"] if not places else []
            found += [f"{where}: {p}" for place in places if (p := unknown_place(place))]
        if "test" in row.cells and not _LATER.fullmatch(row.cells["test"]):
            ids = row.codes("test")
            found += [f"{where}: names no test and no reason"] if not ids else []
            found += [f"{where}: {p}" for test_id in ids if (p := unknown_test(test_id))]
    return found


def numbers(text: str) -> list[int]:
    """The column ``#`` of all tables in a text, sorted."""
    found = re.findall(r"^\| *(\d+) *\|", text, re.MULTILINE)
    return sorted(map(int, found))


@pytest.mark.parametrize("document", [DESIGN, DEFECTS], ids=lambda path: path.stem)
def test_every_row_is_true(document: Path) -> None:
    text = document.read_text()
    assert len(rows(text)) >= NUM_TUTORIAL_DEFECTS
    assert problems(text) == []


def test_all_invariants_of_the_ancestor_are_accounted_for() -> None:
    """Once each: in force with a place and a test, or named as not there yet."""
    text = DESIGN.read_text()
    assert numbers(text) == list(range(1, NUM_ANCESTOR_INVARIANTS + 1))
    assert all(row.codes("test") for row in rows(text))


def test_all_defects_of_the_tutorial_and_all_bugs_of_peers_are_accounted_for() -> None:
    text = DEFECTS.read_text()
    tutorial = [row for row in rows(text) if "#" not in row.cells]
    assert len(tutorial) == NUM_TUTORIAL_DEFECTS
    assert all(row.codes("test") for row in tutorial)
    assert numbers(text) == list(range(1, NUM_PEER_BUGS + 1))


GOOD_PLACE = "`miniverl_dist.training.buffer::GroupBuffer.take`"
GOOD_TEST = "`tests/unit/house/test_docs.py::test_every_row_is_true`"


def table(*cells: str, head: str = "| what | place | test |") -> str:
    return f"{head}\n|---|---|---|\n| {' | '.join(cells)} |\n"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (("x", "`miniverl_dist.nowhere::f`", GOOD_TEST), "No module named"),
        (("x", "`miniverl_dist.training.buffer::Nobody`", GOOD_TEST), "no attribute 'Nobody'"),
        (("x", "`miniverl_dist.training.buffer::GroupBuffer.give`", GOOD_TEST), "'give'"),
        (("x", "`miniverl_dist.training.buffer`", GOOD_TEST), "expected module::symbol"),
        (("x", "`os::system`", GOOD_TEST), "expected module::symbol"),
        (("x", "somewhere", GOOD_TEST), "names no place"),
        (("x", GOOD_PLACE, "`tests/unit/house/test_nothing.py::test_x`"), "no such test file"),
        (("x", GOOD_PLACE, "`tests/fakes.py::trajectory`"), "no such test file"),
        (("x", GOOD_PLACE, "`tests/unit/house/test_docs.py`"), "no such test file"),
        (("x", GOOD_PLACE, "`tests/unit/house/test_docs.py::test_made_up`"), "no such test"),
        (("x", GOOD_PLACE, "`tests/unit/house/test_docs.py::problems`"), "no such test"),
        (("x", GOOD_PLACE, f"{GOOD_TEST} `tests/unit/house/test_docs.py::test_b`"), "test_b"),
        (("x", GOOD_PLACE, "somewhere"), "names no test and no reason"),
        (("x", GOOD_PLACE, "later:"), "names no test and no reason"),
        (("x", GOOD_PLACE), "names no test and no reason"),
    ],
)
def test_a_made_up_row_fails(row: tuple[str, ...], problem: str) -> None:
    [found] = problems(f"# Title\n\nText.\n\n{table(*row)}\nMore text.\n")
    assert found.startswith("line 7: ")
    assert problem in found


def test_a_true_row_passes() -> None:
    assert problems(table("x", GOOD_PLACE, GOOD_TEST)) == []
    assert problems(table("x", f"{GOOD_PLACE} {GOOD_PLACE}", f"{GOOD_TEST} {GOOD_TEST}")) == []
    assert problems(table("x", GOOD_PLACE, "later: the cluster runtime")) == []
    assert problems(table("x", "no code", "no test", head="| a | b | c |")) == []
    in_a_class = (
        "`tests/unit/miniverl_dist/schemas/test_trajectory.py::TestMask"
        "::test_every_flipped_entry_is_found`"
    )
    assert problems(table("x", GOOD_PLACE, in_a_class)) == []


DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = (*PACKAGES, "benchmarks", "configs", "docs", "scripts", "tests")


def paths_in(text: str) -> set[str]:
    """Files and folders of this repository that a text names in code, ``{a,b}`` spelled out."""
    found = set()
    for code in re.findall(r"`([\w./{},-]+/[\w./{},-]*)`", text):
        if code.split("/")[0] in FOLDERS:
            parts = re.split(r"\{([^}]*)\}", code)
            choices = [p.split(",") if i % 2 else [p] for i, p in enumerate(parts)]
            found |= {"".join(choice) for choice in product(*choices)}
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_documents_name_files_that_are_there(document: Path) -> None:
    missing = {name for name in paths_in(document.read_text()) if not (ROOT / name).exists()}
    assert missing == set()


def test_names_of_files_are_found() -> None:
    text = "see `docs/math.md`, `tests/reference/{credit,advantage}.py`, `runs/x/`, `a/b`"
    assert paths_in(text) == {
        "docs/math.md",
        "tests/reference/credit.py",
        "tests/reference/advantage.py",
    }
