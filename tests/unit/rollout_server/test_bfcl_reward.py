from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from miniverl_dist.config.recipe import RewardWeights
from miniverl_dist.errors import EnvironmentFaultError
from miniverl_dist.schemas.messages import ToolCall, ToolSchema
from rollout_server.bfcl.reward import (
    DEFAULT_WEIGHTS,
    CallLike,
    RewardParts,
    normalized,
    partial_credit,
    same_call,
    trajectory_reward,
)
from tests.reference.reward import reference_credit, reference_reward


def schema(name: str, required: list[str] | None = None, **properties: str) -> ToolSchema:
    return ToolSchema(
        name=name,
        description="",
        parameters={
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in properties.items()},
            "required": list(properties) if required is None else required,
        },
    )


SCHEMAS = [
    schema("ls", required=[], a="boolean"),
    schema("cd", folder="string"),
    schema("mv", source="string", destination="string"),
    schema("buy", symbol="string", amount="integer", price="number"),
    ToolSchema(
        name="tag",
        description="",
        parameters={
            "type": "object",
            "properties": {
                "names": {"type": "array", "items": {"type": "string"}},
                "extra": {
                    "type": "object",
                    "properties": {"n": {"type": "integer"}},
                    "required": ["n"],
                },
            },
            "required": ["names"],
        },
    ),
]
PARAMETERS = {tool.name: tool.parameters for tool in SCHEMAS}


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


EXPERT = [
    call("cd", folder="docs"),
    call("mv", source="a.txt", destination="b.txt"),
    call("buy", symbol="AAPL", amount=3, price=10.5),
]


def reward(
    student: Sequence[CallLike],
    expert: Sequence[CallLike],
    passed: bool | None = True,
    *,
    successes: list[bool] | None = None,
    tail_calls: int | None = None,
    weights: RewardWeights = DEFAULT_WEIGHTS,
) -> RewardParts:
    return trajectory_reward(
        student,
        [True] * len(student) if successes is None else successes,
        expert,
        SCHEMAS,
        passed,
        len(expert) if tail_calls is None else tail_calls,
        weights=weights,
    )


class TestTotal:
    def test_perfect_episode_earns_one(self) -> None:
        assert reward(EXPERT, EXPERT).total == pytest.approx(1.0, abs=1e-12)

    def test_hand_computed_mixture(self) -> None:
        # Call 1 perfect; call 2 has one of two values right; call 3 missing.
        parts = reward(
            [EXPERT[0], call("mv", source="a.txt", destination="c.txt")],
            EXPERT,
            passed=False,
            successes=[True, False],
        )
        second = 0.20 + 0.15 + 0.15 + 0.5 * (0.4 + 0.3 + 0.3 * 1 / 2)
        assert parts.mean_partial == pytest.approx((1 + second + 0) / 3)
        assert parts.first_call == pytest.approx(1.0)
        assert parts.exec_score == 0.5
        assert parts.terminal_pass == 0.0
        assert parts.total == pytest.approx(0.25 * (1 + second) / 3 + 0.20 + 0.05)

    def test_without_verdict_the_total_is_the_mean_partial_credit(self) -> None:
        parts = reward(EXPERT[:1], EXPERT, passed=None)
        assert parts.total == parts.mean_partial == pytest.approx(1 / 3)

    def test_no_calls_earn_nothing(self) -> None:
        assert reward([], EXPERT, passed=False).total == 0.0

    def test_extra_calls_earn_nothing(self) -> None:
        extra = reward([*EXPERT, *EXPERT], EXPERT)
        assert extra == reward(EXPERT, EXPERT)

    def test_an_unreadable_call_is_zero_at_its_own_place_only(self) -> None:
        parts = reward([None, EXPERT[1], EXPERT[2]], EXPERT, successes=[False, True, True])
        assert parts.first_call == 0.0
        assert parts.mean_partial == pytest.approx(2 / 3)
        assert parts.exec_score == pytest.approx(2 / 3)

    def test_nothing_due(self) -> None:
        assert reward([], []).total == pytest.approx(1.0)
        assert reward([EXPERT[0]], [], successes=[False]).exec_score == 0.0

    def test_reward_is_not_divided_by_t_larger_than_n(self) -> None:
        parts = reward(EXPERT, EXPERT, tail_calls=7)
        assert parts.mean_partial == pytest.approx(1.0)
        assert parts.total == pytest.approx(1.0)

    def test_of_a_longer_expert_list_the_tail_counts(self) -> None:
        parts = reward(EXPERT[1:], EXPERT, tail_calls=2)
        assert parts.total == pytest.approx(1.0)

    def test_weights_are_used(self) -> None:
        weights = RewardWeights(mean_partial=0.0, first_call=0.0, exec_score=1.0, terminal_pass=0.0)
        parts = reward(EXPERT, EXPERT, successes=[True, False, False], weights=weights)
        assert parts.total == pytest.approx(1 / 3)

    def test_weights_refuse_negative_numbers(self) -> None:
        with pytest.raises(ValueError, match="exec_score"):
            RewardWeights(exec_score=-0.1)

    @pytest.mark.parametrize(("successes", "tail_calls"), [([True], 3), ([True] * 3, -1)])
    def test_lengths_that_do_not_fit_are_a_fault(
        self, successes: list[bool], tail_calls: int
    ) -> None:
        with pytest.raises(EnvironmentFaultError, match="expected one per call"):
            reward(EXPERT, EXPERT, successes=successes, tail_calls=tail_calls)


