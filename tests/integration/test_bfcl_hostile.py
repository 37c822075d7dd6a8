"""No call holds a thread for long: every documented method on values that a model might write."""

from __future__ import annotations

import gc
import importlib.util
import math
import time
from typing import Any

import pytest

from miniverl_dist.config.recipe import BfclCategory
from miniverl_dist.environments.players import as_parsed
from miniverl_dist.schemas.messages import ToolCall
from rollout_server.bfcl import package
from rollout_server.bfcl.dispatch import CallResult, ToolHost
from rollout_server.bfcl.environment import BfclEnvironment
from rollout_server.bfcl.tasks import BfclTask, load_data

pytestmark = [
    pytest.mark.bfcl,
    pytest.mark.skipif(
        importlib.util.find_spec("bfcl_eval") is None,
        reason="bfcl-eval is not installed: scripts/install_bfcl.sh",
    ),
]

LIMIT_S = 0.25
"""CPU time of one call; the worst measured is an eighth of it."""


def nested(depth: int) -> object:
    value: object = "x"
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, object] = {
    "million": 10**6,
    "hundred million": 10**8,
    "minus hundred million": -(10**8),
    "largest integer allowed": 2**1024 - 1,
    "integer of 5000 digits": 10**5000,
    "largest float": 1.7e308,
    "smallest float": 5e-324,
    "nan": math.nan,
    "infinity": math.inf,
    "digits as text": "9" * 15_000,
    "exponent as text": "1e99999999",
    "fraction as text": "1/3",
    "million characters": "x" * 10**6,
    "blanks": " " * 15_000,
    "many parts": "1," * 7_000,
    "long path": "../" * 5_000,
    "list of large integers": [2**1024 - 1] * 4_000,
    "list of texts": ["AAPL"] * 4_000,
    "list of infinities": [math.inf, -math.inf] * 2_000,
    "deep list": nested(50_000),
    "allowed depth": nested(18),
    "object": {"title": "x" * 15_000, "status": {}},
    "wide object": {str(number): number for number in range(4_000)},
    "true": True,
    "nothing": None,
    "small": 2,
    "date": "2024-01-01",
    "here": ".",
}


@pytest.fixture(scope="module")
def env() -> BfclEnvironment:
    return BfclEnvironment()


def all_classes() -> BfclTask:
    """A task with all eight classes, everyone logged in."""
    contents = {"a": {"type": "file", "content": "b\na\n" * 5_000}}
    return BfclTask(
        task_id="made_up",
        turns=("go",),
        initial_config={
            "GorillaFileSystem": {"root": {"w": {"type": "directory", "contents": contents}}},
            "TwitterAPI": {"authenticated": True},
            "TradingBot": {"authenticated": True, "market_status": "Open"},
            "TravelAPI": {"access_token": None},
            "TicketAPI": {"current_user": "me"},
            "MessageAPI": {"current_user": "USR001"},
        },
        classes=tuple(package.DOC_FILES),
        expert_turns=((),),
    )


def timed(host: ToolHost, name: str, arguments: dict[str, Any]) -> tuple[CallResult, float]:
    """The result and its CPU seconds; a collection of the whole process is not the call's doing."""
    gc.disable()
    try:
        started = time.thread_time()
        result = host.call(ToolCall(name=name, arguments=arguments))
        return result, time.thread_time() - started
    finally:
        gc.enable()


@pytest.mark.parametrize("category", ["base", pytest.param("long_context", marks=pytest.mark.slow)])
def test_every_method_is_quick_on_every_hostile_value(category: BfclCategory) -> None:
    task, data = all_classes().model_copy(update={"category": category}), load_data()
    tools = data.tools(task)
    assert len(tools) == 128
    slow = []
    for label, value in HOSTILE.items():
        host = ToolHost(task, tools, call_deadline_s=60.0)
        for tool in tools:
            names = list(tool.parameters["properties"])
            plain = dict.fromkeys(names, 2)
            for arguments in [dict.fromkeys(names, value), *({**plain, n: value} for n in names)]:
                # A call that burns CPU does so each time; a page fault or an import does not.
                seconds = timed(host, tool.name, arguments)[1]
                if seconds > LIMIT_S:
                    seconds = min(timed(host, tool.name, arguments)[1] for _ in range(2))
                if seconds > LIMIT_S:
                    slow.append((tool.name, label, list(arguments), round(seconds, 2)))
    assert slow == []


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("square_root", {"number": 2, "precision": 10**6}),
        ("power", {"base": 10, "exponent": 10**8}),
        ("logarithm", {"value": 3, "base": 7, "precision": 10**7}),
        ("logarithm", {"value": "1e99999999", "base": 7, "precision": 5}),
        ("round_number", {"number": 5, "decimal_places": -(10**9)}),
        ("round_number", {"number": 12345678901234567890, "decimal_places": -(10**8)}),
    ],
)
def test_inputs_that_take_half_a_minute_upstream_are_refused_at_once(
    env: BfclEnvironment, name: str, arguments: dict[str, Any]
) -> None:
    task_id = next(i for i, info in env.tasks().items() if "MathAPI" in info.classes)
    session = env.start(task_id, prefix_calls=0)
    started = time.thread_time()
    (observation,) = session.step(as_parsed([ToolCall(name=name, arguments=arguments)]))
    assert time.thread_time() - started < 0.1
    assert observation.is_error
    assert name in observation.content


def test_a_directory_tree_that_doubles_with_every_other_call() -> None:
    """A copy of d0 into which d0 is moved holds each path of d0 twice, and so on: 2^40 paths."""
    task = all_classes()
    host = ToolHost(task, load_data().tools(task), call_deadline_s=60.0)
    timed(host, "mkdir", {"dir_name": "d0"})
    for level in range(40):
        old, new = f"d{level}", f"d{level + 1}"
        for name in ("cp", "mv"):
            result, _ = timed(host, name, {"source": old, "destination": new})
            assert not result.is_error
    for name in ("find", "du"):
        result, seconds = timed(host, name, {})
        assert result.is_error
        assert "entries" in result.text
        assert seconds < LIMIT_S
    assert not timed(host, "ls", {})[0].is_error


def test_a_directory_in_itself_harms_neither_search_nor_verdict(env: BfclEnvironment) -> None:
    task_id = next(
        task_id
        for task_id, task in env.data.tasks.items()
        if "GorillaFileSystem" in task.classes and "cp" not in task.excluded
    )
    session = env.start(task_id, prefix_calls=0)
    calls = [
        ToolCall(name="mkdir", arguments={"dir_name": "a"}),
        ToolCall(name="cp", arguments={"source": "a", "destination": "a"}),
        ToolCall(name="find", arguments={}),
    ]
    errors = [observation.is_error for observation in session.step(as_parsed(calls))]
    assert errors == [False, False, True]
    outcome = session.finish()
    assert not outcome.passed
    assert outcome.verdict["reason"] == "end: state differs"
