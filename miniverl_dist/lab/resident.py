"""A teacher in memory: its distributions at chosen positions, in rows of the student's head.

Shapes: m rows, n rows of a chunk, P tokens of a teacher's text, H hidden size of the teacher,
U rows of the teacher's head, V rows of the student's, k kept tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miniverl_dist.backends.distilled import known_rows
from miniverl_dist.backends.vocabulary import AnyVocabulary
from miniverl_dist.config.lab import DistillConfig
from miniverl_dist.errors import ConfigError, TokenizerMismatchError
from miniverl_dist.objective.chunked import ChunkTargetProvider
from miniverl_dist.objective.distribution import FullTargets, Targets, TopKRows, keep_top_k
from miniverl_dist.schemas.batch import IntArray
from miniverl_dist.schemas.targets import NO_TOKEN, TeacherContext, TopKTargets, join_top_k

STORED_CHUNK_ROWS = 256
"""Rows whose teacher logits exist at a time when targets are made to be stored."""


class TeacherModel(Protocol):
    """What is asked of a causal LM; ids that it lacks raise."""

    @property
    def max_context_tokens(self) -> int:
        """Longest text."""

    def rows(self, token_ids: Sequence[int]) -> Tensor:
        """[P] rows of the ids."""

    def hidden(self, rows: Tensor) -> Tensor:
        """[P, H] states behind the final norm."""

    def ids(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids of rows."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, U]."""


def require_top_k(shared: IntArray, vocabulary: AnyVocabulary, config: DistillConfig) -> None:
    """Refuse a k that no row could have: what is kept are tokens of both.

    Args:
        shared: [teacher ids] the student's id for the same text, -1 where there is none.
        vocabulary: Of the student.
        config: Support and k.

    Raises:
        ConfigError: fewer tokens are shared.
    """
    if config.support != "top_k_tail":
        return
    rows = known_rows(vocabulary, shared)
    num_shared = len(np.unique(rows[rows >= 0]))
    if config.top_k > num_shared:
        raise ConfigError(
            f"distill.top_k is {config.top_k}, but student and teacher share {num_shared} tokens: "
            "use at most so many"
        )


