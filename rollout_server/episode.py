"""One episode: the policy writes, the environment answers, until exactly one reason ends it.

    opening -> [policy turn -> calls? -> observations | next user turn]* -> verdict -> Trajectory

A turn without calls hands over to the next user turn; without one the episode is over
(``final_answer``). Harness faults end the episode too, typed, and are never scored.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from miniverl_dist.config.recipe import RolloutConfig
from miniverl_dist.environments.base import Environment, Observation, Outcome, Session
from miniverl_dist.errors import (
    DeadlineError,
    EngineError,
    EngineLostError,
    EnvironmentFaultError,
    GenerateApiError,
    PrefixPropertyError,
    TokenizerError,
)
from miniverl_dist.ports import Assignment, ChatFormat, Clock
from miniverl_dist.schemas.messages import (
    CallError,
    Message,
    ParsedCall,
    ParseStatus,
    ToolSchema,
)
from miniverl_dist.schemas.running_episode import RunningEpisode
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.schemas.trajectory import (
    HARNESS_TERMINATIONS,
    SamplingRecord,
    SpanKind,
    Termination,
    Trajectory,
    mask_from_spans,
)
from rollout_server.off_loop import OffLoop
from rollout_server.policies import Moment, Policy, Turn, turn_seed
from rollout_server.tool_calls import ToolCallParser
from rollout_server.transcript import Transcript


@dataclass
class _Tally:
    """What the limits of an episode count."""

    calls: list[ParsedCall] = field(default_factory=list)
    successes: list[bool] = field(default_factory=list)
    errors: list[CallError | None] = field(default_factory=list)
    turns: int = 0
    turns_since_user: int = 0
    parse_errors_in_a_row: int = 0
    tool_errors_in_a_row: int = 0
    repeats_in_a_row: int = 0
    last_call: str | None = None

    def count(self, calls: Sequence[ParsedCall], observations: Sequence[Observation]) -> None:
        """Count one assistant message's calls with what they gave back."""
        for call, observation in zip(calls, observations, strict=True):
            self.calls.append(call)
            self.successes.append(not observation.is_error)
            self.errors.append(observation.error)
            self.tool_errors_in_a_row = self.tool_errors_in_a_row + 1 if observation.is_error else 0
            key = (
                call.raw
                if call.call is None
                else json.dumps(call.call.model_dump(), sort_keys=True)
            )
            self.repeats_in_a_row = self.repeats_in_a_row + 1 if key == self.last_call else 1
            self.last_call = key
        unparsed = all(call.status is not ParseStatus.OK for call in calls)
        self.parse_errors_in_a_row = self.parse_errors_in_a_row + 1 if unparsed else 0


@dataclass(frozen=True)
class Stage:
    """What every episode of a run shares, whoever plays."""

    environment: Environment
    chat: ChatFormat
    """Format of the playing policy's own tokenizer."""
    parse: ToolCallParser
    limits: RolloutConfig


@dataclass(frozen=True)
class TurnBudget:
    """An episode may take ``turns_per_call * T`` turns, at least ``min_turns``."""

    turns_per_call: int = 2
    min_turns: int = 4
    is_capped: bool = True
    """Whether ``rollout.max_turns`` bounds it too."""

    def turns(self, tail_calls: int, max_turns: int) -> int:
        """Assistant turns of an episode with ``tail_calls`` expert calls left."""
        wanted = max(self.turns_per_call * tail_calls, self.min_turns)
        return min(max_turns, wanted) if self.is_capped else wanted


class EpisodeWatcher(Protocol):
    """Told how episodes go, on the event loop; it must not block or raise, and changes nothing."""

    def turn(self, episode: RunningEpisode) -> None:
        """The policy has written a turn, and will write another."""

    def end(self, trajectory_id: str, *, will_be_scored: bool) -> None:
        """No turn follows; ``will_be_scored``: there is a trajectory to train on."""


TRAINING_BUDGET = TurnBudget()
EVALUATION_BUDGET = TurnBudget(min_turns=0, is_capped=False)


