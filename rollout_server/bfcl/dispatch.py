"""Runs calls on one episode's private tool instances.

A call reaches a method only by its name in a table of documented methods, with keyword arguments
that are data. No text of a model is ever evaluated, formatted into code, or used as an attribute
path. Whatever goes wrong on the way is an error result that the model reads.
"""

from __future__ import annotations

import difflib
import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from decimal import localcontext
from threading import Lock
from typing import Any

from miniverl_dist.environments.arguments import size_problem
from miniverl_dist.errors import EnvironmentFaultError
from miniverl_dist.schemas.messages import CallError, ParsedCall, ParseStatus, ToolCall, ToolSchema
from rollout_server.bfcl import package
from rollout_server.bfcl.limits import cost_problem
from rollout_server.bfcl.tasks import BfclTask

_MPMATH_LOCK = Lock()
"""``logarithm`` sets the precision of mpmath's one global context, and its result is written out
under that precision: without the lock, episodes in other threads change each other's digits."""


@dataclass(frozen=True)
class CallResult:
    """What a call gave back, written out as bfcl-eval's checkers compare it; never cut."""

    text: str
    is_error: bool
    error: CallError | None = None
    """None without an error, and for a call that could not be read."""


@contextmanager
def faults(where: str) -> Iterator[None]:
    """Turn whatever bfcl-eval raises where no model is involved into an environment fault."""
    try:
        yield
    except EnvironmentFaultError:
        raise
    except Exception as error:  # the package's classes and checkers raise anything
        raise EnvironmentFaultError(
            f"BFCL {where}: bfcl-eval raised {type(error).__name__}: {error}; this is a fault of "
            "the harness or its data, not of the model"
        ) from error


class ToolHost:
    """Private instances of a task's tool classes; belongs to one episode.

    Args:
        task: the task whose start state the instances load.
        tools: documented functions that may be called; nothing else can be.
        call_deadline_s: CPU seconds after which a call counts as a fault of the harness.
        classes: the task's classes by name; None makes them with ``tool_classes``. Hosts whose
            states are compared need the same ones.
    """

    def __init__(
        self,
        task: BfclTask,
        tools: Sequence[ToolSchema],
        *,
        call_deadline_s: float,
        classes: Mapping[str, type[Any]] | None = None,
    ) -> None:
        self._task_id = task.task_id
        self._call_deadline_s = call_deadline_s
        with faults(f"{task.task_id}, building the start state"):
            found = tool_classes(task) if classes is None else classes
            self.instances = {name: _build(found[name], task) for name in task.classes}
        self._methods = self._documented_methods(tools)

    def allow(self, tools: Sequence[ToolSchema]) -> None:
        """Let these functions be called from now on."""
        self._methods |= self._documented_methods(tools)

    def _documented_methods(
        self, tools: Sequence[ToolSchema]
    ) -> dict[str, tuple[Any, Callable[..., Any]]]:
        methods: dict[str, tuple[Any, Callable[..., Any]]] = {}
        for tool in tools:
            owner = next((i for i in self.instances.values() if hasattr(i, tool.name)), None)
            if owner is None or tool.name.startswith("_"):
                raise EnvironmentFaultError(
                    f"BFCL {self._task_id}: no class of {list(self.instances)} has a public method "
                    f"{tool.name!r}, though its documents say so"
                )
            methods[tool.name] = (owner, getattr(owner, tool.name))
        return methods

    def run(self, parsed: ParsedCall) -> CallResult:
        """Run one attempted call of a model; a malformed one is answered with what is wrong."""
        if parsed.status is not ParseStatus.OK or parsed.call is None:
            detail = parsed.error or "it could not be read"
            return _refusal(f"Tool call not executed ({parsed.status.value}): {detail}")
        return self.call(parsed.call)

    def call(self, call: ToolCall) -> CallResult:
        """Run one well-formed call.

        Raises:
            EnvironmentFaultError: the call took longer than the deadline, which the limits on
                arguments should have made impossible.
        """
        if call.name not in self._methods:
            return _refusal(self._unknown(call.name), CallError.UNKNOWN_TOOL)
        owner, method = self._methods[call.name]
        problem = size_problem(call.arguments) or _binding_problem(method, call)
        if problem is None:
            problem = cost_problem(owner, call.name, call.arguments)
        if problem is not None:
            return _refusal(f"{call.name}: {problem}", CallError.ARGUMENTS)
        started = time.thread_time()
        result = _invoke(method, call)
        seconds = time.thread_time() - started
        if seconds > self._call_deadline_s:
            raise EnvironmentFaultError(
                f"BFCL {self._task_id}: {call.name} took {seconds:.1f} CPU seconds, the deadline "
                f"is {self._call_deadline_s} s; rollout_server/bfcl/limits.py should refuse it"
            )
        return result

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name[:100], self._methods, n=3)
        hint = f"; similar functions: {', '.join(close)}" if close else ""
        return f"Unknown function {name[:100]!r}{hint}"


