"""Batched decoding with a transformers model, requests joining and leaving between two tokens.

A prompt is computed alone and without padding, so that it makes no difference to linear-attention
layers, whose state would swallow padding. Its cache then becomes one row of the running batch:
keys and values are padded on the left to the longest row and masked there, conv and recurrent
states have one size anyway. From then on every row takes one token per step.

The caches of prompts and of ended rows are kept for a while: siblings find their whole prompt, the
next turn of an episode finds all of its former ones. A linear-attention state cannot be rolled
back, hence only caches that begin the new prompt with *all* their tokens are used.

Shapes: B rows, P prompt tokens, L cached positions (padding included), V vocabulary rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader expects
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer
from transformers.initialization import no_init_weights

from miniverl_dist.errors import ConfigError
from miniverl_dist.schemas.batch import IntArray
from miniverl_dist.schemas.routing import ExpertRows
from rollout_server.engines.hf_routing import RoutingTap

KNOWN = ("qwen3", "qwen3_moe", "qwen3_5_moe_text")
"""Model types whose caches and names on disk are known to fit; what others compute is compared with
a pass without a cache before they are used (``hf_check``)."""

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Per layer (keys, values), both [B, heads, L, head size], or (conv, recurrent) states [B, ...]."""
Logits = NDArray[np.float32]


class Running(Protocol):
    """What the decoder knows of a request (``jobs.Job``); compared and hashed by identity."""

    prompt: IntArray
    """[P] vocabulary rows."""
    output: list[int]
    """Rows sampled so far."""
    cached_tokens: int
    routing: list[ExpertRows]


