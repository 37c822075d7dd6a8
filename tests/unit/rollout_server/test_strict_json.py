from __future__ import annotations

import pytest

from miniverl_dist.errors import RecordError
from rollout_server.strict_json import dumps, loads


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("NaN", "not finite"),
        ("[1e999]", "not finite"),
        ('"\\ud800"', "surrogate"),
        ('{"\\ud800": 1}', "surrogate"),
        (nested(65), "more than 64 levels"),
        (nested(100_000), "nested too deeply"),
        ("{", "Expecting"),
    ],
)
def test_what_could_not_be_written_again_is_not_read(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        loads(text)


@pytest.mark.parametrize(
    "text", ['{"a": [1, 0.5, null, true, "α"]}', nested(64), '"\\ud83d\\ude00"']
)
def test_what_is_read_can_be_written(text: str) -> None:
    assert loads(dumps(loads(text))) == loads(text)


@pytest.mark.parametrize("value", [float("inf"), {1, 2}, b"x"])
def test_what_is_no_json_is_not_written(value: object) -> None:
    with pytest.raises(RecordError, match="is not JSON"):
        dumps(value)
