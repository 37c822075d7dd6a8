"""Log-probabilities of chosen tokens, without ever holding a row of logits per token.

Shapes: B sequences, L padded positions, M predictions, N rows of one call, H hidden, V vocabulary.

The whole cost of a language-model loss sits in the projection onto the vocabulary: one product in
the forward pass, two in the backward pass (for hidden states and weight), and the rows between
them, which the plain way keeps four times over. ``selected_logprobs`` walks through the rows in
chunks and projects a chunk once more when its gradient is asked for: four products instead of
three, and one chunk of logits instead of [N, V]. The gradient by the logits is made in the chunk's
own memory; its factor per row is applied to the hidden states, which are V / H times smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miniverl_dist.errors import BatchError

_BLOCK_ELEMENTS = 1 << 20


class Predictions(NamedTuple):
    """The predicted tokens of a padded batch, in order of sequence and position."""

    hidden: Tensor
    """[M, H] state at position t - 1 of each predicted token."""
    targets: Tensor
    """[M] token id at position t."""
    positions: Tensor
    """[M] place b * L + t of the predicted token in any flattened [B, L] array."""


def predictions(
    hidden: Tensor, token_ids: Tensor, lengths: Tensor, loss_mask: Tensor | None = None
) -> Predictions:
    """Pair every token with the hidden state that predicts it: the one owner of the shift by one.

    Args:
        hidden: [B, L, H]; the state at position t has seen the tokens up to and including t.
        token_ids: [B, L] int64, padded behind ``lengths``.
        lengths: [B] tokens of each sequence, at most L.
        loss_mask: [B, L] keep only the predictions of these tokens; None keeps all of them.

    Returns:
        Predictions of positions 1 .. length - 1; position 0 has none.

    Raises:
        BatchError: a length exceeds L, or the mask holds a token that nothing predicts.
    """
    padded_length = token_ids.shape[1]
    if int(lengths.max()) > padded_length:
        raise BatchError(f"a sequence of {int(lengths.max())} tokens in a row of {padded_length}")
    column = torch.arange(padded_length, device=token_ids.device)
    chosen = (column > 0) & (column < lengths[:, None])
    if loss_mask is not None:
        if bool((loss_mask & ~chosen).any()):
            raise BatchError("loss_mask holds a token at position 0 or behind its sequence's end")
        chosen = loss_mask
    positions = chosen.reshape(-1).nonzero().squeeze(-1)
    return Predictions(
        hidden=hidden.flatten(0, 1).index_select(0, positions - 1),
        targets=token_ids.reshape(-1).index_select(0, positions),
        positions=positions,
    )


def selected_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int, *, temperature: float = 1.0
) -> Tensor:
    """Log-probability of one token per row under ``softmax(hidden @ weight.T / temperature)``.

    Rows whose incoming gradient is exactly zero cost nothing in the backward pass.

    Args:
        hidden: [N, H].
        weight: [V, H], of the dtype of ``hidden``.
        targets: [N] int64, 0 .. V - 1.
        chunk_size: rows whose logits exist at a time; changes values and gradients by no more
            than rounding.
        temperature: that of the sampling engine, > 0.

    Returns:
        [N] nats; float32 where ``hidden`` has less precision.

    Raises:
        BatchError: shapes that do not fit each other, or a chunk size or temperature <= 0.
    """
    return selected_logprobs_with_entropy(
        hidden, weight, targets, chunk_size, temperature=temperature
    )[0]


def selected_logprobs_with_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """``selected_logprobs`` and the [N] entropy of every row (nats, detached), in one pass."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise BatchError(
            f"expected hidden [N, H] and weight [V, H], found {list(hidden.shape)} and "
            f"{list(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise BatchError(f"targets {list(targets.shape)} for hidden {list(hidden.shape)}")
    check_chunking(chunk_size, temperature)
    logprobs, entropy = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, chunk_size, temperature
    )
    return logprobs, entropy


def check_chunking(chunk_size: int, temperature: float) -> None:
    """Refuse what no projection can be cut or divided by; raises ``BatchError``."""
    if chunk_size < 1 or not temperature > 0:
        raise BatchError(
            f"chunk_size must be at least 1 and temperature above 0, found {chunk_size} and "
            f"{temperature}"
        )


