"""The shaped reward: partial credit for the calls, and the verdict.

    total = 0.25 mean_partial + 0.20 first_call + 0.10 exec_score + 0.45 terminal_pass
    partial(student, expert) = 0.20 name + 0.15 known + 0.15 schema-valid + 0.50 structure
    structure(student, expert) = 0.4 name + 0.3 keys + 0.3 values

Pure functions; every number between 0 and 1. Precisely:

* ``mean_partial``: partial credit of student call i against expert call i, summed over the T tail
  calls and divided by T. A missing call earns 0, calls beyond T earn nothing and cost nothing.
* ``first_call``: partial credit of the first pair.
* ``exec_score``: share of the attempted calls that ran without an error; 0 without calls.
* With T = 0 nothing is due: the first two terms are 1, and the third is too without a call.
* ``terminal_pass``: 1 if the task passed. With no verdict (None) ``total`` is ``mean_partial``.
* A call that cannot be read (None, or arguments that are no JSON object) earns 0 at its place.
* ``keys``: 1 for the same argument names, 1/2 if at least one is shared. ``values``: equal values
  over shared names; where neither call has arguments both are 1, for nothing can differ.
* Two values are equal when they are equal after normalisation: in texts, case and blanks do not
  count, nor which uuid, date with time, or path below /tmp is named. ``1`` equals ``1.0``; neither
  equals ``True`` or ``"1"``. A date without a time is data and stays.
* ``known``: the name is among the tools; ``schema-valid``: the arguments also fit its JSON Schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator

from miniverl_dist.config.recipe import RewardWeights
from miniverl_dist.errors import EnvironmentFaultError
from miniverl_dist.schemas.messages import FrozenModel, ToolCall, ToolSchema

CallLike = ToolCall | Mapping[str, Any] | None
"""A call, also as ``{"name": str, "arguments": dict | JSON text}``; None: it could not be read."""


DEFAULT_WEIGHTS = RewardWeights()


class RewardParts(FrozenModel):
    """The reward and the unweighted terms it is made of."""

    total: float
    mean_partial: float
    first_call: float
    exec_score: float
    terminal_pass: float


def trajectory_reward(
    student_calls: Sequence[CallLike],
    exec_successes: Sequence[bool],
    expert_calls: Sequence[CallLike],
    tool_schemas: Sequence[ToolSchema],
    task_passed: bool | None,
    tail_calls: int,
    *,
    weights: RewardWeights = DEFAULT_WEIGHTS,
) -> RewardParts:
    """Score the calls of one episode.

    Args:
        student_calls: attempted calls in order.
        exec_successes: whether each of them ran without an error.
        expert_calls: the expert's calls from step K on. Of a longer list the last ``tail_calls``
            are taken.
        tool_schemas: the task's functions with their full schemas.
        task_passed: the verdict; None where there is none.
        tail_calls: T = N - K. T never exceeds N: a larger number counts as the number of expert
            calls, for a perfect episode must earn 1.
        weights: of the terms.

    Raises:
        EnvironmentFaultError: lengths that do not fit, a negative ``tail_calls``.
    """
    if len(exec_successes) != len(student_calls) or tail_calls < 0:
        raise EnvironmentFaultError(
            f"reward: {len(exec_successes)} exec_successes for {len(student_calls)} calls and "
            f"tail_calls {tail_calls}; expected one per call, and tail_calls >= 0"
        )
    expert_tail = list(expert_calls)[-tail_calls:] if tail_calls else []
    parameters = {schema.name: schema.parameters for schema in tool_schemas}
    credits = [
        partial_credit(student, expert, parameters, weights)
        for student, expert in zip(student_calls, expert_tail, strict=False)
    ]
    without_calls = 0.0 if expert_tail else 1.0
    mean_partial = sum(credits) / len(expert_tail) if expert_tail else 1.0
    first_call = credits[0] if credits else without_calls
    exec_score = sum(exec_successes) / len(exec_successes) if exec_successes else without_calls
    terminal_pass = 1.0 if task_passed else 0.0
    total = mean_partial
    if task_passed is not None:
        total = (
            weights.mean_partial * mean_partial
            + weights.first_call * first_call
            + weights.exec_score * exec_score
            + weights.terminal_pass * terminal_pass
        )
    return RewardParts(
        total=total,
        mean_partial=mean_partial,
        first_call=first_call,
        exec_score=exec_score,
        terminal_pass=terminal_pass,
    )


def partial_credit(
    student: CallLike,
    expert: CallLike,
    parameters: Mapping[str, Mapping[str, Any]],
    weights: RewardWeights = DEFAULT_WEIGHTS,
) -> float:
    """Credit of one student call against one expert call.

    Args:
        student: the attempted call.
        expert: the call that was due.
        parameters: JSON Schema of the arguments by function name.
        weights: of the terms.
    """
    found, wanted = _read(student), _read(expert)
    if found is None or wanted is None:
        return 0.0
    name, arguments = found
    credit = weights.call_structure * _structure(found, wanted, weights)
    if name == wanted[0]:
        credit += weights.call_name
    if name in parameters:
        credit += weights.call_known
        if _validator(json.dumps(parameters[name])).is_valid(arguments):
            credit += weights.call_schema_valid
    return credit


def same_call(found: CallLike, wanted: CallLike) -> bool:
    """Whether two calls have the same name and the same arguments after normalisation."""
    pair = [_read(call) for call in (found, wanted)]
    if pair[0] is None or pair[1] is None:
        return False
    (name, arguments), (wanted_name, wanted_arguments) = pair[0], pair[1]
    return name == wanted_name and normalized(arguments) == normalized(wanted_arguments)


def _read(call: CallLike) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments, or None for a call that cannot be read."""
    if isinstance(call, ToolCall):
        return call.name, call.arguments
    if call is None:
        return None
    name, arguments = call.get("name"), call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, arguments


def _structure(
    found: tuple[str, dict[str, Any]], wanted: tuple[str, dict[str, Any]], weights: RewardWeights
) -> float:
    (found_name, found_arguments), (wanted_name, wanted_arguments) = found, wanted
    shared = found_arguments.keys() & wanted_arguments.keys()
    score = 0.0
    if found_name == wanted_name:
        score += weights.structure_name
    if found_arguments.keys() == wanted_arguments.keys():
        score += weights.structure_keys
    elif shared:
        score += weights.structure_keys_overlap
    if shared:
        num_equal = sum(
            normalized(found_arguments[key]) == normalized(wanted_arguments[key]) for key in shared
        )
        score += weights.structure_values * num_equal / len(shared)
    elif not found_arguments and not wanted_arguments:
        score += weights.structure_values
    return score


_UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
_TIMESTAMP = re.compile(
    r"\b[0-9]{4}-[0-9]{2}-[0-9]{2}[t ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?"
    r"(?:z|[+-][0-9]{2}:?[0-9]{2})?\b"
)
_TMP_PATH = re.compile(r"(?<![\w.~/-])/tmp/[^\s\"']+")


def normalized(value: object) -> object:
    """``value`` in a form whose equality is the reward's equality of values.

    Booleans become tagged pairs: Python takes ``True == 1`` for equal.
    """
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, str):
        text = " ".join(value.casefold().split())
        text = _UUID.sub("<uuid>", text)
        text = _TIMESTAMP.sub("<timestamp>", text)
        return _TMP_PATH.sub("<tmp>", text)
    if isinstance(value, Mapping):
        return {key: normalized(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [normalized(child) for child in value]
    return value


@lru_cache(maxsize=512)
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads(schema))