def sampled_config(folder: Path) -> Any:  # noqa: ANN401 - untyped library
    """What a folder's ``config.json`` describes, where the decoder can sample it.

    Raises:
        ConfigError: there is no such file, or its model's caches cannot be padded.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder.name}/config.json describes no model that transformers can build: {error}"
        ) from error
    for layer in DynamicCache(config=config).layers:
        is_plain = type(layer) is DynamicLayer
        if not is_plain and not (
            config.model_type in KNOWN and type(layer) is LinearAttentionLayer
        ):
            raise ConfigError(
                f"{folder.name}/config.json describes a {config.model_type!r} model with "
                f"{type(layer).__name__} caches (sliding-window attention, running states), which "
                "cannot be padded: use another engine"
            )
    return config


def empty_model(folder: Path, *, dtype: str, device: str) -> Any:  # noqa: ANN401 - untyped library
    """The architecture that a folder's ``config.json`` describes, its weights not filled yet.

    Raises:
        ConfigError: see ``sampled_config``.
    """
    config = sampled_config(folder)
    # Some modules draw numbers even so; whoever seeded torch must not notice.
    with torch.random.fork_rng(devices=[]), no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.tie_weights()  # done by the initialisation otherwise
    return model.requires_grad_(requires_grad=False).eval()


@dataclass(eq=False)
class _Prefix:
    """The cache of one sequence by itself."""

    tokens: IntArray
    """[P] all that has been fed."""
    layers: Layers
    """B = 1, L = P."""
    logits: Logits | None
    """[V] after the last token; None for a row that has ended."""
    routing: list[ExpertRows]
    """Experts of the P tokens, in parts; empty for a model without."""

    def begins(self, prompt: IntArray) -> bool:
        """Whether ``prompt`` can go on from here."""
        size = len(self.tokens)
        fits = size <= len(prompt) if self.logits is not None else size < len(prompt)
        return fits and np.array_equal(self.tokens, prompt[:size])


@dataclass
class DecoderCounters:
    """Tokens fed since the decoder was made."""

    num_prefilled_tokens: int = 0
    num_decoded_tokens: int = 0


class BatchDecoder:
    """Caches and logits of the running requests; used by one thread at a time.

    Args:
        model: From ``empty_model``.
        num_vocabulary_rows: V; the model's further rows are padding and are never sampled.
        num_kept: Caches kept besides those of the running rows, least recently used first out.
    """

    def __init__(self, model: Any, num_vocabulary_rows: int, num_kept: int) -> None:  # noqa: ANN401
        self.counters = DecoderCounters()
        self._model = model
        self._tap = RoutingTap(model)
        self.num_vocabulary_rows = num_vocabulary_rows
        layers = DynamicCache(config=model.config).layers
        self._is_linear = [isinstance(layer, LinearAttentionLayer) for layer in layers]
        self._kept: deque[_Prefix] = deque(maxlen=num_kept)
        self._jobs: list[Running] = []
        self._lengths: list[int] = []
        """[B] tokens fed of each row."""
        self._cache = self._cache_of(None)

    @property
    def num_rows(self) -> int:
        """Rows that hold memory, those of requests that have just ended included."""
        return len(self._jobs)

    def clear(self) -> None:
        """Forget everything (new weights, or a failure in the middle)."""
        self._kept.clear()
        self._jobs, self._lengths, self._cache = [], [], self._cache_of(None)

    def step(self, jobs: Sequence[Running]) -> Logits:
        """Feed each job what it has not fed yet; rows of all other jobs leave the batch.

        Returns:
            [len(jobs), V] logits of each job's next token.
        """
        try:
            with torch.inference_mode():
                self._drop_all_but(jobs)
                logits = dict(zip(self._jobs, self._advance(), strict=True))
                started = {job: self._started(job) for job in jobs if job not in logits}
                self._join(started)
        except BaseException:
            # Some layers may have taken a token that others have not.
            self.clear()
            raise
        logits |= {job: prefix.logits for job, prefix in started.items()}
        empty = np.zeros((0, self.num_vocabulary_rows), dtype=np.float32)
        return np.stack([logits[job] for job in jobs]) if jobs else empty

    def _advance(self) -> Logits:
        """Feed every row the token it sampled last."""
        if not self._jobs:
            return np.zeros((0, self.num_vocabulary_rows), dtype=np.float32)
        width = max(self._lengths)
        lengths = torch.tensor(self._lengths)[:, None]
        mask = torch.arange(width + 1) >= width - lengths
        tokens = torch.tensor([[job.output[-1]] for job in self._jobs])
        logits, routing = self._forward(tokens, lengths, self._cache, mask.long())
        for job, rows in zip(self._jobs, () if routing is None else routing, strict=False):
            job.routing.append(rows)
        self._lengths = [length + 1 for length in self._lengths]
        self.counters.num_decoded_tokens += len(self._jobs)
        return logits

    def _started(self, job: Running) -> _Prefix:
        """A new job's prompt, computed from the longest kept cache on."""
        found = [prefix for prefix in self._kept if prefix.begins(job.prompt)]
        prefix = max(found, key=lambda each: len(each.tokens), default=None)
        job.cached_tokens = 0 if prefix is None else len(prefix.tokens)
        if prefix is not None:
            self._kept.remove(prefix)
        if prefix is None or job.cached_tokens < len(job.prompt):
            if prefix is not None and prefix.logits is not None:
                self._kept.append(prefix)  # a prompt, which others may begin with too
            prefix = self._prefilled(job.prompt, prefix)
        self._kept.append(prefix)
        job.routing = prefix.routing.copy()
        return prefix

    def _prefilled(self, prompt: IntArray, prefix: _Prefix | None) -> _Prefix:
        start = 0 if prefix is None else len(prefix.tokens)
        cache = self._cache_of(None if prefix is None else prefix.layers)
        positions = torch.arange(start, len(prompt))[None]
        tokens = torch.from_numpy(prompt[start:])[None]
        logits, found = self._forward(tokens, positions, cache, None)
        self.counters.num_prefilled_tokens += len(prompt) - start
        routing = [] if prefix is None else prefix.routing
        routing = routing if found is None else _as_one([*routing, found[0]])
        return _Prefix(prompt, self._layers_of(cache), logits[0], routing)

    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache,
        mask: torch.Tensor | None,
    ) -> tuple[Logits, ExpertRows | None]:
        """[B, V] logits after the last of ``tokens``, which ``cache`` takes in, and their experts.

        The latter [B, tokens, layers, experts per token]; None for a model without.
        """
        device = self._model.device
        with self._tap.listening():
            output = self._model(
                input_ids=tokens.to(device),
                position_ids=positions.to(device),
                attention_mask=None if mask is None else mask.to(device),
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            routing = self._tap.heard(len(tokens))
        logits = output.logits[:, -1, : self.num_vocabulary_rows]
        found: Logits = logits.float().cpu().numpy()
        return found, routing

    def _drop_all_but(self, jobs: Sequence[Running]) -> None:
        """Take rows out of the batch and keep their caches for a later turn."""
        stay = [row for row, job in enumerate(self._jobs) if job in jobs]
        if len(stay) == len(self._jobs):
            return
        layers = self._layers_of(self._cache)
        for row, (job, length) in enumerate(zip(self._jobs, self._lengths, strict=True)):
            if row not in stay:
                tokens = np.concatenate([job.prompt, np.array(job.output, dtype=np.int64)])
                rows = self._selected(layers, [row], length)
                self._kept.append(_Prefix(tokens[:length], rows, None, _as_one(job.routing)))
        self._jobs = [self._jobs[row] for row in stay]
        self._lengths = [self._lengths[row] for row in stay]
        width = max(self._lengths, default=0)
        self._cache = self._cache_of(self._selected(layers, stay, width) if stay else None)

    def _join(self, started: dict[Running, _Prefix]) -> None:
        """Put newly computed prompts behind the rows of the batch."""
        if not started:
            return
        parts = [self._layers_of(self._cache)] if self._jobs else []
        parts += [prefix.layers for prefix in started.values()]
        self._jobs += started
        self._lengths += [len(prefix.tokens) for prefix in started.values()]
        width = max(self._lengths)
        joined: Layers = []
        for is_linear, pairs in zip(self._is_linear, zip(*parts, strict=True), strict=True):
            firsts, seconds = zip(*pairs, strict=True)
            if not is_linear:
                firsts, seconds = _padded(firsts, width), _padded(seconds, width)
            joined.append((torch.cat(firsts), torch.cat(seconds)))
        self._cache = self._cache_of(joined)

    def _selected(self, layers: Layers, rows: list[int], width: int) -> Layers:
        """Copies of some rows, keys and values cut to their last ``width`` positions."""
        cut = [
            pair if is_linear else (pair[0][:, :, -width:], pair[1][:, :, -width:])
            for is_linear, pair in zip(self._is_linear, layers, strict=True)
        ]
        # An index list copies: a slice would keep the whole batch in memory.
        return [(first[rows], second[rows]) for first, second in cut]

    def _cache_of(self, layers: Layers | None) -> DynamicCache:
        """A cache that holds copies of ``layers``; None: an empty one."""
        cache = DynamicCache(config=self._model.config)
        for index, (first, second) in enumerate(layers or ()):
            if self._is_linear[index]:
                cache.update_conv_state(first, index, conv_kernel_size=first.shape[-1])
                cache.update_recurrent_state(second, index)
            else:
                cache.update(first, second, index)
        return cache

    def _layers_of(self, cache: DynamicCache) -> Layers:
        return [
            (cache.get_conv_state(index), cache.get_recurrent_state(index))
            if is_linear
            else (cache.layers[index].keys, cache.layers[index].values)
            for index, is_linear in enumerate(self._is_linear)
        ]


def _as_one(routing: list[ExpertRows]) -> list[ExpertRows]:
    """The same rows in one part: a job that has ended has one part per token."""
    return [np.concatenate(routing)] if routing else []


def _padded(tensors: Sequence[torch.Tensor], width: int) -> tuple[torch.Tensor, ...]:
    """Keys or values padded on the left to ``width`` positions."""
    return tuple(F.pad(each, (0, 0, width - each.shape[-2], 0)) for each in tensors)