def tool_classes(task: BfclTask) -> Mapping[str, type[Any]]:
    """The task's classes by name; those of a long context belong to the caller alone."""
    if task.is_long_context:
        return package.private_tool_classes(task.classes)
    return {name: package.tool_class(name) for name in task.classes}


def _build(tool_class: type[Any], task: BfclTask) -> Any:  # noqa: ANN401 -- a tool class of the package
    instance = tool_class()
    class_name = tool_class.__name__
    if not package.is_stateless(class_name):
        scenario = deepcopy(task.initial_config.get(class_name, {}))
        instance._load_scenario(scenario, long_context=task.is_long_context)
    if task.is_long_context:
        # TravelAPI takes cards and bookings from its module as they are; the expert's host shares
        # that module, and would see what the model's changes. As one copy: parts name each other.
        vars(instance).update(deepcopy(vars(instance)))
    return instance


def _binding_problem(method: Callable[..., Any], call: ToolCall) -> str | None:
    """Missing and unexpected arguments in words, or None."""
    parameters = inspect.signature(method).parameters
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name not in call.arguments
    ]
    unexpected = [name[:100] for name in call.arguments if name not in parameters][:5]
    problems = []
    if missing:
        problems.append(f"missing arguments {missing}")
    if unexpected:
        problems.append(f"unexpected arguments {unexpected}, expected {list(parameters)}")
    return "; ".join(problems) or None


def _arguments(method: Callable[..., Any], call: ToolCall) -> dict[str, Any]:
    """Private copies of the arguments, mutable defaults included.

    The tools store and extend the lists they are given. Without copies they would write into the
    recorded call, and ``post_tweet`` into its own default list, which all episodes share.
    """
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(method).parameters.items()
        if isinstance(parameter.default, list | dict | set)
    }
    return deepcopy(defaults | call.arguments)


def _invoke(method: Callable[..., Any], call: ToolCall) -> CallResult:
    if call.name == "logarithm":
        with _MPMATH_LOCK, package.mpmath_precision_restored():
            return _invoke_unguarded(method, call)
    return _invoke_unguarded(method, call)


def _invoke_unguarded(method: Callable[..., Any], call: ToolCall) -> CallResult:
    try:
        # square_root sets the precision of the thread's decimal context for good.
        with localcontext():
            result = method(**_arguments(method, call))
            is_error = _is_error(result)
            kind = CallError.EXECUTION if is_error else None
            return CallResult(text=_written(result), is_error=is_error, error=kind)
    except Exception as error:  # noqa: BLE001 -- the tools raise anything, and the model reads it
        text = f"Error during execution: {error}"
        return CallResult(text=text, is_error=True, error=CallError.EXECUTION)


def _written(result: object) -> str:
    """The result as text, by the rule that bfcl-eval's own executor follows."""
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):
            return str(result)
    return str(result)


def _is_error(result: object) -> bool:
    """Whether a tool reports a failure: most return it instead of raising.

    Three of them wrap it in a list (``get_order_history``, ``get_transaction_history`` and
    ``get_user_tickets`` an object, ``get_watchlist`` a text).
    """
    if isinstance(result, list) and len(result) == 1:
        result = result[0]
        if isinstance(result, str):
            return result.startswith("Error:")
    return isinstance(result, dict) and "error" in result


def _refusal(text: str, kind: CallError | None = None) -> CallResult:
    return CallResult(text=json.dumps({"error": text}), is_error=True, error=kind)