class ResidentTeacher:
    """Implements ``backends.distilled.ResidentTargets``.

    Args:
        model: The teacher's.
        shared: [teacher ids] the student's id for the same text, -1 where there is none.
        vocabulary: Of the student.
        config: Support, k and temperature.
        device: Of the student, where the targets are needed.

    Raises:
        TokenizerMismatchError: ``exact_full_vocab``, but the two do not cover the same tokens.
    """

    def __init__(
        self,
        model: TeacherModel,
        shared: IntArray,
        vocabulary: AnyVocabulary,
        config: DistillConfig,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model, self._vocabulary, self._config = model, vocabulary, config
        self._shared, self._device = shared, torch.device(device)
        self._head_rows: Tensor | None = None

    @torch.no_grad()
    def provider(self, contexts: Sequence[TeacherContext]) -> ChunkTargetProvider:
        """See ``ResidentTargets``. The texts are computed here, the logits when they are asked."""
        states = [
            self._model.hidden(self._model.rows(context.token_ids.tolist()))[context.positions - 1]
            for context in contexts
            if len(context.positions)
        ]
        hidden = torch.cat(states)
        made = (self._model, hidden, self._config, self._device)
        if self._config.support == "exact_full_vocab":
            return _ExactTargets(*made, self._exact_order(hidden))
        return _TopKTargets(*made, self._rows_of(hidden))

    def top_k(self, context: TeacherContext) -> TopKTargets:
        """[m] the context's rows as they are stored, with real ids of the student."""
        num_rows = len(context.positions)
        if not num_rows:
            return _no_rows(self._config.top_k)
        provider, parts = self.provider([context]), []
        for start in range(0, num_rows, STORED_CHUNK_ROWS):
            found = provider.targets(slice(start, min(start + STORED_CHUNK_ROWS, num_rows)))
            assert isinstance(found, TopKRows), "stored targets are top-k"
            parts.append(_as_stored(found, self._vocabulary))
        return join_top_k(parts)

    def _rows_of(self, hidden: Tensor) -> Tensor:
        """[U] row of the student's head for each row of the teacher's, -1 where there is none.

        Where several tokens of the teacher spell one of the student's, the first stands for it and
        the others stay in the bucket: their texts are as good, but a row's tokens are distinct.
        """
        if self._head_rows is None:
            num_rows = self._model.logits(hidden[:1]).shape[1]
            ids = self._model.ids(np.arange(num_rows, dtype=np.int64))
            inside = (ids >= 0) & (ids < len(self._shared))
            shared = np.where(inside, self._shared[np.where(inside, ids, 0)], NO_TOKEN)
            rows = known_rows(self._vocabulary, shared)
            first = np.zeros(len(rows), dtype=bool)
            first[np.unique(rows, return_index=True)[1]] = True
            self._head_rows = torch.from_numpy(np.where(first, rows, -1)).to(hidden.device)
        return self._head_rows

    def _exact_order(self, hidden: Tensor) -> Tensor:
        """[V] row of the teacher's head for each row of the student's."""
        rows = self._rows_of(hidden).cpu().numpy()
        num_student, known = len(self._vocabulary), rows[rows >= 0]
        if len(known) != num_student or len(rows) != num_student:
            raise TokenizerMismatchError(
                f"distill.support exact_full_vocab needs the same tokens on both sides: the "
                f"student's head has {num_student} rows, the teacher's {len(rows)}, and "
                f"{len(known)} of them are the same; use top_k_tail"
            )
        return torch.from_numpy(np.argsort(rows)).to(hidden.device)


@dataclass(frozen=True)
class _Provider:
    """The teacher's states at some rows; logits come when they are asked for."""

    model: TeacherModel
    hidden: Tensor
    config: DistillConfig
    device: torch.device
    head_rows: Tensor
    """What the teacher's rows are to the student's; each kind of target has its own way."""

    def logprobs(self, rows: slice) -> Tensor:
        """[n, U] nats, in float32 at least."""
        logits = self.model.logits(self.hidden[rows])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.log_softmax(logits / self.config.temperature, dim=-1)


class _ExactTargets(_Provider):
    """Implements ``ChunkTargetProvider`` over the whole vocabulary; ``head_rows`` is its order."""

    @torch.no_grad()
    def targets(self, rows: slice) -> Targets:
        """[n, V] log-probabilities."""
        return FullTargets(self.logprobs(rows)[:, self.head_rows].to(self.device))


class _TopKTargets(_Provider):
    """Implements ``ChunkTargetProvider`` over the k likeliest tokens that the student has too.

    ``head_rows`` is the student's row of each of the teacher's, -1 without one.
    """

    @torch.no_grad()
    def targets(self, rows: slice) -> Targets:
        """[n, k] tokens, and the rest as one bucket."""
        full = FullTargets(self.logprobs(rows))
        kept = keep_top_k(full, self.config.top_k, self.head_rows)
        return TopKRows(*(each.to(self.device) for each in kept))


def _as_stored(found: TopKRows, vocabulary: AnyVocabulary) -> TopKTargets:
    rows = found.rows.cpu().numpy()
    ids = np.where(rows < 0, NO_TOKEN, vocabulary.ids[np.maximum(rows, 0)])
    return TopKTargets(
        ids.astype(np.int64),
        found.logprobs.cpu().double().numpy(),
        found.tail_logprobs.cpu().double().numpy(),
        found.entropies.cpu().double().numpy(),
    )


def _no_rows(k: int) -> TopKTargets:
    return TopKTargets(np.zeros((0, k), np.int64), np.zeros((0, k)), np.zeros(0), np.zeros(0))
