from __future__ import annotations

import math
from typing import Any

import pytest

from rollout_server.bfcl.limits import cost_problem


class MathAPI:
    """Stands for the class of this name: the limits know methods by class and name."""


class Folder:
    def __init__(self, **contents: object) -> None:
        self.contents = contents


class GorillaFileSystem:
    def __init__(self, root: Folder, current: Folder | None = None) -> None:
        self.root = root
        self._current_dir = current or root


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("square_root", {"number": 2, "precision": 1000}, None),
        ("square_root", {"number": 2, "precision": 1001}, "precision"),
        ("square_root", {"number": 2, "precision": 10**6}, "precision"),
        ("square_root", {"number": 2, "precision": math.nan}, "precision"),
        ("square_root", {"number": 2, "precision": "9"}, "precision"),
        ("logarithm", {"value": 2, "base": 10, "precision": 10**7}, "precision"),
        ("logarithm", {"value": "1e99999999", "base": 10, "precision": 5}, "value"),
        ("power", {"base": 2, "exponent": 100}, None),
        ("power", {"base": 10, "exponent": 10**8}, "bits"),
        ("power", {"base": -10, "exponent": 10**8}, "bits"),
        ("power", {"base": 10, "exponent": -(10**8)}, None),
        ("power", {"base": 10.0, "exponent": 10**8}, None),
        ("power", {"base": "a", "exponent": 2}, None),
        ("round_number", {"number": 5, "decimal_places": -1000}, None),
        ("round_number", {"number": 5, "decimal_places": -(10**8)}, "decimal_places"),
        ("round_number", {"number": 5}, None),
        ("add", {"a": 1, "b": 2}, None),
    ],
)
def test_costly_numbers(name: str, arguments: dict[str, Any], problem: str | None) -> None:
    found = cost_problem(MathAPI(), name, arguments)
    assert (problem in found) if problem and found else found is problem


def doubling_tree(times: int) -> Folder:
    folder = Folder(leaf=object())
    for level in range(times):
        folder = Folder(**folder.contents, **{f"level{level}": folder})
    return folder


@pytest.mark.parametrize("name", ["find", "du"])
def test_trees(name: str) -> None:
    small, huge = doubling_tree(3), doubling_tree(60)
    assert cost_problem(GorillaFileSystem(small), name, {}) is None
    assert "entries" in str(cost_problem(GorillaFileSystem(huge), name, {}))
    assert "entries" in str(cost_problem(GorillaFileSystem(small, huge), name, {}))
    assert cost_problem(GorillaFileSystem(huge), "pwd", {}) is None


def test_cyclic_tree() -> None:
    folder = Folder()
    folder.contents["self"] = folder
    assert "entries" in str(cost_problem(GorillaFileSystem(folder), "find", {}))
