from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from miniverl_dist.errors import EnvironmentFaultError
from miniverl_dist.schemas.messages import ToolCall
from rollout_server.bfcl.dispatch import ToolHost
from rollout_server.bfcl.tasks import BfclTask, load_data
from rollout_server.bfcl.verdict import Verdict, Verifier, replay

pytestmark = [
    pytest.mark.bfcl,
    pytest.mark.skipif(
        importlib.util.find_spec("bfcl_eval") is None,
        reason="bfcl-eval is not installed: scripts/install_bfcl.sh",
    ),
]


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


MKDIR, TOUCH, LS = call("mkdir", dir_name="d"), call("touch", file_name="f"), call("ls")
SORT = call("sort", file_name="notes")

TASK = BfclTask(
    task_id="made_up",
    turns=("make d", "thanks", "make f, sort notes", "bye"),
    initial_config={
        "GorillaFileSystem": {
            "root": {
                "home": {
                    "type": "directory",
                    "contents": {"notes": {"type": "file", "content": "b\na"}},
                }
            }
        }
    },
    classes=("GorillaFileSystem",),
    expert_turns=((MKDIR,), (), (TOUCH, SORT), ()),
)
MakeHost = Callable[[], ToolHost]


@pytest.fixture
def make_host() -> MakeHost:
    tools = load_data().tools(TASK)
    return lambda: ToolHost(TASK, tools, call_deadline_s=5.0)


def play(make_host: MakeHost, *turns: list[ToolCall], prefix_calls: int = 0) -> Verdict:
    """Verdict of an episode that makes these calls, one list per turn from the first one on."""
    host, verifier = make_host(), Verifier(TASK, make_host(), prefix_calls)
    responses = replay(host, TASK.task_id, TASK.expert_calls[:prefix_calls])
    first_turn = TASK.turn_of_call(prefix_calls)
    for _ in range(first_turn):
        verifier.skip_turn()
    for number, calls in enumerate(turns):
        responses += [host.call(made).text for made in calls]
        covered = number == 0 and prefix_calls == 2  # the call of turn 2 that the prefix made
        verifier.end_turn(host, responses, has_calls=bool(calls) or covered)
    return verifier.verdict(host, responses[prefix_calls:])


def test_the_expert_passes_every_check(make_host: MakeHost) -> None:
    verdict = play(make_host, [MKDIR], [], [TOUCH, SORT], [])
    assert verdict.columns() == {
        "passed": True,
        "state_only": True,
        "response_only": True,
        "official_per_turn": True,
        "reason": None,
    }


def test_order_within_a_turn_is_free(make_host: MakeHost) -> None:
    assert play(make_host, [MKDIR], [], [SORT, LS, TOUCH], []).official_per_turn


def test_calls_put_off_pass_at_the_end_but_not_per_turn(make_host: MakeHost) -> None:
    verdict = play(make_host, [], [], [], [MKDIR, TOUCH, SORT])
    assert verdict.passed
    assert not verdict.official_per_turn
    assert verdict.reason == "turn 0: no call"


def test_calls_made_early_fail_the_state_check_of_the_turn(make_host: MakeHost) -> None:
    verdict = play(make_host, [MKDIR, TOUCH], [], [SORT], [])
    assert verdict.passed
    assert verdict.reason == "turn 0: state differs"


def test_responses_of_earlier_turns_count_in_later_ones(make_host: MakeHost) -> None:
    assert play(make_host, [MKDIR, SORT], [], [TOUCH], []).official_per_turn


def test_a_missing_response_fails_both(make_host: MakeHost) -> None:
    verdict = play(make_host, [MKDIR], [], [TOUCH], [])
    assert (verdict.state_only, verdict.response_only, verdict.passed) == (True, False, False)
    assert not verdict.official_per_turn
    assert verdict.reason == "end: responses missing"


def test_a_wrong_state_fails_though_all_responses_are_there(make_host: MakeHost) -> None:
    verdict = play(make_host, [MKDIR], [], [TOUCH, SORT], [call("rm", file_name="f")])
    assert (verdict.state_only, verdict.response_only, verdict.passed) == (False, True, False)
    assert verdict.official_per_turn  # upstream does not look after the last expert turn
    assert verdict.reason == "end: state differs"


def test_turns_that_were_never_reached_fail_unless_nothing_was_due(make_host: MakeHost) -> None:
    assert play(make_host, [MKDIR], [], [TOUCH, SORT]).official_per_turn
    verdict = play(make_host, [MKDIR])
    assert not verdict.official_per_turn
    assert verdict.reason == "end: state differs"
    assert play(make_host, [MKDIR, TOUCH, SORT]).reason == "turn 0: state differs"


def test_each_response_counts_once(make_host: MakeHost) -> None:
    # mkdir and touch both answer None: one of them does not cover the other.
    verdict = play(make_host, [MKDIR], [], [SORT], [])
    assert not verdict.response_only


def test_the_prefix_is_not_the_model_s_own_work(make_host: MakeHost) -> None:
    # The prefix made mkdir and touch; a model that does nothing has the right state.
    verdict = play(make_host, [], [], prefix_calls=2)
    assert (verdict.state_only, verdict.passed) == (True, False)
    assert play(make_host, [SORT], [], prefix_calls=2).passed
    assert play(make_host, [SORT], [], prefix_calls=2).official_per_turn


def test_prefix_responses_do_not_cover_what_is_due(make_host: MakeHost) -> None:
    # K = 1: mkdir answered None before; touch, which answers None too, is still due.
    verdict = play(make_host, [SORT], [], prefix_calls=1)
    assert not verdict.response_only


def test_replay_refuses_an_expert_call_that_fails(make_host: MakeHost) -> None:
    with pytest.raises(EnvironmentFaultError, match="made_up: the expert's own call cat"):
        replay(make_host(), "made_up", [LS, call("cat", file_name="nothing")])