class TestPartialCredit:
    @pytest.mark.parametrize(
        ("student", "expected"),
        [
            (call("cd", folder="docs"), 1.0),
            (call("cd", folder="src"), 0.5 + 0.5 * 0.7),
            (call("cd", folder=1), 0.35 + 0.5 * 0.7),  # not of the schema
            (call("cd"), 0.35 + 0.5 * 0.4),
            (call("cd", folder="docs", now=True), 0.5 + 0.5 * (0.4 + 0.15 + 0.3)),
            (call("ls"), 0.30),
            (call("rm", folder="docs"), 0.5 * 0.6),  # no such tool
            (call("rm"), 0.0),
        ],
    )
    def test_terms(self, student: ToolCall, expected: float) -> None:
        assert partial_credit(student, EXPERT[0], PARAMETERS) == pytest.approx(expected)

    def test_calls_without_arguments_match_fully(self) -> None:
        assert partial_credit(call("ls"), call("ls"), PARAMETERS) == pytest.approx(1.0)

    @pytest.mark.parametrize("arguments", ['{"folder": "docs"', "[1]", "null", 3, None])
    def test_arguments_that_are_no_object_are_unreadable(self, arguments: object) -> None:
        student = {"name": "cd", "arguments": arguments}
        assert partial_credit(student, EXPERT[0], PARAMETERS) == 0.0

    def test_arguments_may_be_json_text(self) -> None:
        student = {"name": "cd", "arguments": '{"folder": "docs"}'}
        assert partial_credit(student, EXPERT[0], PARAMETERS) == pytest.approx(1.0)


EQUAL = [
    ("Docs", " docs "),
    ("a  b\n c", "A b c"),
    (1, 1.0),
    (["A", {"k": "B "}], ["a", {"k": "b"}]),
    ("id 123e4567-e89b-12d3-a456-426614174000.", "id 00000000-E89B-12d3-a456-426614174abc."),
    ("at 2024-01-02T03:04:05Z", "at 1999-12-31 23:59"),
    ("at 2024-01-02T03:04:05.123+02:00!", "at 1999-12-31 23:59!"),
    ("cat /tmp/abc/x.txt", "cat /tmp/y"),
    ("/tmp/123e4567-e89b-12d3-a456-426614174000/a", "/tmp/b"),
]
DIFFERENT = [
    ("docs", "doc"),
    (1, True),
    (0, False),
    (1, "1"),
    (None, "none"),
    ([1, 2], [2, 1]),
    ([1], [1, 1]),
    ({"a": 1}, {"b": 1}),
    ("2024-01-02", "2024-01-03"),
    ("x123e4567-e89b-12d3-a456-426614174000", "x023e4567-e89b-12d3-a456-426614174000"),
    ("/home/tmp/a", "/home/tmp/b"),
    ("/tmp", "/tmp/b"),
]


@pytest.mark.parametrize(("left", "right"), EQUAL)
def test_values_that_count_as_equal(left: object, right: object) -> None:
    assert normalized(left) == normalized(right)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_values_that_differ(left: object, right: object) -> None:
    assert normalized(left) != normalized(right)


TEXTS = [
    "docs",
    "Docs ",
    "a  b",
    "A B",
    "2024-01-02",
    "2024-01-02 03:04",
    "2024-01-02T03:04:05Z",
    "2024-01-02t03:04:05.25-0300",
    "2024-01-02 03:04:05x",
    "2024-01-02 03:04:0",
    "123e4567-e89b-12d3-a456-426614174000",
    "023E4567-e89b-12d3-a456-426614174000",
    "_123e4567-e89b-12d3-a456-426614174000",
    "/tmp/a b",
    "/tmp/c b",
    "/tmp/",
    "x/tmp/a",
    "'/tmp/q'",
    "1",
    "",
]
NUMBERS: list[Any] = [0, 1, 1.0, 2, 2.5, -1, True, False, None]


