"""The growing token record of an episode. Append-only: ids once written never change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from miniverl_dist.errors import RecordError
from miniverl_dist.ports import ChatFormat, Piece
from miniverl_dist.schemas.messages import Message, ToolCall, ToolSchema
from miniverl_dist.schemas.routing import ExpertRows, check_distinct
from miniverl_dist.schemas.trajectory import ASSISTANT_KINDS, LogprobArray, Span, SpanKind
from rollout_server.policies import Turn

_KEY_NAMES = {SpanKind.SYSTEM: "system", SpanKind.USER: "user", SpanKind.TOOL_RESULT: "tool"}


class Transcript:
    """Tokens, spans, logprobs and messages of one running episode.

    Openings and closings of assistant turns are context: the former extend the span before them,
    the latter begin the span after them, so an assistant span holds only what was written.
    """

    def __init__(self, chat: ChatFormat, tools: Sequence[ToolSchema]) -> None:
        self._chat = chat
        self.token_ids: list[int] = []
        self.spans: list[Span] = []
        self.messages: list[Message] = []
        self._logprobs: list[float] = []
        self._routing: list[ExpertRows] = []
        self._counts: Counter[str] = Counter()
        self._pending: list[int] = []  # a closing that waits for the span after it
        self._append_piece(chat.system(tools), None)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, a closing that waits for its span included."""
        return len(self.token_ids) + len(self._pending)

    @property
    def rollout_logprobs(self) -> LogprobArray:
        """[T] nats; NaN where nothing was sampled."""
        return np.array(self._logprobs, dtype=np.float64)

    @property
    def routed_experts(self) -> ExpertRows | None:
        """[R, layers, experts per token] of the first R tokens; None where no turn had any."""
        return np.concatenate(self._routing) if self._routing else None

    def open_assistant(self) -> list[int]:
        """Append the assistant opening to the span before it; returns the whole prompt."""
        opening = self._chat.assistant_opening().token_ids
        last = self.spans[-1]
        if last.kind in ASSISTANT_KINDS:
            raise RecordError(
                f"two assistant messages in a row (messages {last.message_index} and "
                f"{len(self.messages)}): something must be said or returned between them"
            )
        self._extend([*self._pending, *opening])
        self._pending = []
        self.spans[-1] = last.model_copy(update={"end": len(self.token_ids)})
        return self.token_ids.copy()

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append context messages: user turns, prefix calls, their results.

        Results that follow each other belong to one assistant message and are rendered together.
        """
        index = 0
        while index < len(messages):
            message = messages[index]
            if message.role == "assistant":
                self.open_assistant()
                self._add_written(message)
                index += 1
            elif message.role == "tool":
                end = index
                while end < len(messages) and messages[end].role == "tool":
                    end += 1
                self.add_tool_results(messages[index:end])
                index = end
            else:
                self.messages.append(message)
                self._append_piece(self._chat.user(message.content), len(self.messages) - 1)
                index += 1

    def add_tool_results(self, results: Sequence[Message]) -> None:
        """Append the results of one assistant message, in order."""
        first = len(self.messages)
        self.messages.extend(results)
        self._append_piece(self._chat.tool_results([m.content for m in results]), first)

    def add_turn(self, turn: Turn, kind: SpanKind, text: str, calls: Sequence[ToolCall]) -> None:
        """Append a turn of the policy, verbatim.

        A turn that its token cap cut gets its turn end as context, so that the episode can go on.
        """
        sampled = turn.logprobs is not None
        self.messages.append(Message(role="assistant", content=text, tool_calls=tuple(calls)))
        start = len(self.token_ids)
        self._extend(turn.token_ids, turn.logprobs)
        if turn.routed_experts is not None:
            self._add_routing(turn.routed_experts)
        self._add_span(
            kind,
            start,
            len(self.messages) - 1,
            sampled=sampled,
            weight_versions=turn.weight_versions if sampled else (),
        )
        cut = [] if turn.finish != "length" else [self._chat.turn_end_id]
        self._pending = [*cut, *self._chat.assistant_closing().token_ids]

    def _add_routing(self, rows: ExpertRows) -> None:
        """Take a turn's rows of the tokens that no earlier turn has covered.

        The earlier ones stay: they are of the passes that the earlier turns were sampled from,
        while a later turn may have computed its prompt anew under other weights.
        """
        if len(rows) != len(self.token_ids) - 1:
            raise RecordError(
                f"a turn brought the routing of {len(rows)} tokens, the transcript has "
                f"{len(self.token_ids)}: expected all but the last"
            )
        new = rows[sum(map(len, self._routing)) :]
        check_distinct(new)
        self._routing.append(new)

    def _add_written(self, message: Message) -> None:
        self.messages.append(message)
        piece = self._chat.written(message)
        start = len(self.token_ids)
        self._extend(piece.token_ids)
        self._add_span(piece.kind, start, len(self.messages) - 1)
        self._pending = list(self._chat.assistant_closing().token_ids)

    def _append_piece(self, piece: Piece, message_index: int | None) -> None:
        start = len(self.token_ids)
        self._extend([*self._pending, *piece.token_ids])
        self._pending = []
        self._add_span(piece.kind, start, message_index)

    def _extend(self, token_ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        self.token_ids.extend(token_ids)
        self._logprobs.extend([math.nan] * len(token_ids) if logprobs is None else logprobs)

    def _add_span(
        self,
        kind: SpanKind,
        start: int,
        message_index: int | None,
        *,
        sampled: bool = False,
        weight_versions: tuple[int, ...] = (),
    ) -> None:
        name = "assistant" if kind in ASSISTANT_KINDS else _KEY_NAMES[kind]
        key = f"{name}:{self._counts[name]}"
        self._counts[name] += 1
        self.spans.append(
            Span(
                kind=kind,
                start=start,
                end=len(self.token_ids),
                segment_key=key,
                sampled=sampled,
                message_index=message_index,
                weight_versions=weight_versions,
            )
        )
