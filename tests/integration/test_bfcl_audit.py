"""The environment on all 200 tasks: the expert always passes, doing nothing never does."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from jsonschema import Draft202012Validator

from miniverl_dist.environments.base import Outcome, Session
from miniverl_dist.environments.players import as_parsed, play_expert, play_nothing
from rollout_server.bfcl.environment import BfclEnvironment

pytestmark = [
    pytest.mark.bfcl,
    pytest.mark.skipif(
        importlib.util.find_spec("bfcl_eval") is None,
        reason="bfcl-eval is not installed: scripts/install_bfcl.sh",
    ),
]

PERFECT = {
    "passed": True,
    "state_only": True,
    "response_only": True,
    "official_per_turn": True,
    "reason": None,
    "first_call_match": True,
}
UNTRUE_TO_ITS_SCHEMA = "multi_turn_base_173"
"""Its expert calls ``close_ticket(ticket_id='ticket_001')``, declared an integer."""


@pytest.fixture(scope="module")
def env() -> BfclEnvironment:
    return BfclEnvironment()


def test_peer_25_the_expert_passes_all_200_tasks_with_reward_one(env: BfclEnvironment) -> None:
    for task_id in env.tasks():
        outcome = play_expert(env.start(task_id, prefix_calls=0))
        assert outcome.verdict == PERFECT, task_id
        if task_id != UNTRUE_TO_ITS_SCHEMA:
            assert outcome.reward == pytest.approx(1.0), task_id


def test_the_expert_passes_all_1342_splits(env: BfclEnvironment) -> None:
    num_splits = 0
    for task_id, info in env.tasks().items():
        for prefix_calls in range(info.num_calls + 1):
            session = env.start(task_id, prefix_calls=prefix_calls)
            due = sum(len(calls) for calls in session.expert_tail())
            assert due == info.num_calls - prefix_calls
            assert play_expert(session).verdict == PERFECT, (task_id, prefix_calls)
            num_splits += 1
    assert num_splits == 1_342


def test_one_call_per_message_passes_as_well(env: BfclEnvironment) -> None:
    for task_id in env.tasks():
        session = env.start(task_id, prefix_calls=0)
        while True:
            while due := session.expert_tail()[0]:
                session.step(as_parsed(due[:1]))
            if session.next_user_turn() is None:
                break
        assert session.finish().verdict == PERFECT, task_id


def test_doing_nothing_never_passes_and_a_state_check_alone_would_let_it(
    env: BfclEnvironment,
) -> None:
    state_only = {}
    for tail_calls in range(1, 11):
        outcomes = [
            play_nothing(env.start(task_id, prefix_calls=info.num_calls - tail_calls))
            for task_id, info in env.tasks().items()
            if info.num_calls >= tail_calls
        ]
        assert not any(outcome.passed for outcome in outcomes)
        assert not any(outcome.reward for outcome in outcomes)
        state_only[tail_calls] = (
            sum(bool(o.verdict["state_only"]) for o in outcomes),
            len(outcomes),
        )
    first_four = {1: (74, 200), 2: (35, 200), 3: (17, 193), 4: (8, 173)}
    assert {tail_calls: state_only[tail_calls] for tail_calls in first_four} == first_four


def test_with_nothing_due_doing_nothing_passes(env: BfclEnvironment) -> None:
    for task_id, info in env.tasks().items():
        outcome = play_nothing(env.start(task_id, prefix_calls=info.num_calls))
        assert outcome.verdict == PERFECT, task_id
        assert outcome.reward == pytest.approx(1.0)


def play_put_off(session: Session) -> Outcome:
    """The expert's calls, all in the last user turn."""
    due = [call for calls in session.expert_tail() for call in calls]
    while session.next_user_turn() is not None:
        pass
    session.step(as_parsed(due))
    return session.finish()


def test_calls_put_off_to_the_last_turn_pass_at_the_end_but_hardly_per_turn(
    env: BfclEnvironment,
) -> None:
    outcomes = [play_put_off(env.start(task_id, prefix_calls=0)) for task_id in env.tasks()]
    assert sum(outcome.passed for outcome in outcomes) == 200
    assert sum(bool(outcome.verdict["official_per_turn"]) for outcome in outcomes) == 3


def test_schemas_are_valid_and_fit_all_expert_calls_but_one(env: BfclEnvironment) -> None:
    validators = {}
    for tool in (tool for tools in env.data.schemas.values() for tool in tools):
        Draft202012Validator.check_schema(tool.parameters)
        validators[tool.name] = Draft202012Validator(tool.parameters)
    assert len(validators) == 128
    unfit = [
        (task_id, call.name)
        for task_id, task in env.data.tasks.items()
        for call in task.expert_calls
        if not validators[call.name].is_valid(call.arguments)
    ]
    assert unfit == [(UNTRUE_TO_ITS_SCHEMA, "close_ticket")]


def test_16_concurrent_episodes_never_meet(env: BfclEnvironment) -> None:
    """800 episodes of all tasks in 16 threads end as each of them does alone.

    All sessions are open before the first one is played, and for every perfect episode of a task
    there is one that leaves it undone.
    """
    assignments = [
        (task_id, prefix_calls, play)
        for task_id, info in env.tasks().items()
        for prefix_calls in (0, info.num_calls // 2)
        for play in (play_expert, play_nothing)
    ]
    assert len(assignments) == 800
    alone = [play(env.start(task_id, prefix_calls=k)) for task_id, k, play in assignments]
    barrier = Barrier(16)

    def worker(number: int) -> list[tuple[int, Outcome]]:
        mine = [(index, assignments[index]) for index in range(number, 800, 16)]
        sessions = [(index, a[2], env.start(a[0], prefix_calls=a[1])) for index, a in mine]
        barrier.wait(timeout=60)
        return [(index, play(session)) for index, play, session in sessions]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(16) as pool:
            together = dict(pair for pairs in pool.map(worker, range(16)) for pair in pairs)
    finally:
        sys.setswitchinterval(interval)
    assert [together[index] for index in range(800)] == alone
    expected = [play is play_expert or k == env.tasks()[t].num_calls for t, k, play in assignments]
    assert [outcome.passed for outcome in alone] == expected
