"""The tasks of BFCL V3 multi-turn, read from the data files of the installed package.

Each of a category's 200 tasks has user turns, a start state per tool class, and the expert's
calls per turn. The expert's calls are Python text in the data; here they become keyword calls by
reading their syntax tree, so that no text is ever run.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from miniverl_dist.config.recipe import BfclCategory
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.errors import RecordError, TaskNotFoundError
from miniverl_dist.schemas.messages import FrozenModel, ToolCall, ToolSchema
from rollout_server.bfcl import package
from rollout_server.bfcl.schemas import to_tool_schema


class BfclTask(FrozenModel):
    """One task; ``turns`` and ``expert_turns`` have equal lengths."""

    task_id: str
    turns: tuple[str, ...]
    """The user's text of each turn."""
    initial_config: dict[str, Any]
    """Start state by class name; copied for every episode, never changed."""
    classes: tuple[str, ...]
    category: BfclCategory = "base"
    excluded: tuple[str, ...] = ()
    """Functions of these classes that the task withholds."""
    brought: dict[int, tuple[str, ...]] = Field(default_factory=dict)
    """Functions that the user turn with this index brings (``miss_func``); hidden before it."""
    expert_turns: tuple[tuple[ToolCall, ...], ...]
    """The expert's calls of each turn. A turn may be empty: in each task of ``miss_func`` and
    ``miss_param`` the one in which a function or a value is missing, in all categories some turns
    of tasks 167 and 180."""

    @property
    def expert_calls(self) -> tuple[ToolCall, ...]:
        """All N expert calls in order."""
        return tuple(call for turn in self.expert_turns for call in turn)

    @property
    def num_calls(self) -> int:
        """N."""
        return sum(len(turn) for turn in self.expert_turns)

    def turn_of_call(self, index: int) -> int:
        """Turn in which expert call ``index`` (from 0) is due; the last turn for index N."""
        position = 0
        for turn, calls in enumerate(self.expert_turns):
            position += len(calls)
            if index < position:
                return turn
        return len(self.expert_turns) - 1

    @property
    def is_long_context(self) -> bool:
        """Whether the start state and the responses are padded with long data."""
        return self.category == "long_context"

    @property
    def plays_empty_turns(self) -> bool:
        """Whether turns without an expert call are what the task is about."""
        return self.category in ("miss_func", "miss_param")

    def first_turn(self, prefix_calls: int) -> int:
        """Turn in which the model takes over after K = ``prefix_calls`` calls.

        That is the turn in which the next call is due, or, where empty turns are the point, the
        first of the empty turns right before it.
        """
        turn = self.turn_of_call(prefix_calls)
        starts_turn = prefix_calls == sum(len(calls) for calls in self.expert_turns[:turn])
        if self.plays_empty_turns and starts_turn:
            while turn and not self.expert_turns[turn - 1]:
                turn -= 1
        return turn

    def refused_before(self, turn: int) -> set[str]:
        """Functions that cannot be called until ``turn`` has passed.

        Hidden ones, but for those that the expert itself calls before the turn that brings them
        (``tail`` in ``multi_turn_miss_func_49``): refusing them would make the task impossible.
        """
        refused: set[str] = set()
        for brought_in, names in self.brought.items():
            if brought_in > turn:
                earlier = {c.name for calls in self.expert_turns[:brought_in] for c in calls}
                refused |= set(names) - earlier
        return refused

    @property
    def info(self) -> TaskInfo:
        """What curriculum and splits need."""
        num_empty = sum(not calls for calls in self.expert_turns)
        return TaskInfo(
            task_id=self.task_id,
            num_calls=self.num_calls,
            num_turns=len(self.turns),
            classes=tuple(sorted(self.classes)),
            category=self.category,
            family=self.task_id.replace(f"multi_turn_{self.category}", "multi_turn_base"),
            extra_turns=num_empty if self.plays_empty_turns else 0,
        )


@dataclass(frozen=True)
class BfclData:
    """Everything read from the package."""

    tasks: Mapping[str, BfclTask]
    """By id, in the data's order."""
    schemas: Mapping[str, tuple[ToolSchema, ...]]
    """Documented functions by class name."""
    provenance: Mapping[str, str]

    def task(self, task_id: str) -> BfclTask:
        """The task with this id.

        Raises:
            TaskNotFoundError: no such task; the message names the closest ids.
        """
        found = self.tasks.get(task_id)
        if found is None:
            close = ", ".join(difflib.get_close_matches(task_id, self.tasks, n=3)) or "none"
            raise TaskNotFoundError(
                f"BFCL {self.provenance['category']} has no task {task_id!r} among its "
                f"{len(self.tasks)}; close ids: {close}"
            )
        return found

    def tools(self, task: BfclTask) -> tuple[ToolSchema, ...]:
        """Functions that the model may call in ``task``, hidden ones included."""
        return tuple(
            schema
            for class_name in task.classes
            for schema in self.schemas[class_name]
            if schema.name not in task.excluded
        )


