"""The one place that imports bfcl_eval: its data folder, its tool classes, its two checkers.

``bfcl_eval.utils`` is never imported: it creates folders beside the installed package. Neither is
``execute_multi_turn_func_call`` ever called: it runs text with ``eval`` and keeps its instances in
module globals.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from miniverl_dist.errors import MissingDependencyError

DISTRIBUTION = "bfcl-eval"

DOC_FILES = {
    "GorillaFileSystem": "gorilla_file_system.json",
    "MathAPI": "math_api.json",
    "MessageAPI": "message_api.json",
    "TwitterAPI": "posting_api.json",
    "TicketAPI": "ticket_api.json",
    "TradingBot": "trading_bot.json",
    "TravelAPI": "travel_booking.json",
    "VehicleControlAPI": "vehicle_control.json",
}
"""Function documents of the eight multi-turn classes."""

_CHECKER = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker"
_BACKENDS = "bfcl_eval.constants.executable_backend_config"
_PROMPTS = "bfcl_eval.constants.default_prompts"
_LONG_CONTEXT = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code.long_context"


def _missing(what: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"the BFCL environment needs {what}, which is not installed; run scripts/install_bfcl.sh"
    )


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _missing(f"the module {error.name}") from error


def data_dir() -> Path:
    """Folder of the installed package's data; imports nothing of it.

    Raises:
        MissingDependencyError: bfcl-eval is not installed.
    """
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise _missing(f"the package {DISTRIBUTION}")
    return Path(next(iter(spec.submodule_search_locations))) / "data"


def version() -> str:
    """Version of the installed package.

    Raises:
        MissingDependencyError: bfcl-eval is not installed.
    """
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise _missing(f"the package {DISTRIBUTION}") from error


@cache
def tool_class(class_name: str) -> type[Any]:
    """The class that plays a tool family, one of ``DOC_FILES``."""
    found: type[Any] = getattr(_import(_module_of(class_name)), class_name)
    return found


def _module_of(class_name: str) -> str:
    name: str = _import(_BACKENDS).CLASS_FILE_PATH_MAPPING[class_name]
    return name


def private_tool_classes(class_names: Iterable[str]) -> dict[str, type[Any]]:
    """The classes from modules of their own, which nobody else sees.

    With long contexts the classes keep and change values of their module and of the one with the
    long data (``TravelAPI`` takes the cards, ``VehicleControlAPI`` writes into the weather). So
    both are run anew: what an episode changes there ends with it.
    """
    data = _fresh_module(_LONG_CONTEXT)
    shared = {name for name in vars(data) if not name.startswith("__")}
    classes: dict[str, type[Any]] = {}
    for class_name in class_names:
        module = _fresh_module(_module_of(class_name))
        for name in shared & vars(module).keys():
            setattr(module, name, getattr(data, name))
        classes[class_name] = getattr(module, class_name)
    return classes


def _fresh_module(name: str) -> ModuleType:
    """A second copy of a module, known to nobody: not in ``sys.modules``."""
    spec = _import(name).__spec__
    if spec is None or spec.loader is None:
        raise _missing(f"the source of the module {name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def added_functions_text() -> str:
    """What the user says in the turn of ``multi_turn_miss_func`` that brings functions."""
    text: str = _import(_PROMPTS).DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
    return text


@contextmanager
def mpmath_precision_restored() -> Iterator[None]:
    """Undo what a call does to the precision of mpmath's global context."""
    context = _import("mpmath").mp
    before = context.prec
    try:
        yield
    finally:
        context.prec = before


def is_stateless(class_name: str) -> bool:
    """Whether the class has no scenario to load."""
    return class_name in _import(_BACKENDS).STATELESS_CLASSES


def states_agree(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """The package's state check on instances by class name."""
    check: Callable[..., dict[str, Any]] = _import(_CHECKER).state_checker
    return bool(check(found, expected)["valid"])


def responses_cover(found: Sequence[str], expected: Sequence[str]) -> bool:
    """The package's response check: every expected response occurs among those found."""
    check: Callable[..., dict[str, Any]] = _import(_CHECKER).response_checker
    return bool(check(list(found), list(expected), 0)["valid"])