class EpisodePlayer:
    """Implements `ports.RolloutSource` for one policy; holds no state between episodes."""

    def __init__(
        self,
        stage: Stage,
        policy: Policy,
        *,
        seed: int,
        clock: Clock,
        budget: TurnBudget = TRAINING_BUDGET,
        sampling: SamplingRecord | None = None,
        watcher: EpisodeWatcher | None = None,
    ) -> None:
        """Wire an episode's parts.

        Args:
            stage: Environment, format, parser and limits.
            policy: Writes the assistant turns.
            seed: All of an episode's randomness derives from it, the ticket and the member.
            clock: For diagnostics only.
            budget: How many turns an episode may take.
            sampling: What the record says about sampling; default: that of the stage's limits.
            watcher: Told of turns and ends.
        """
        self.stage, self.policy, self.clock, self.budget = stage, policy, clock, budget
        self.off_loop = OffLoop(stage.limits.environment_threads)
        self.watcher = watcher
        self._seed = seed
        self.sampling = sampling or SamplingRecord(
            temperature=stage.limits.temperature, max_new_tokens=stage.limits.max_new_tokens
        )

    async def rollout(self, assignment: Assignment, member: int) -> Trajectory:
        """Play one episode; see `ports.RolloutSource`."""
        seed = derive_seed(
            self._seed, assignment.ticket, assignment.attempt, assignment.task_id, member
        )
        episode = _Episode(self, assignment, member, seed)
        started = self.clock.now()
        try:
            termination, error = await self._play(episode)
            seconds = self.clock.now() - started
            played = await self.off_loop.run(
                lambda: episode.finish(termination, error, seconds=seconds)
            )
        except BaseException:
            episode.tell_end(will_be_scored=False)
            raise
        finally:
            episode.close()  # a stop cancels episodes in the middle
        episode.tell_end(will_be_scored=played.is_trainable)
        return played

    async def _play(self, episode: _Episode) -> tuple[Termination, str | None]:
        """Play with the deadline; a fault of the harness becomes a termination."""
        try:
            async with asyncio.timeout(self.stage.limits.episode_deadline_s):
                return await episode.play(), None
        except (TimeoutError, DeadlineError) as error:
            return Termination.DEADLINE, str(error) or "episode deadline passed"
        except EnvironmentFaultError as error:
            return Termination.ENVIRONMENT_ERROR, str(error)
        except EngineLostError:
            raise  # no fault of this episode: whoever keeps the engines plays it again
        except (EngineError, GenerateApiError, TokenizerError) as error:
            return Termination.ENGINE_ERROR, str(error)


