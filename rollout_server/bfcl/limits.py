"""Limits on what a model may ask of the tools, so that no call can hold a thread for long.

The tools run in this process. A call that spends its time inside C (``decimal``, ``mpmath``, big
integers) can be stopped neither by a signal nor by a deadline, only refused beforehand; a worker
process per episode could be killed, but costs a start per episode, a round trip per call, and a
replay of the episode after each kill. An audit of all 128 documented methods gave a short list of
those whose time is not linear in the size of their arguments:

* ``logarithm``, ``square_root``: as many digits as ``precision`` asks for; numbers given as text
  are expanded (``'1e99999999'``);
* ``power``: integers of any length; ``round_number``: computes 10 to the power of
  ``-decimal_places``;
* ``find``, ``du``: walk the directory tree, in which ``cp`` shares subdirectories, so that 2n
  calls can make a tree of 2^n paths (and ``cp('a', 'a')`` a cycle).

All others are linear in their arguments, hence the limit on the arguments' size. The integration
audit times every method on hostile values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MAX_DIGITS = 1_000
"""Precision and decimal places."""
MAX_POWER_BITS = 4_096
MAX_TREE_ITEMS = 10_000
"""Directory entries on all paths; the largest start state has 13."""


def cost_problem(instance: Any, name: str, arguments: Mapping[str, Any]) -> str | None:  # noqa: ANN401 -- a tool class of the package
    """Why method ``name`` of ``instance`` must not run with ``arguments``, or None."""
    check = _CHECKS.get((type(instance).__name__, name))
    return check(instance, arguments) if check else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _digits_problem(arguments: Mapping[str, Any], name: str) -> str | None:
    digits = arguments.get(name, 0)
    # A NaN compares false both ways and must not pass.
    if not _is_number(digits) or not abs(digits) <= MAX_DIGITS:
        return f"{name} must be a number between -{MAX_DIGITS} and {MAX_DIGITS}"
    return None


def _check_precise(_: object, arguments: Mapping[str, Any]) -> str | None:
    for name, value in arguments.items():
        if not _is_number(value):
            return f"{name} must be a number"
    return _digits_problem(arguments, "precision")


def _check_round(_: object, arguments: Mapping[str, Any]) -> str | None:
    return _digits_problem(arguments, "decimal_places")


def _check_power(_: object, arguments: Mapping[str, Any]) -> str | None:
    base, exponent = arguments["base"], arguments["exponent"]
    if not isinstance(base, int) or not isinstance(exponent, int):
        return None  # float powers overflow at once, and the tool answers for other types
    if base.bit_length() * exponent > MAX_POWER_BITS:
        return f"the result has more than {MAX_POWER_BITS} bits"
    return None


def _check_tree(file_system: Any, _: Mapping[str, Any]) -> str | None:  # noqa: ANN401 -- a tool class of the package
    # A moved directory leaves its old self behind as the parent of its children: the current
    # directory need not hang below the root.
    pending = [file_system.root, file_system._current_dir]
    num_items = 0
    while pending:
        contents = getattr(pending.pop(), "contents", None)
        if contents:
            num_items += len(contents)
            pending.extend(contents.values())
        if num_items > MAX_TREE_ITEMS:
            return f"the directory tree has more than {MAX_TREE_ITEMS} entries"
    return None


_CHECKS: dict[tuple[str, str], Callable[[Any, Mapping[str, Any]], str | None]] = {
    ("MathAPI", "logarithm"): _check_precise,
    ("MathAPI", "square_root"): _check_precise,
    ("MathAPI", "round_number"): _check_round,
    ("MathAPI", "power"): _check_power,
    ("GorillaFileSystem", "find"): _check_tree,
    ("GorillaFileSystem", "du"): _check_tree,
}
