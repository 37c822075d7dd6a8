"""Who writes the assistant turns of an episode: an engine, or a script (oracle, null)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from miniverl_dist.environments.base import Session
from miniverl_dist.errors import DeadlineError, EngineError
from miniverl_dist.generate_api.wire import (
    GenerateReply,
    GenerateRequest,
    MetaInfo,
    SamplingParams,
    checked_logprobs,
)
from miniverl_dist.ports import ChatFormat
from miniverl_dist.schemas.messages import Message, ParsedMessage, ToolCall
from miniverl_dist.schemas.routing import ExpertRows, RoutingShape, decode_engine_rows
from miniverl_dist.schemas.seeds import derive_seed
from rollout_server.engines.base import Engine

DONE_TEXT = "Done."
"""What a script says when a user turn asks for nothing more."""


@dataclass(frozen=True)
class Turn:
    """One assistant turn as tokens, turn end included when it was written."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """[len(token_ids)] nats at the sampling temperature; None when nothing was sampled."""
    weight_versions: tuple[int, ...]
    finish: Literal["turn_end", "other_end", "length"]
    routed_experts: ExpertRows | None = None
    """[prompt and turn - 1, layers, experts per token]; None when the engine was not asked."""
    parsed: ParsedMessage | None = None
    """The turn as an API gave it, calls apart from text; the tokens are then only a rendering of
    it. None: the calls are read from the tokens' text."""


@dataclass(frozen=True)
class Moment:
    """Where in an episode a turn is asked for."""

    seed: int
    """Of this turn alone."""
    room: int
    """Tokens that still fit."""
    turns_since_user: int
    """Assistant turns already taken since the last user message."""
    messages: tuple[Message, ...] = ()
    """The episode so far, without the system text."""


class Policy(Protocol):
    """Writes the next assistant turn."""

    async def act(self, prompt: Sequence[int], session: Session, moment: Moment) -> Turn:
        """Write a turn after ``prompt``; at most ``moment.room`` tokens.

        Raises:
            EngineError: the engine failed; the episode ends as ``engine_error``.
        """


class EnginePolicy:
    """Samples from an inference engine; with ``routing``, it asks for the experts chosen too."""

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        sampling: SamplingParams,
        *,
        other_stop_ids: Sequence[int] = (),
        deadline_s: float = 600.0,
        routing: RoutingShape | None = None,
    ) -> None:
        self._engine = engine
        self._routing = routing
        self._turn_end = chat.turn_end_id
        self._sampling = sampling
        self._stop_ids = (chat.turn_end_id, *other_stop_ids)
        self._deadline_s = deadline_s

    async def act(self, prompt: Sequence[int], session: Session, moment: Moment) -> Turn:
        """Ask the engine; see `Policy.act`."""
        request = GenerateRequest(
            input_ids=tuple(prompt),
            sampling_params=SamplingParams(
                temperature=self._sampling.temperature,
                top_p=self._sampling.top_p,
                top_k=self._sampling.top_k,
                min_p=self._sampling.min_p,
                max_new_tokens=min(moment.room, self._sampling.max_new_tokens),
                stop_token_ids=self._stop_ids,
                sampling_seed=moment.seed,
            ),
            return_logprob=True,
            return_routed_experts=self._routing is not None,
        )
        try:
            # Waits for the engine's slots; freed by running requests that finish.
            async with asyncio.timeout(self._deadline_s):
                reply = await self._engine.generate(request)
        except TimeoutError as error:
            raise DeadlineError(
                f"engine {self._engine.name} gave no reply in {self._deadline_s} s "
                "(deadlines.generate_s)"
            ) from error
        return self._turn(reply, len(prompt))

    def _turn(self, reply: GenerateReply, prompt_tokens: int) -> Turn:
        meta, ids = reply.meta_info, reply.output_ids
        entries = meta.output_token_logprobs
        if entries is None or tuple(entry[1] for entry in entries) != ids:
            raise EngineError(
                f"engine {self._engine.name} returned {len(ids)} ids whose logprobs are "
                f"{'missing' if entries is None else 'about other ids'}"
            )
        if meta.finish_reason is None or meta.finish_reason.type == "abort":
            raise EngineError(f"engine {self._engine.name} aborted the request")
        values = [np.nan if entry[0] is None else entry[0] for entry in entries]
        logprobs = checked_logprobs(np.array(values, dtype=np.float64), first_position=0)
        finish: Literal["turn_end", "other_end", "length"] = "other_end"
        if ids[-1:] == (self._turn_end,):
            finish = "turn_end"  # also as the last token allowed, which engines call length
        elif meta.finish_reason.type == "length":
            finish = "length"
        rows = self._rows(meta, prompt_tokens + len(ids) - 1)
        return Turn(ids, tuple(logprobs.tolist()), self._versions(meta), finish, rows)

    def _rows(self, meta: MetaInfo, num_rows: int) -> ExpertRows | None:
        """The engine's routing of all tokens it was fed."""
        if self._routing is None:
            return None
        if meta.routed_experts is None:
            raise EngineError(
                f"engine {self._engine.name} returned no routed experts, but "
                "rollout.routing_replay is on: start SGLang with --enable-return-routed-experts, "
                "and serve a mixture-of-experts model"
            )
        return decode_engine_rows(meta.routed_experts, self._routing, num_rows)

    def _versions(self, meta: MetaInfo) -> tuple[int, ...]:
        """Policy versions that sampled the turn, oldest first."""
        found = {span.version for span in meta.weight_versions} or {meta.weight_version}
        try:
            return tuple(sorted(map(int, found)))
        except ValueError as error:
            raise EngineError(
                f"engine {self._engine.name} sampled under weight version {sorted(found)}, "
                "expected the number of a published policy version"
            ) from error


class ScriptedPolicy:
    """Writes texts that a script chooses; nothing is sampled, nothing can be trained on."""

    def __init__(self, chat: ChatFormat, script: Callable[[Session, Moment], str]) -> None:
        self._chat = chat
        self._script = script

    async def act(self, prompt: Sequence[int], session: Session, moment: Moment) -> Turn:
        """Write the script's text and a turn end."""
        text = self._script(session, moment)
        ids = (*self._chat.tokenizer.encode(text), self._chat.turn_end_id)
        return Turn(ids, None, (), "turn_end")


def null_policy(chat: ChatFormat) -> ScriptedPolicy:
    """Does nothing and says that it is done: the floor that every pass rate stands beside."""
    return ScriptedPolicy(chat, lambda session, moment: DONE_TEXT)


def oracle_policy(
    chat: ChatFormat, write_calls: Callable[[Sequence[ToolCall]], str]
) -> ScriptedPolicy:
    """Makes the expert's calls, all of a user turn in one message."""

    def script(session: Session, moment: Moment) -> str:
        calls = session.expert_tail()
        is_due = bool(calls and calls[0]) and moment.turns_since_user == 0
        return write_calls(calls[0]) if is_due else DONE_TEXT

    return ScriptedPolicy(chat, script)


def turn_seed(episode_seed: int, turn: int) -> int:
    """Seed of one assistant turn: siblings and turns never share one."""
    return derive_seed(episode_seed, "turn", turn)
