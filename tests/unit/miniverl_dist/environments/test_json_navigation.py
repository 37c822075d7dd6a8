from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.config.environments import JsonNavigationConfig
from miniverl_dist.environments.json_navigation import JsonTools, json_navigation
from miniverl_dist.environments.question_tasks import ToolError
from miniverl_dist.schemas.messages import ParsedCall
from tests.support.question_audit import audit, play_messages, random_calls, refused, told

ENV = json_navigation(JsonNavigationConfig(num_tasks=30))
TASK_IDS = tuple(ENV.tasks())
DOCUMENT = {
    "a": {"b": [1, {"c/d": True, "e~f": None, "~1": "tilde"}], "": "empty"},
    "text": "x",
    "0": {"0": 2.5, "many": list(range(11))},
}


def ask(name: str, path: object) -> str:
    return JsonTools(DOCUMENT).call(name, {"path": path}).text


@pytest.mark.parametrize("seed", range(3))
def test_audit(seed: int) -> None:
    audit(json_navigation(JsonNavigationConfig(num_tasks=90, seed=seed)))


@settings(max_examples=40)
@given(
    task_id=st.sampled_from(TASK_IDS),
    messages=st.lists(
        st.lists(random_calls(tuple(ENV.schemas), ("path", "answer")), max_size=3), max_size=3
    ),
)
def test_no_call_breaks_it(task_id: str, messages: Sequence[Sequence[ParsedCall]]) -> None:
    hidden = ENV.questions[task_id].question.hidden
    before = copy.deepcopy(hidden)
    play_messages(ENV.start(task_id, prefix_calls=0), messages)
    assert hidden == before


@pytest.mark.parametrize(
    ("name", "path", "text"),
    [
        ("keys", "", '["a", "text", "0"]'),
        ("keys", "/", '["a", "text", "0"]'),
        ("keys", "/a/b/1", '["c/d", "e~f", "~1"]'),
        ("length", "/a/b", "2"),
        ("length", "/a", "2"),
        ("get", "/a/b/0", "1"),
        ("get", "/a/b/1/c~1d", "true"),
        ("get", "/a/b/1/e~0f", "null"),
        ("get", "/a/b/1/~01", "tilde"),
        ("get", "/0/many/10", "10"),
        ("get", "/a/", "empty"),
        ("get", "/text", "x"),
        ("get", "/0/0", "2.5"),
    ],
)
def test_pointers(name: str, path: str, text: str) -> None:
    assert ask(name, path) == text


@pytest.mark.parametrize(
    ("name", "path", "problem"),
    [
        ("get", "/nothing", "there is no key 'nothing' at /"),
        ("get", "/a/b/2", "there is no index '2' at /a/b: the list has 2 entries"),
        ("get", "/a/b/-1", "no index '-1'"),
        ("get", "/a/b/01", "no index '01'"),
        ("get", "/a/b/00", "no index '00'"),
        ("get", "/a/b/٠", "no index '٠'"),
        ("get", "/a/b/²", "no index '²'"),
        ("get", "/0/many/1٠", "no index '1٠'"),
        ("get", "/a/b/" + "9" * 400, "no index '999"),
        ("get", "/text/0", "/text is a single value and has no '0'"),
        ("get", "/text/__class__", "is a single value"),
        ("get", "/__class__", "no key '__class__'"),
        ("get", "a/b", "path 'a/b' must begin with /"),
        ("get", "/a", "get: /a is an object: use keys or length"),
        ("get", "", "get: / is an object"),
        ("get", "/a/b", "is a list of 2: use length, or an index"),
        ("keys", "/a/b", "keys: /a/b is a list"),
        ("keys", "/text", "keys: /text is a single value: use get"),
        ("length", "/text", "length: /text is a single value"),
        ("get", None, "path must be a text, found NoneType"),
        ("get", 3, "path must be a text, found int"),
        ("get", ["/a"], "path must be a text, found list"),
    ],
)
def test_what_it_refuses(name: str, path: object, problem: str) -> None:
    with pytest.raises(ToolError) as caught:
        ask(name, path)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 250


def test_a_long_walk_ends_at_once_and_is_not_repeated_in_full() -> None:
    session = ENV.start(TASK_IDS[0], prefix_calls=0)
    assert "no key ''" in refused(session, "get", path="/" * 19_000)


def by_question(text: str, document: dict[str, Any]) -> object:
    """The answer by reading the question again, not by the drawing's own steps."""
    words = text.removesuffix("?").split()
    if text.startswith("How many people"):
        return len(document[words[-1]]["staff"])
    field = words[3]
    if "It is at" in text:
        _, department, key = text.removesuffix(".").rsplit(" ", 1)[1].split("/")
        return document[department][key]
    if "the last person on" in text:
        return document[words[-1].split("/")[1]]["staff"][-1][field]
    (person,) = [p for p in document[words[-1]]["staff"] if p["name"] == words[5]]
    return person[field]


@pytest.mark.parametrize("seed", [0, 7])
def test_the_answer_is_that_of_the_question(seed: int) -> None:
    env = json_navigation(JsonNavigationConfig(num_tasks=150, seed=seed))
    for task in env.questions.values():
        found = by_question(task.question.text, task.question.hidden)
        assert str(found) == task.question.answer, task.question.text


def test_the_document_is_nowhere_in_the_prompt() -> None:
    for task_id in TASK_IDS:
        session = ENV.start(task_id, prefix_calls=0)
        shown = json.dumps([m.content for m in session.opening()]) + str(session.tools())
        answer = str(ENV.questions[task_id].question.answer)
        assert answer not in shown or len(answer) == 1, (answer, shown)


def test_keys_and_names_may_be_submitted_as_seen() -> None:
    session = ENV.start("json_navigation_easy_000", prefix_calls=0)
    department = json.loads(told(session, "keys", path="/"))[0]
    assert json.loads(told(session, "keys", path=f"/{department}"))[-1] == "staff"
    told(session, "submit", answer="staff")
    verdict = session.finish().verdict
    assert (verdict["answer_correct"], verdict["reason"]) == (False, "wrong answer")
