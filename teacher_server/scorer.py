"""Logprobs of given tokens under a causal LM, by one forward pass.

Only the positions asked for are projected onto the vocabulary, a chunk at a time: the logits of a
whole text, [L, V], never exist. Temperature plays no part, as in SGLang's input logprobs.

Shapes: L tokens of a text, H hidden size, V rows of the output projection, n <= chunk_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader expects
from numpy.typing import NDArray

from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.backends.weights_io import MODEL_FILE, load_toy_folder
from miniverl_dist.errors import (
    ConfigError,
    MissingDependencyError,
    RequestRejectedError,
    TokenizerMismatchError,
)

SMALLEST_BUCKET = 128
_PROBE_TOKENS = 8
_PROBE_TOLERANCE = 2e-2
"""Relative to the largest logit; what bfloat16 may differ by between two orders of summation."""


class CausalLM(Protocol):
    """What a scorer needs of a model."""

    @property
    def vocab_size(self) -> int:
        """Ids are below; not every id need be known."""

    @property
    def max_context_tokens(self) -> int:
        """Longest text."""

    def rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[L] output rows of the ids; raises ``RequestRejectedError`` for ids it does not have."""

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """[L, H] states behind the final norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V]."""


class ToyCausalLM:
    """The toy decoder as a scorer's model.

    Texts are padded on the right to a few fixed lengths, and scored one at a time: a score depends
    on the text alone, bit for bit, whatever else the server is asked.
    """

    def __init__(self, model: ToyModel) -> None:
        self._model = model
        self.vocab_size = int(model.vocabulary.ids[-1]) + 1
        self.max_context_tokens = model.config.max_context_tokens

    def rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[L] rows of the sub-vocabulary."""
        try:
            return torch.from_numpy(self._model.vocabulary.rows(token_ids))
        except TokenizerMismatchError as exc:
            raise RequestRejectedError(str(exc)) from exc

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """[L, H]; computed at the bucket's length."""
        length = len(rows)
        bucket = SMALLEST_BUCKET
        while bucket < length:
            bucket *= 2
        padding = min(bucket, self.max_context_tokens) - length
        return self._model.hidden(F.pad(rows, (0, padding))[None])[0, :length]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V]."""
        return F.linear(hidden, self._model.head)


class HFCausalLM:
    """A transformers causal LM as a scorer's model.

    Args:
        model: an ``AutoModelForCausalLM`` in evaluation mode.

    Raises:
        ConfigError: its logits are not simply its output projection of its last hidden states
            (a soft cap, a scale), so that scores computed here would be wrong.
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - transformers is optional and untyped
        self._body = model.base_model
        self._head = model.get_output_embeddings()
        config = model.config.get_text_config()
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.max_context_tokens = int(config.max_position_embeddings)
        self._device = model.device
        if getattr(config, "final_logit_softcapping", None):
            raise ConfigError(
                f"{config.model_type} caps its logits (final_logit_softcapping), which this scorer "
                "does not do; serve the model with SGLang instead"
            )
        self._probe(model)

    @torch.inference_mode()
    def _probe(self, model: Any) -> None:  # noqa: ANN401 - transformers is optional and untyped
        rows = torch.arange(min(_PROBE_TOKENS, self.vocab_size, self.max_context_tokens))
        expected = model(input_ids=rows[None].to(self._device), use_cache=False).logits[0].float()
        found = self.logits(self.hidden(rows)).float()
        difference = float((found - expected).abs().max() / expected.abs().max())
        if not difference <= _PROBE_TOLERANCE:
            raise ConfigError(
                f"{model.config.model_type}: its logits differ from its output projection of its "
                f"last hidden states (by {difference:.3g} of the largest logit), so this scorer "
                "cannot compute them; serve the model with SGLang instead"
            )

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

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V]."""
        projected: torch.Tensor = self._head(hidden)
        return projected


class PrefillScorer:
    """Scores texts, one at a time; not for several threads at once.

    Args:
        model: the teacher.
        name: what scores say about their origin.
        tokenizer_fingerprint: whose ids it reads, where that is known.
        chunk_tokens: positions projected at once; more memory, fewer calls.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        name: str,
        tokenizer_fingerprint: str | None = None,
        chunk_tokens: int = 128,
    ) -> None:
        self._model = model
        self._chunk_tokens = chunk_tokens
        self.name = name
        self.tokenizer_fingerprint = tokenizer_fingerprint

    @property
    def vocab_size(self) -> int:
        """Ids are below; not every id need be known."""
        return self._model.vocab_size

    @property
    def max_context_tokens(self) -> int:
        """Longest text."""
        return self._model.max_context_tokens

    def check(self, token_ids: Sequence[int]) -> None:
        """Raise ``RequestRejectedError`` for a text that cannot be scored."""
        if not 1 <= len(token_ids) <= self.max_context_tokens:
            raise RequestRejectedError(
                f"{len(token_ids)} tokens, the model takes 1 to {self.max_context_tokens}"
            )
        self._model.rows(token_ids)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float64]:
        """Logprobs of ``token_ids[start:]``, each given all tokens before it.

        Args:
            token_ids: [L] a text that ``check`` accepts.
            start: >= 1; nothing predicts token 0.

        Returns:
            [L - start] nats, float32 accuracy; whatever the model gives, NaN included.
        """
        if start < 1:
            raise ValueError(f"scoring starts at token {start}, expected at least 1")
        rows = self._model.rows(token_ids)
        targets = rows[start:]
        scores = np.empty(len(targets))
        if len(targets) == 0:
            return scores
        # The token at position t is predicted by the state at t - 1.
        states = self._model.hidden(rows)[start - 1 : -1]
        for first in range(0, len(targets), self._chunk_tokens):
            chunk = slice(first, first + self._chunk_tokens)
            scores[chunk] = self._score_chunk(states[chunk], targets[chunk])
        return scores

    def _score_chunk(self, states: torch.Tensor, targets: torch.Tensor) -> NDArray[np.float32]:
        count = len(targets)
        # The last chunk is filled up: matrix products of one shape give the same bits everywhere.
        states = F.pad(states, (0, 0, 0, self._chunk_tokens - count))
        logprobs = torch.log_softmax(self._model.logits(states)[:count].float(), dim=-1)
        picked = logprobs.gather(-1, targets.to(logprobs.device)[:, None])[:, 0]
        chosen: NDArray[np.float32] = picked.cpu().numpy()
        return chosen