class _Episode:
    """State of one running episode."""

    def __init__(
        self, player: EpisodePlayer, assignment: Assignment, member: int, seed: int
    ) -> None:
        self._player, self._limits, self._chat = player, player.stage.limits, player.stage.chat
        self._assignment, self._seed = assignment, seed
        self._trajectory_id = f"{assignment.group_id}.{member}"
        self._session: Session | None = None
        self._schemas: Mapping[str, ToolSchema] = {}
        self._transcript = Transcript(self._chat, ())
        self._tally = _Tally()
        self._seen: list[int] = []
        self._max_turns = player.budget.turns(assignment.tail_calls, self._limits.max_turns)
        info = player.stage.environment.tasks().get(assignment.task_id)
        self._max_turns += info.extra_turns if info else 0  # an unknown task fails when it starts

    async def play(self) -> Termination:
        session = await self._player.off_loop.run(self._open)
        while self._tally.turns < self._max_turns:
            prompt = self._extended_prompt()
            room = self._limits.max_context_tokens - len(prompt)
            if room <= 0:
                return Termination.MAX_TOKENS
            self._tell_turn()
            moment = Moment(
                turn_seed(self._seed, self._tally.turns),
                room,
                self._tally.turns_since_user,
                tuple(self._transcript.messages),
            )
            # Waits for the engine; the engine's own deadline and the episode's bound it.
            turn = await self._player.policy.act(prompt, session, moment)
            ended = await self._player.off_loop.run(lambda: self._take(turn, session))  # noqa: B023 - awaited at once
            if ended is not None:
                return ended
        return Termination.MAX_TURNS

    def _open(self) -> Session:
        """Replay the prefix and write down what the model sees first."""
        session = self._session = self._player.stage.environment.start(
            self._assignment.task_id, prefix_calls=self._assignment.prefix_calls
        )
        self._schemas = session.call_schemas()
        self._transcript = Transcript(self._chat, session.tools())
        self._transcript.add_messages(session.opening())
        return session

    def _extended_prompt(self) -> list[int]:
        """The next prompt; it must begin with everything that was sent or sampled before.

        Raises:
            PrefixPropertyError: a former token has changed, which would also defeat every cache.
        """
        prompt = self._transcript.open_assistant()
        if prompt[: len(self._seen)] != self._seen:
            where = next(
                i for i, (a, b) in enumerate(zip(prompt, self._seen, strict=False)) if a != b
            )
            raise PrefixPropertyError(
                f"task {self._assignment.task_id}: the prompt of turn {self._tally.turns} differs "
                f"from the episode so far at token {where}; later turns may only append"
            )
        return prompt

    def _tell_turn(self) -> None:
        """Show the record to a watcher, once the policy has written something."""
        if self._player.watcher is None or self._tally.turns == 0:
            return
        transcript = self._transcript
        self._player.watcher.turn(
            RunningEpisode(
                trajectory_id=self._trajectory_id,
                group_id=self._assignment.group_id,
                task_id=self._assignment.task_id,
                tokenizer_fingerprint=self._chat.tokenizer.fingerprint,
                token_ids=tuple(transcript.token_ids),
                spans=tuple(transcript.spans),
                messages=tuple(transcript.messages),
            )
        )

    def tell_end(self, *, will_be_scored: bool) -> None:
        """Tell a watcher that no turn follows."""
        if self._player.watcher is not None:
            self._player.watcher.end(self._trajectory_id, will_be_scored=will_be_scored)

    def _take(self, turn: Turn, session: Session) -> Termination | None:
        """Record a turn and let the environment answer; a reason when the episode is over."""
        text = self._chat.tokenizer.decode(turn.token_ids)
        parsed = turn.parsed or self._player.stage.parse(text, self._schemas)
        hands_over = turn.finish == "turn_end" and not parsed.calls
        user = session.next_user_turn() if hands_over else None
        kind = SpanKind.ASSISTANT_TOOL_CALL if parsed.calls else SpanKind.ASSISTANT_TEXT
        if hands_over and user is None:
            kind = SpanKind.ASSISTANT_FINAL
        calls = [call.call for call in parsed.calls if call.call is not None]
        self._transcript.add_turn(turn, kind, text, calls)
        self._seen = self._transcript.token_ids.copy()
        self._tally.turns += 1
        self._tally.turns_since_user += 1
        if turn.finish == "other_end":
            return Termination.EOS_WITHOUT_FINAL
        if parsed.calls:
            return self._answer(parsed.calls, session)
        if turn.finish == "length":
            return Termination.MAX_TOKENS
        if user is None:
            return Termination.FINAL_ANSWER
        self._tally.turns_since_user = 0
        self._transcript.add_messages([user])
        return None

    def _answer(self, calls: Sequence[ParsedCall], session: Session) -> Termination | None:
        """Run all calls of a message in order and show their results."""
        observations = session.step(calls)
        self._transcript.add_tool_results(
            [Message(role="tool", content=observation.content) for observation in observations]
        )
        self._tally.count(calls, observations)
        if self._tally.parse_errors_in_a_row >= self._limits.parse_error_limit:
            return Termination.PARSE_ERROR_LIMIT
        if self._tally.tool_errors_in_a_row >= self._limits.tool_error_limit:
            return Termination.TOOL_ERROR_LIMIT
        if self._tally.repeats_in_a_row >= self._limits.repeated_call_limit:
            return Termination.REPEATED_CALL_LIMIT
        return None

    def _outcome(self, termination: Termination) -> tuple[Outcome | None, Termination, str | None]:
        """Verify the end; an environment that fails at this makes a fault of the episode."""
        if self._session is None:
            return None, termination, None
        try:
            return self._session.finish(), termination, None
        except EnvironmentFaultError as error:
            return None, Termination.ENVIRONMENT_ERROR, str(error)

    def close(self) -> None:
        """Free the session; safe to call twice."""
        if self._session is not None:
            self._session.close()

    def finish(self, termination: Termination, error: str | None, *, seconds: float) -> Trajectory:
        """Freeze the record. A harness fault has no reward: 0 here, and never trained on."""
        outcome: Outcome | None = None
        if termination not in HARNESS_TERMINATIONS:
            outcome, termination, finish_error = self._outcome(termination)
            error = error or finish_error
        transcript, assignment = self._transcript, self._assignment
        spans = tuple(transcript.spans)
        return Trajectory(
            trajectory_id=self._trajectory_id,
            group_id=assignment.group_id,
            task_id=assignment.task_id,
            environment=self._player.stage.environment.name,
            prefix_calls=assignment.prefix_calls,
            tail_calls=assignment.tail_calls,
            tokenizer_fingerprint=self._chat.tokenizer.fingerprint,
            token_ids=tuple(transcript.token_ids),
            spans=spans,
            loss_mask=tuple(mask_from_spans(spans, len(transcript.token_ids))),
            rollout_logprobs=transcript.rollout_logprobs,
            routed_experts=transcript.routed_experts,
            messages=tuple(transcript.messages),
            tool_calls=tuple(self._tally.calls),
            exec_successes=tuple(self._tally.successes),
            call_errors=tuple(self._tally.errors),
            reward=outcome.reward if outcome else 0.0,
            reward_parts=outcome.reward_parts if outcome else {},
            passed=bool(outcome and outcome.passed),
            verdict=outcome.verdict if outcome else {},
            termination=termination,
            sampling=self._player.sampling,
            seed=self._seed,
            notes={"seconds": seconds} | ({"error": error} if error else {}),
        )