@cache
def load_data(
    data_dir: Path | None = None, categories: tuple[BfclCategory, ...] = ("base",)
) -> BfclData:
    """Read tasks, expert calls and function documents.

    Args:
        data_dir: the package's data folder; None finds the installed one.
        categories: of multi-turn tasks, in the order in which the tasks come.

    Raises:
        MissingDependencyError: bfcl-eval is not installed.
        RecordError: a file that does not hold what it should.
    """
    folder = package.data_dir() if data_dir is None else data_dir
    schemas = {
        class_name: tuple(
            to_tool_schema(document)
            for document in _json_lines(folder / "multi_turn_func_doc" / file_name)
        )
        for class_name, file_name in package.DOC_FILES.items()
    }
    tasks: dict[str, BfclTask] = {}
    for category in categories:
        tasks |= _read_category(folder, category, schemas)
    provenance = {
        "package": package.DISTRIBUTION,
        "version": package.version(),
        "category": ",".join(f"multi_turn_{category}" for category in categories),
        "num_tasks": str(len(tasks)),
        "data_sha256": _digest(folder, categories),
    }
    return BfclData(tasks=tasks, schemas=schemas, provenance=provenance)


def _rows_file(category: BfclCategory) -> str:
    return f"BFCL_v4_multi_turn_{category}.json"


def _read_category(
    folder: Path, category: BfclCategory, schemas: Mapping[str, tuple[ToolSchema, ...]]
) -> dict[str, BfclTask]:
    rows = _rows_file(category)
    answers = {
        row["id"]: row["ground_truth"] for row in _json_lines(folder / "possible_answer" / rows)
    }
    tasks = {}
    for row in _json_lines(folder / rows):
        task = _read_task(row, category, answers, schemas)
        tasks[task.task_id] = task
    return tasks


def parse_expert_call(text: str, classes: Sequence[str]) -> ToolCall:
    """Read one expert call such as ``sort('a.txt')`` into a keyword call.

    The syntax tree is read, nothing is evaluated; positional arguments take the names that the
    method's signature gives them.

    Raises:
        RecordError: not one plain call, with literal arguments, of a method of ``classes``.
    """
    try:
        return _read_call(text, classes)
    except (SyntaxError, TypeError, ValueError) as error:
        raise RecordError(
            f"expert call {text!r}: {error}; expected name(argument=literal)"
        ) from error


def _read_call(text: str, classes: Sequence[str]) -> ToolCall:
    node = ast.parse(text.strip(), mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise TypeError("it is not a plain call")
    arguments: dict[str, Any] = {}
    if node.args:
        names = _parameter_names(node.func.id, classes)[: len(node.args)]
        arguments = dict(zip(names, map(ast.literal_eval, node.args), strict=True))
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError(f"keyword {keyword.arg} unpacks a mapping or comes twice")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return ToolCall(name=node.func.id, arguments=arguments)


def _parameter_names(name: str, classes: Sequence[str]) -> list[str]:
    for class_name in classes:
        method = getattr(package.tool_class(class_name), name, None)
        if method is not None:
            return list(inspect.signature(method).parameters)[1:]
    raise ValueError(f"no class of {list(classes)} has this method")


def _read_task(
    row: Mapping[str, Any],
    category: BfclCategory,
    answers: Mapping[str, Any],
    schemas: Mapping[str, tuple[ToolSchema, ...]],
) -> BfclTask:
    try:
        classes = tuple(row["involved_classes"])
        missed = row.get("missed_function", {})
        brought = {int(turn): tuple(names) for turn, names in missed.items()}
        task = BfclTask(
            task_id=row["id"],
            category=category,
            turns=tuple(
                package.added_functions_text() if turn in brought and not said else _user_text(said)
                for turn, said in enumerate(row["question"])
            ),
            initial_config=row["initial_config"],
            classes=classes,
            excluded=tuple(row.get("excluded_function", ())),
            brought=brought,
            expert_turns=tuple(
                tuple(parse_expert_call(text, classes) for text in turn)
                for turn in answers[row["id"]]
            ),
        )
        known = {schema.name for class_name in classes for schema in schemas[class_name]}
    except KeyError as error:
        raise RecordError(f"BFCL task {row.get('id')!r}: no entry {error} in its data") from error
    if len(task.turns) != len(task.expert_turns):
        raise RecordError(
            f"BFCL task {task.task_id}: {len(task.turns)} user turns, "
            f"{len(task.expert_turns)} turns of expert calls"
        )
    named = {call.name for call in task.expert_calls}.union(*brought.values())
    strange = named - known.difference(task.excluded)
    if strange:
        raise RecordError(
            f"BFCL task {task.task_id}: calls or adds undocumented functions {sorted(strange)}"
        )
    return task


def _user_text(turn: Sequence[Mapping[str, str]]) -> str:
    if len(turn) != 1 or turn[0].get("role") != "user":
        raise RecordError(f"BFCL turn {turn!r}: expected exactly one user message")
    return turn[0]["content"]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RecordError(
            f"BFCL data file {path.name} is missing; run scripts/install_bfcl.sh"
        ) from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise RecordError(f"{path.name}, line {number}: not JSON ({error})") from error


def _digest(folder: Path, categories: Sequence[BfclCategory]) -> str:
    """SHA-256 over names and SHA-256 of every file that is read."""
    rows = [_rows_file(category) for category in categories]
    paths = [path for name in rows for path in (folder / name, folder / "possible_answer" / name)]
    paths += [folder / "multi_turn_func_doc" / name for name in package.DOC_FILES.values()]
    lines = [
        f"{path.relative_to(folder).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        for path in paths
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