def random_value(rng: random.Random, depth: int = 0) -> object:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(TEXTS)
    if kind < 0.8 or depth == 2:
        return rng.choice(NUMBERS)
    if kind < 0.9:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {
        key: random_value(rng, depth + 1)
        for key in rng.sample(["n", "source", "x"], rng.randrange(3))
    }


def random_call(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(["ls", "cd", "mv", "buy", "tag", "fly", "CD"])
    keys = ["a", "folder", "source", "destination", "symbol", "amount", "price", "names", "extra"]
    if name in PARAMETERS and rng.random() < 0.7:
        keys = list(PARAMETERS[name]["properties"])
    arguments = {
        key: random_value(rng) for key in rng.sample(keys, rng.randint(0, min(3, len(keys))))
    }
    return {"name": name, "arguments": arguments}


def disturbed(rng: random.Random, expert: dict[str, Any]) -> CallLike:
    """The expert's call, another one, or something in between."""
    kind = rng.random()
    if kind < 0.25:
        return random_call(rng)
    if kind < 0.35:
        return rng.choice(
            [None, {"name": "cd"}, {"arguments": {}}, {"name": "cd", "arguments": '{"a":1'}]
        )
    arguments = dict(expert["arguments"])
    for key in list(arguments):
        if rng.random() < 0.3:
            arguments[key] = random_value(rng)
        elif rng.random() < 0.1:
            del arguments[key]
    found = {"name": expert["name"], "arguments": arguments}
    if rng.random() < 0.2:
        return found | {"arguments": json.dumps(arguments)}
    return ToolCall(**found) if rng.random() < 0.2 else found


def as_raw(value: CallLike) -> Mapping[str, Any] | None:
    return value.model_dump() if isinstance(value, ToolCall) else value


def test_agrees_with_the_slow_oracle_on_10_000_call_lists() -> None:
    rng = random.Random(2024)
    totals = set()
    for _ in range(10_000):
        expert = [random_call(rng) for _ in range(rng.randrange(5))]
        student = [disturbed(rng, wanted) for wanted in expert][: rng.randint(0, 5)]
        student += [random_call(rng) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
        successes = [rng.random() < 0.7 for _ in student]
        passed = rng.choice([True, False, None])
        found = reward(student, expert, passed=passed, successes=successes)
        expected = reference_reward(
            [as_raw(item) for item in student], successes, expert, PARAMETERS, passed
        )
        for name, value in expected.items():
            assert getattr(found, name) == pytest.approx(float(value), abs=1e-12), (name, student)
        totals.add(round(found.total, 6))
    assert len(totals) > 1_000  # the lists are not all alike


def test_default_weights_make_one_per_level() -> None:
    weights = DEFAULT_WEIGHTS
    whole = weights.mean_partial + weights.first_call + weights.exec_score + weights.terminal_pass
    per_call = (
        weights.call_name + weights.call_known + weights.call_schema_valid + weights.call_structure
    )
    structure = weights.structure_name + weights.structure_keys + weights.structure_values
    assert (whole, per_call, structure) == pytest.approx((1, 1, 1))


def test_the_oracle_itself_on_a_hand_computed_pair() -> None:
    credit = reference_credit(
        {"name": "mv", "arguments": {"source": "A.txt", "to": "b"}},
        {"name": "mv", "arguments": {"source": "a.txt", "destination": "b"}},
        PARAMETERS,
    )
    # 0.20 name + 0.15 known + 0 (destination is missing) + 0.5 (0.4 + 0.15 overlap + 0.3 * 1/1)
    assert float(credit) == pytest.approx(0.35 + 0.5 * 0.85)


@pytest.mark.parametrize(
    ("found", "is_same"),
    [
        (call("cd", folder="Docs", depth=1), True),
        (call("cd", depth=1.0, folder=" docs "), True),
        ({"name": "cd", "arguments": '{"folder": "Docs", "depth": 1}'}, True),
        (call("ls", folder="Docs", depth=1), False),
        (call("cd", folder="Docs"), False),
        (call("cd", folder="Docs", depth=1, more=0), False),
        (call("cd", folder="Docs", depth=True), False),
        ({"name": "cd", "arguments": "no JSON"}, False),
        (None, False),
    ],
)
def test_same_call_compares_name_and_normalised_arguments(found: CallLike, is_same: bool) -> None:
    wanted = call("cd", folder="Docs", depth=1)
    assert same_call(found, wanted) is is_same
    assert same_call(wanted, found) is is_same