def load_scorer(folder: Path, *, dtype: str = "float32", device: str = "cpu") -> PrefillScorer:
    """Load a toy model or a Hugging Face causal LM, whichever ``folder`` holds.

    Raises:
        ConfigError: the folder holds neither.
        CheckpointError: a toy folder that is incomplete or broken.
        MissingDependencyError: transformers is needed and not installed.
    """
    if (folder / MODEL_FILE).is_file():
        found = load_toy_folder(folder)
        return PrefillScorer(
            ToyCausalLM(ToyModel.from_folder(found)),
            name=folder.name,
            tokenizer_fingerprint=found.tokenizer.fingerprint,
        )
    if (folder / "config.json").is_file():
        return PrefillScorer(load_hf(folder, dtype=dtype, device=device), name=folder.name)
    raise ConfigError(
        f"{folder} is no model folder: expected {MODEL_FILE} (toy) or config.json (Hugging Face)"
    )


def load_hf(folder: Path, *, dtype: str = "float32", device: str = "cpu") -> HFCausalLM:
    """Load a causal LM from a local folder; nothing is downloaded, no code of the folder runs.

    Raises:
        MissingDependencyError: transformers is not installed.
        ConfigError: the folder holds no model that can be scored with.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as exc:
        raise MissingDependencyError(
            "scoring with a Hugging Face model needs transformers: "
            "pip install 'miniverl-dist[local]'"
        ) from exc
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; a model is loaded from a local folder only")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as exc:
        raise ConfigError(f"{folder}: no causal LM that transformers can load: {exc}") from exc
    return HFCausalLM(model.to(device).eval())


def set_num_threads(num_threads: int) -> None:
    """Threads that torch computes with, in the whole process.

    One gives bitwise repeatable sums, and is faster for toy sizes.
    """
    torch.set_num_threads(num_threads)
