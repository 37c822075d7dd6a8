"""Logprobs of given tokens under a causal LM, by one forward pass.

Only the positions asked for are projected onto the vocabulary, a chunk at a time: the logits of a
whole text, [L, V], never exist. Temperature plays no part, as in SGLang's input logprobs.

Shapes: L tokens of a text, H hidden size, V rows of the output projection, n <= chunk_tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader expects
from numpy.typing import NDArray

from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.backends.weights_io import MODEL_FILE, load_toy_folder
from miniverl_dist.errors import ConfigError, RequestRejectedError, TokenizerMismatchError
from teacher_server.batching import BatchLimits, ScoredBatch, ScoreJob, ScoreResult, TopTokens
from teacher_server.scorer_batches import PrefixBatcher
from teacher_server.scorer_hf import load_hf

SMALLEST_BUCKET = 128


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

    def ids(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids of output rows."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V]."""


class ToyCausalLM:
    """The toy decoder as a scorer's model.

    Texts are padded on the right to a few fixed lengths, and scored one at a time from their first
    token on: a score depends on the text alone, bit for bit, whatever else the server is asked. A
    prefix taken from a cache would be computed in another shape, and differ in the last bits.
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

    def ids(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Real ids of rows of the sub-vocabulary."""
        return np.asarray(self._model.vocabulary.ids, dtype=np.int64)[rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V]."""
        return F.linear(hidden, self._model.head)


class PrefillScorer:
    """Scores texts; not for several threads at once.

    Args:
        model: the teacher.
        name: what scores say about their origin.
        tokenizer_fingerprint: whose ids it reads, where that is known.
        chunk_tokens: positions projected at once; more memory, fewer calls.
        batcher: computes texts together and remembers their prefixes; None: one text at a time,
            and nothing remembered.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        name: str,
        tokenizer_fingerprint: str | None = None,
        chunk_tokens: int = 128,
        batcher: PrefixBatcher | None = None,
    ) -> None:
        self.model = model
        self._chunk_tokens = chunk_tokens
        self._batcher = batcher
        self.name = name
        self.tokenizer_fingerprint = tokenizer_fingerprint

    @property
    def vocab_size(self) -> int:
        """Ids are below; not every id need be known."""
        return self.model.vocab_size

    @property
    def max_context_tokens(self) -> int:
        """Longest text."""
        return self.model.max_context_tokens

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of remembered prefixes."""
        return 0 if self._batcher is None else self._batcher.num_kept_tokens

    def check(self, token_ids: Sequence[int]) -> None:
        """Raise ``RequestRejectedError`` for a text that cannot be scored."""
        if not 1 <= len(token_ids) <= self.max_context_tokens:
            raise RequestRejectedError(
                f"{len(token_ids)} tokens, the model takes 1 to {self.max_context_tokens}"
            )
        self.model.rows(token_ids)

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
        if start >= len(token_ids):
            return np.empty(0)
        job = ScoreJob(np.asarray(token_ids, dtype=np.int64), start)
        return self.score_some([job]).results[0].logprobs

    @torch.inference_mode()
    def score_some(self, waiting: Sequence[ScoreJob]) -> ScoredBatch:
        """Score the first text and, with a batcher, whatever goes well with it.

        Args:
            waiting: texts that ``check`` accepts.
        """
        if self._batcher is None:
            job = waiting[0]
            rows = self.model.rows(job.token_ids.tolist())
            # The token at position t is predicted by the state at t - 1.
            states = self.model.hidden(rows)[job.start - 1 : -1]
            return ScoredBatch({0: self._result(job, rows[job.start :], states, 0)})
        computed = self._batcher.run(waiting)
        results = {}
        for index, states in computed.states.items():
            job = waiting[index]
            targets = torch.from_numpy(job.token_ids[job.start :])
            results[index] = self._result(job, targets, states, computed.num_cached_tokens)
        return ScoredBatch(results, computed.num_padding_tokens)

    def _result(
        self, job: ScoreJob, targets: torch.Tensor, states: torch.Tensor, num_cached: int
    ) -> ScoreResult:
        chunks = [
            self._score_chunk(states[chunk], targets[chunk], job.num_top)
            for chunk in _slices(len(targets), self._chunk_tokens)
        ]
        logprobs, top_logprobs, top_rows = (
            np.concatenate(each) for each in zip(*chunks, strict=True)
        )
        top = TopTokens(self.model.ids(top_rows), top_logprobs) if job.num_top else None
        return ScoreResult(logprobs, num_cached, top)

    def _score_chunk(
        self, states: torch.Tensor, targets: torch.Tensor, num_top: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """Logprobs [n] of the targets, [n, num_top] of the most likely rows, and these rows."""
        count = len(targets)
        if self._batcher is None:
            # The last chunk is filled up: matrix products of one shape give the same bits.
            states = F.pad(states, (0, 0, 0, self._chunk_tokens - count))
        logprobs = torch.log_softmax(self.model.logits(states)[:count].float(), dim=-1)
        picked = logprobs.gather(-1, targets.to(logprobs.device)[:, None])[:, 0]
        # A vocabulary may have fewer tokens than are asked for: then all of them.
        best, rows = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
        return (
            picked.cpu().numpy().astype(np.float64),
            best.cpu().numpy().astype(np.float64),
            rows.cpu().numpy(),
        )


def _slices(length: int, size: int) -> Iterator[slice]:
    for first in range(0, length, size):
        yield slice(first, min(first + size, length))


def load_scorer(
    folder: Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    limits: BatchLimits | None = None,
    num_ids: int | None = None,
) -> PrefillScorer:
    """Load a toy model or a Hugging Face causal LM, whichever ``folder`` holds.

    Args:
        folder: of the model.
        dtype: of a Hugging Face model's weights.
        device: of a Hugging Face model.
        limits: let a Hugging Face model whose attention allows it compute texts together and
            reuse prefixes; by default each text is computed alone and whole.
        num_ids: of a Hugging Face model's tokenizer, where that is known: rows behind it are
            padding. Without it they take part in the softmax, as they do in a server's that knows
            the model's folder alone (ours and SGLang's), and scores are lower by their share.

    Raises:
        ConfigError: the folder holds neither, or a model that cannot be scored with, or there is
            no such device.
        CheckpointError: a toy folder that is incomplete or broken.
        MissingDependencyError: transformers is needed and not installed.
    """
    if (folder / MODEL_FILE).is_file():
        if device != "cpu":
            raise ConfigError(f"device {device!r}: a toy model is computed on the cpu only")
        found = load_toy_folder(folder)
        return PrefillScorer(
            ToyCausalLM(ToyModel.from_folder(found)),
            name=folder.name,
            tokenizer_fingerprint=found.tokenizer.fingerprint,
        )
    if (folder / "config.json").is_file():
        model = load_hf(folder, dtype=dtype, device=device, num_ids=num_ids)
        can_batch = limits is not None and model.can_reuse
        batcher = PrefixBatcher(model, limits) if limits is not None and can_batch else None
        return PrefillScorer(model, name=folder.name, batcher=batcher)
    raise ConfigError(
        f"{folder} is no model folder: expected {MODEL_FILE} (toy) or config.json (Hugging Face)"
    )


def load_model(
    folder: Path, *, dtype: str = "float32", device: str = "cpu", num_ids: int | None = None
) -> CausalLM:
    """The model alone, for whoever wants its distributions; see ``load_scorer``.

    Raises:
        ConfigError, CheckpointError, MissingDependencyError: as ``load_scorer`` does.
    """
    return load_scorer(folder, dtype=dtype, device=device, num_ids=num_ids).model


def set_num_threads(num_threads: int) -> None:
    """Threads that torch computes with, in the whole process.

    One gives bitwise repeatable sums, and is faster for toy sizes.
    """
    torch.set_num_threads(num_threads)