class _SelectedLogprobs(torch.autograd.Function):
    """Chunked projection, log-softmax and gather; the backward pass projects once more."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch types its context so
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk_size: int,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        chunk = LogitChunk(weight, min(chunk_size, len(targets)), temperature)
        chosen = torch.empty(len(targets), dtype=chunk.logits.dtype, device=hidden.device)
        entropy = torch.empty_like(chosen)
        for start in range(0, len(targets), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = chunk.project(hidden[rows])
            chosen[rows] = logits.gather(1, targets[rows, None]).squeeze(1)
            peak, log_total, entropy[rows] = _normalise(logits)
            chosen[rows].sub_(peak).sub_(log_total)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.chunk_size, ctx.temperature = chunk_size, temperature
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401 -- see forward
        grad_logprobs: Tensor,
        _grad_entropy: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets = ctx.saved_tensors

        def to_slopes(logits: Tensor, part: Tensor) -> None:
            for block in _blocks(logits):
                block.copy_(torch.softmax(block, -1))
            logits[torch.arange(len(part), device=part.device), targets[part]] -= 1

        grad_hidden, grad_weight = projection_gradients(
            hidden,
            weight,
            grad_logprobs,
            to_slopes,
            chunk_size=ctx.chunk_size,
            temperature=ctx.temperature,
            needs=ctx.needs_input_grad[:2],
        )
        return grad_hidden, grad_weight, None, None, None


def projection_gradients(
    hidden: Tensor,
    weight: Tensor,
    grad_logprobs: Tensor,
    to_slopes: Callable[[Tensor, Tensor], None],
    *,
    chunk_size: int,
    temperature: float,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by hidden states and weight, a chunk at a time.

    Args:
        hidden: [N, H].
        weight: [V, H].
        grad_logprobs: [N]; rows where it is exactly zero are left out.
        to_slopes: turns a chunk's logits [n, V] into d(-logprob) / d(logits) = softmax - onehot,
            in place; the second argument is [n] which rows they are.
        chunk_size: rows whose logits exist at a time.
        temperature: that the logits are divided by.
        needs: which of the two are wanted.
    """
    used = grad_logprobs.nonzero().squeeze(-1)
    chunk = LogitChunk(weight, min(chunk_size, len(used)), temperature)
    grad_hidden = torch.zeros_like(hidden) if needs[0] else None
    grad_weight = torch.zeros_like(weight, dtype=chunk.logits.dtype) if needs[1] else None
    for part in torch.split(used, chunk_size):
        states = hidden[part]
        to_slopes(chunk.project(states), part)
        factor = grad_logprobs[part, None].div(-temperature)
        slopes = chunk.lowered(len(part))
        if grad_hidden is not None:
            grad_hidden[part] = torch.mm(slopes, weight).mul_(factor)
        if grad_weight is not None:
            add_product(grad_weight, slopes, states * factor.to(states.dtype))
    if grad_weight is not None:
        grad_weight = grad_weight.to(weight.dtype)
    return grad_hidden, grad_weight


class LogitChunk:
    """Memory for the logits of one chunk, used again for every chunk.

    Fresh pages for each chunk would cost more time than the softmax. Below float32 the products
    run in the weight's dtype and the softmax in float32, in a second block.
    """

    def __init__(self, weight: Tensor, num_rows: int, temperature: float) -> None:
        self._weight = weight
        self._temperature = temperature
        self._product = weight.new_empty(num_rows, weight.shape[0])
        self.logits = self._product
        if weight.dtype not in (torch.float32, torch.float64):
            self.logits = self._product.to(torch.float32)

    def project(self, hidden: Tensor) -> Tensor:
        """Logits of at most ``num_rows`` rows, free to overwrite until the next call."""
        product = torch.mm(hidden, self._weight.T, out=self._product[: len(hidden)])
        logits = self.logits[: len(hidden)]
        if self.logits is not self._product:
            logits.copy_(product)
        return logits if self._temperature == 1 else logits.div_(self._temperature)

    def lowered(self, num_rows: int) -> Tensor:
        """What now stands in the logits, in the weight's dtype."""
        if self.logits is self._product:
            return self.logits[:num_rows]
        return self._product[:num_rows].copy_(self.logits[:num_rows])


def _blocks(logits: Tensor) -> tuple[Tensor, ...]:
    """Views of a few rows each, for steps that need a second copy of what they work on.

    On a CPU the copy stays small and within the cache; elsewhere many launches would cost more.
    """
    num_rows = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    return torch.split(logits, num_rows if logits.device.type == "cpu" else len(logits))


def _normalise(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Peak, log of the sum of ``exp(logit - peak)``, and entropy of every row; destroys the logits.

    The first two stay apart because their sum would round away digits of the log-probability.
    """
    results = []
    for block in _blocks(logits):
        peak = block.amax(-1)
        exponentials = block.sub_(peak[:, None]).exp()
        total = exponentials.sum(-1)
        entropy = total.log() - exponentials.mul_(block).sum(-1) / total
        results.append(torch.stack((peak, total.log(), entropy)))
    peak, log_total, entropy = torch.cat(results, dim=1)
    return peak, log_total, entropy


def add_product(total: Tensor, slopes: Tensor, states: Tensor) -> None:
    """``total += slopes.T @ states``; sums over chunks in float32 at least."""
    if total.dtype == states.dtype:
        total.addmm_(slopes.T, states)
    else:
        total.add_(torch.mm(slopes.T, states))
