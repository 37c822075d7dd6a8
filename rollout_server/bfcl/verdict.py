"""The exact verdict: bfcl-eval's state and response checks, on private instances.

A ``Verifier`` follows one episode with a second set of instances on which it runs the expert's
calls turn by turn. It never re-runs a call of the model, and touches none of bfcl-eval's globals.

Source:
    ``multi_turn_checker`` of bfcl-eval defines the per-turn verdict; the integration audit compares
    the two on the same episodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from miniverl_dist.errors import EnvironmentFaultError
from miniverl_dist.schemas.messages import FrozenModel, ToolCall
from rollout_server.bfcl import package
from rollout_server.bfcl.dispatch import ToolHost, faults
from rollout_server.bfcl.tasks import BfclTask


class Verdict(FrozenModel):
    """Every check of one finished episode."""

    passed: bool
    """State and responses at the end: the verdict that earns reward. It looks only at what the
    model itself did; a do-nothing policy never passes while an expert call is due."""
    state_only: bool
    """State at the end alone. A do-nothing policy passes it on many tasks whose last calls read
    but do not write."""
    response_only: bool
    """Every response of the expert's calls from step K on occurs among the model's responses."""
    official_per_turn: bool
    """bfcl-eval's own verdict: both checks after every turn, the replayed prefix counted as the
    model's. Stricter than ``passed`` on order, looser on responses (a prefix response counts)."""
    reason: str | None
    """The first check that failed, None where all passed."""

    def columns(self) -> dict[str, bool | float | str | None]:
        """The checks by name, for ``Outcome.verdict``."""
        return dict(self.model_dump())


def replay(host: ToolHost, task_id: str, calls: Sequence[ToolCall]) -> list[str]:
    """Run expert calls; returns their responses.

    Raises:
        EnvironmentFaultError: one of them failed, which no expert call of the data does.
    """
    responses = []
    for call in calls:
        result = host.call(call)
        if result.is_error:
            raise EnvironmentFaultError(
                f"BFCL {task_id}: the expert's own call {call.name}({call.arguments}) failed with "
                f"{result.text[:300]}; data and code of bfcl-eval do not fit each other"
            )
        responses.append(result.text)
    return responses


class Verifier:
    """Follows one episode; ``end_turn`` in order, then ``verdict`` once.

    Args:
        task: the task being played.
        expert_host: a fresh host of the same task, used by nobody else.
        prefix_calls: K, expert calls that were replayed on the model's host.
    """

    def __init__(self, task: BfclTask, expert_host: ToolHost, prefix_calls: int) -> None:
        self._task = task
        self._expert_host = expert_host
        self._prefix_calls = prefix_calls
        self._responses: list[str] = []
        self._num_turns_done = 0
        self._first_failure: str | None = None

    def skip_turn(self) -> None:
        """Pass over a turn that the prefix covers entirely: both hosts ran the same calls."""
        self._run_expert_turn()

    def end_turn(self, host: ToolHost, responses: Sequence[str], *, has_calls: bool) -> None:
        """Check the turn that just ended, as bfcl-eval does after each turn.

        Args:
            host: the model's host.
            responses: of all calls so far in the episode, the prefix included.
            has_calls: whether a call was made in this turn, the prefix included.
        """
        turn = self._num_turns_done
        expected = self._run_expert_turn()
        if self._first_failure is None and expected:
            self._first_failure = self._turn_failure(turn, host, responses, expected, has_calls)

    def _run_expert_turn(self) -> list[str]:
        calls = self._task.expert_turns[self._num_turns_done]
        self._num_turns_done += 1
        responses = replay(self._expert_host, self._task.task_id, calls)
        self._responses += responses
        return responses

    def _turn_failure(
        self,
        turn: int,
        host: ToolHost,
        responses: Sequence[str],
        expected: Sequence[str],
        has_calls: bool,
    ) -> str | None:
        if not has_calls:
            return f"turn {turn}: no call"
        if not self._states_agree(host):
            return f"turn {turn}: state differs"
        if not self._responses_cover(responses, expected):
            return f"turn {turn}: responses missing"
        return None

    def _states_agree(self, host: ToolHost) -> bool:
        with faults(f"{self._task.task_id}, state check"):
            return package.states_agree(host.instances, self._expert_host.instances)

    def _responses_cover(self, found: Sequence[str], expected: Sequence[str]) -> bool:
        with faults(f"{self._task.task_id}, response check"):
            return package.responses_cover(found, expected)

    def verdict(self, host: ToolHost, own_responses: Sequence[str]) -> Verdict:
        """The final verdict; turns that were never reached count as turns without calls.

        Args:
            host: the model's host.
            own_responses: of the calls that the model made itself, in full.
        """
        for turn in range(self._num_turns_done, len(self._task.expert_turns)):
            if self._run_expert_turn() and self._first_failure is None:
                self._first_failure = f"turn {turn}: not reached"
        state_agrees = self._states_agree(host)
        covered = self._responses_cover(own_responses, self._responses[self._prefix_calls :])
        reason = self._first_failure
        if not covered:
            reason = "end: responses missing"
        if not state_agrees:
            reason = "end: state differs"
        return Verdict(
            passed=state_agrees and covered,
            state_only=state_agrees,
            response_only=covered,
            official_per_turn=self._first_failure is None,
            reason=reason,
        )
