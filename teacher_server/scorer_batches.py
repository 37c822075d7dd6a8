"""Which waiting texts a Hugging Face model computes together, and what of them it has already.

Texts are computed behind the longest prefix that is remembered. Where several texts wait that begin
alike and nothing of that is remembered yet, the first goes alone, and the others find its prefix.

Shapes: n scored tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from teacher_server.batching import BatchLimits, ScoreJob, choose_behind, choose_similar
from teacher_server.prefix_cache import PrefixCache, common_length
from teacher_server.scorer_hf import Ids, KeyValues, Prefilled, joined


class PrefixModel(Protocol):
    """What a batch needs of a model."""

    def prefill(self, texts: Sequence[Ids], past: KeyValues | None = None) -> list[Prefilled]:
        """See ``HFCausalLM.prefill``."""


@dataclass(frozen=True)
class ComputedBatch:
    """States of some of the waiting texts."""

    states: Mapping[int, torch.Tensor]
    """By index; [n, H], those that predict the scored tokens."""
    num_cached_tokens: int
    """The prefix that each of them had already."""
    num_padding_tokens: int


class PrefixBatcher:
    """Computes waiting texts, oldest first.

    Args:
        model: Computes.
        limits: Of a batch, and of what is remembered.
    """

    def __init__(self, model: PrefixModel, limits: BatchLimits) -> None:
        self._model, self._limits = model, limits
        self._cache: PrefixCache[KeyValues] = PrefixCache(limits.prefix_cache_tokens)

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of remembered prefixes."""
        return self._cache.num_tokens

    def run(self, waiting: Sequence[ScoreJob]) -> ComputedBatch:
        """Compute the first text and whatever goes well with it."""
        matched = [
            self._cache.match_length(job.token_ids[: job.max_reused_tokens]) for job in waiting
        ]
        shared = [_shared(waiting[0], job) for job in waiting]
        if any(self._should_wait(*each) for each in zip(shared[1:], matched[1:], strict=True)):
            return self._compute(waiting, [0], matched[0])
        prefix, slack = matched[0], self._limits.min_shared_tokens
        fitting = [0] + [
            index
            for index in range(1, len(waiting))
            if shared[index] >= prefix and matched[index] <= prefix + slack
        ]
        sizes = [len(waiting[index].token_ids) - prefix for index in fitting]
        companions = (
            # Behind a prefix texts stand in one row, and most of its square is computed in vain:
            # half the prefix bounds that.
            choose_behind(sizes, max_tokens=min(self._limits.max_batch_tokens, prefix // 2))
            if prefix
            else choose_similar(sizes, max_tokens=self._limits.max_batch_tokens)
        )
        return self._compute(waiting, [fitting[index] for index in companions], prefix)

    def _should_wait(self, shared: int, matched: int) -> bool:
        """Whether a text would find more once the first text has been computed."""
        will_find = min(shared, self._limits.prefix_cache_tokens)
        return will_find >= matched + self._limits.min_shared_tokens

    def _compute(
        self, waiting: Sequence[ScoreJob], chosen: Sequence[int], prefix: int
    ) -> ComputedBatch:
        jobs = [waiting[index] for index in chosen]
        past = joined(self._cache.match(jobs[0].token_ids[:prefix]))
        computed = self._model.prefill([job.token_ids[prefix:] for job in jobs], past)
        for job, prefilled in zip(jobs, computed, strict=True):
            self._cache.insert(job.token_ids, prefix, prefilled.kept)
        sizes = [len(job.token_ids) for job in jobs]
        return ComputedBatch(
            # The token at position t is predicted by the state at t - 1.
            {
                index: prefilled.states[job.start - 1 - prefix : -1]
                for index, job, prefilled in zip(chosen, jobs, computed, strict=True)
            },
            num_cached_tokens=prefix,
            num_padding_tokens=0 if prefix else len(sizes) * max(sizes) - sum(sizes),
        )


def _shared(first: ScoreJob, other: ScoreJob) -> int:
    """Tokens of ``other`` that the first text begins with as well and that it may reuse."""
    size = other.max_reused_tokens
    return common_length(first.token_ids[:size], other.token_ids[:size])
