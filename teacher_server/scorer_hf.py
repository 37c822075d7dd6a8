"""A transformers causal LM as a scorer's model, with the keys and values of what came before.

Shapes: B texts of a batch, S tokens of a text behind the prefix, P tokens of the prefix they share,
H hidden size, V rows of the output projection, h heads of d, n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from miniverl_dist.backends.hf_skeleton import UNLOADABLE, first_sentence
from miniverl_dist.errors import (
    ConfigError,
    MissingDependencyError,
    RequestRejectedError,
    install_hint,
)
from teacher_server.scorer_hf_check import (
    checked_device,
    require_plain_logits,
    require_uncapped,
    tolerance,
    why_not_reused,
)

Ids = NDArray[np.int64]
_PROBE_TOKENS = 64
"""Of a prefix, and of each text behind it; a second look at what the model's type promises."""
_ODD_MODEL = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What a model without some part that every other has makes of its first text."""


@dataclass(frozen=True)
class KeyValues:
    """What attention keeps of some consecutive tokens."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Keys and values, each [B, h, tokens, d]."""

    def cut(self, start: int, end: int) -> Self:
        """A copy of some tokens, with memory of its own."""
        return self._map(lambda each: each[:, :, start:end].clone())

    def view(self, start: int, end: int) -> Self:
        """Some tokens, in the same memory."""
        return self._map(lambda each: each[:, :, start:end])

    def text(self, index: int) -> Self:
        """One text of the batch, in the same memory."""
        return self._map(lambda each: each[index : index + 1])

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return self.layers[0][0].shape[2]

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        return type(self)(tuple((change(k), change(v)) for k, v in self.layers))


@dataclass(frozen=True)
class Prefilled:
    """What came of one text."""

    states: torch.Tensor
    """[S, H] behind the final norm."""
    kept: KeyValues
    """Of its own tokens, perhaps with padding behind them; a view of the batch's memory."""


def _kept(cache: Any) -> KeyValues:  # noqa: ANN401 - transformers is optional and untyped
    return KeyValues(tuple((layer.keys, layer.values) for layer in cache.layers))


def joined(pieces: Sequence[KeyValues]) -> KeyValues | None:
    """Pieces of one text, one behind the other; None of no piece."""
    if not pieces:
        return None
    layers = zip(*(piece.layers for piece in pieces), strict=True)
    return KeyValues(
        tuple(
            (torch.cat([k for k, _ in each], 2), torch.cat([v for _, v in each], 2))
            for each in layers
        )
    )


class HFCausalLM:
    """A transformers causal LM as a scorer's model.

    Args:
        model: an ``AutoModelForCausalLM`` in evaluation mode.
        num_ids: ids of its tokenizer; further rows of the projection are padding, and no softmax
            covers them. None, where nobody knows: the softmax is over all rows, as SGLang's is.

    Raises:
        ConfigError: its logits are not simply its output projection of its last hidden states
            (a soft cap, a scale), so that scores computed here would be wrong; or it lacks
            something that every other model has.
    """

    def __init__(self, model: Any, num_ids: int | None = None) -> None:  # noqa: ANN401 - transformers is optional and untyped
        kind = model.config.model_type
        try:
            self._body, self._head = model.base_model, model.get_output_embeddings()
            config = model.config.get_text_config()
            self._device, self._dtype = model.device, model.dtype
            self.max_context_tokens = _longest_text(config)
            require_uncapped(config)
            # The model's own logits know nothing of padding: they are compared row by row.
            all_rows = require_plain_logits(model, self._head, self.max_context_tokens)
            self._num_rows = all_rows if num_ids is None else min(all_rows, num_ids)
            num_embeddings = int(model.get_input_embeddings().num_embeddings)
            self.vocab_size = min(num_embeddings, self._num_rows)
            # A text that is scored alone goes this way.
            self.hidden(torch.zeros(min(2, self.max_context_tokens), dtype=torch.int64))
        except _ODD_MODEL as exc:
            raise ConfigError(
                f"{kind}: this scorer cannot compute it ({type(exc).__name__}: {exc}); serve the "
                "model with SGLang instead"
            ) from exc
        self.can_reuse = why_not_reused(config) is None and self._reuses_rightly()
        """Whether texts can be computed together and behind a remembered prefix."""

    @torch.inference_mode()
    def prefill(self, texts: Sequence[Ids], past: KeyValues | None = None) -> list[Prefilled]:
        """Compute texts together: from their beginnings on, or behind a prefix they all share.

        Args:
            texts: each [S], what follows the prefix.
            past: of the prefix.
        """
        if past is None:
            return self._prefill_rows(texts)
        return self._prefill_behind(texts, past)

    def _prefill_rows(self, texts: Sequence[Ids]) -> list[Prefilled]:
        """One row each, padded on the right, where nothing attends to it."""
        rows = np.zeros((len(texts), max(map(len, texts))), dtype=np.int64)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = text
        cache = self._new_cache()
        output = self._body(input_ids=self._on_device(rows), cache=cache, use_cache=True)
        kept = _kept(cache)
        return [
            Prefilled(output.last_hidden_state[row, : len(text)], kept.text(row))
            for row, text in enumerate(texts)
        ]

    def _prefill_behind(self, texts: Sequence[Ids], past: KeyValues) -> list[Prefilled]:
        """All in one row, in which a text sees the prefix and itself: the prefix is there once."""
        cache, size = self._new_cache(), past.num_tokens
        for layer, (keys, values) in zip(cache.layers, past.layers, strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        positions = np.concatenate([np.arange(size, size + len(text)) for text in texts])
        owners = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        output = self._body(
            input_ids=self._on_device(np.concatenate(texts)[None]),
            position_ids=self._on_device(positions[None]),
            attention_mask=self._own_and_prefix(owners, size) if len(texts) > 1 else None,
            cache=cache,
            use_cache=True,
        )
        states, kept = output.last_hidden_state[0], _kept(cache).text(0)
        ends = np.cumsum([len(text) for text in texts]).tolist()
        return [
            Prefilled(states[end - len(text) : end], kept.view(size + end - len(text), size + end))
            for text, end in zip(texts, ends, strict=True)
        ]

    def _own_and_prefix(self, owners: Ids, prefix: int) -> torch.Tensor:
        """[1, 1, S, P + S] to add to attention scores."""
        own = (owners[:, None] == owners) & np.tri(len(owners), dtype=bool)
        sees = np.concatenate([np.ones((len(owners), prefix), dtype=bool), own], axis=1)
        mask = torch.zeros(sees.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~self._on_device(sees), torch.finfo(self._dtype).min)[None, None]

    def _on_device(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _new_cache(self) -> Any:  # noqa: ANN401 - transformers is optional and untyped
        from transformers import DynamicCache

        return DynamicCache(config=self._body.config)

    @torch.inference_mode()
    def _reuses_rightly(self) -> bool:
        """Whether texts behind a prefix get the states that they have as a whole."""
        from transformers.cache_utils import DynamicLayer

        # A sliding window or a running state cannot be cut: only keys and values of every token.
        if any(type(layer) is not DynamicLayer for layer in self._new_cache().layers):
            return False
        size = min(_PROBE_TOKENS, self.max_context_tokens // 2)
        ids = np.arange(2 * size, dtype=np.int64) % self.vocab_size
        texts = [ids[size:], ids[: size - 1], ids[size + 1 :]]
        (whole,) = self.prefill([ids[:size]])
        for text, found in zip(texts, self.prefill(texts, whole.kept), strict=True):
            (expected,) = self.prefill([np.concatenate([ids[:size], text])])
            tail = expected.states[size:].float()
            limit = tolerance(self._dtype) * tail.abs().max()
            if not (found.states.float() - tail).abs().max() <= limit:
                return False
        return True

    def rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[L] the ids themselves."""
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise RequestRejectedError(
                f"token ids from {min(token_ids)} to {max(token_ids)}, the model has "
                f"0 to {self.vocab_size - 1}"
            )
        return torch.tensor(token_ids, dtype=torch.int64)

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """[L, H]."""
        output = self._body(input_ids=rows[None].to(self._device), use_cache=False)
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def ids(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids of output rows: the rows themselves."""
        return rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V]; without the rows that are padding."""
        projected: torch.Tensor = self._head(hidden)
        return projected[..., : self._num_rows]


def load_hf(
    folder: Path, *, dtype: str = "float32", device: str = "cpu", num_ids: int | None = None
) -> HFCausalLM:
    """Load a causal LM from a local folder; nothing is downloaded, no code of the folder runs.

    Args:
        folder: of the model.
        dtype: of its weights.
        device: where it is computed.
        num_ids: see ``HFCausalLM``.

    Raises:
        MissingDependencyError: transformers is not installed.
        ConfigError: the folder holds no model that can be scored with.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as exc:
        raise MissingDependencyError(
            f"scoring with a Hugging Face model needs transformers: {install_hint('local')}"
        ) from exc
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; a model is loaded from a local folder only")
    where = checked_device(device)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
        )
        model = model.to(where).eval()
    except UNLOADABLE as exc:
        raise ConfigError(
            f"{folder}: no causal LM that transformers can load: {first_sentence(exc)}"
        ) from exc
    return HFCausalLM(model, num_ids)


def _longest_text(config: Any) -> int:  # noqa: ANN401 - transformers is optional and untyped
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise ConfigError(
            f"{config.model_type}: its config.json does not say how long a text may be "
            "(max_position_embeddings); serve the model with SGLang instead"
        )
    return longest
