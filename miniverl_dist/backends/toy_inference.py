"""Cached inference with the toy decoder, batch-invariant bit for bit.

A *row* is one (slot, position, token): the next token of an episode, or one of the tokens of a
prompt. ``ToyDecoder.step`` always computes ``num_rows`` rows, whatever they are, with the same
kernels on the same shapes; a row's result depends on its own token and on the cached keys and
values of its own slot, and on nothing else. Hence prompt and continuation, a cached prefix and a
recomputed one, an episode alone and in company all give the same bits.

Two things make that hold. Matrix products have one shape, [num_rows, .]. Attention walks over
blocks of ``BLOCK`` cached positions, each a product of one shape too; a block behind a row's
position adds exact zeros, so the number of blocks walked, which does depend on the company,
changes nothing.

Shapes: R = num_rows, S slots, h heads, d head size, V vocabulary rows, n <= R rows asked for.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader expects
from numpy.typing import NDArray

from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.errors import BatchError
from miniverl_dist.schemas.batch import FloatArray, IntArray

BLOCK = 32
ROW_MULTIPLE = 16


class ToyDecoder:
    """A fixed KV cache over a model's weights.

    Args:
        model: Read at every step; call ``flush`` after its weights have changed.
        num_slots: Sequences that the cache holds.
    """

    def __init__(self, model: ToyModel, num_slots: int) -> None:
        config = model.config
        self.model = model
        self.num_rows = -(-num_slots // ROW_MULTIPLE) * ROW_MULTIPLE
        num_blocks = -(-config.max_context_tokens // BLOCK)
        head_size = config.hidden_size // config.num_heads
        # One slot per row, so that row i can be slot i, and one that unused rows write to.
        slots = self.num_rows + 1
        shape = (config.num_layers, num_blocks, slots, config.num_heads, BLOCK, head_size)
        self._keys = torch.zeros(shape)
        self._values = torch.zeros(shape)
        # Gathered keys or values of one block; fresh memory for each gather would cost more time
        # than the gather itself.
        self._gathered = torch.empty(self.num_rows, config.num_heads, BLOCK, head_size)
        # [blocks, positions, 1, BLOCK]: added, not filled in, since x + 0 is x to the bit.
        offsets = torch.arange(num_blocks * BLOCK)
        later = offsets.view(num_blocks, 1, 1, BLOCK) > offsets.view(-1, 1, 1)
        self._bias = torch.zeros(later.shape).masked_fill_(later, -torch.inf)
        self._head_offsets = np.arange(config.num_heads) * BLOCK

    def flush(self) -> None:
        """Forget all keys and values (zeroed: a leftover NaN would survive the mask)."""
        self._keys.zero_()
        self._values.zero_()

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give ``target`` the first ``length`` cached positions of ``source``."""
        blocks = -(-length // BLOCK)
        for cache in (self._keys, self._values):
            cache[:, :blocks, target] = cache[:, :blocks, source]

    @torch.no_grad()
    def step(
        self, slots: IntArray, positions: IntArray, tokens: IntArray, *, want_logits: bool = True
    ) -> NDArray[np.float32] | None:
        """Compute and cache n rows, n <= num_rows; the positions before each must be cached.

        Several rows may belong to one slot (a prompt): they see each other in causal order.

        Args:
            slots: [n] cache slot of each row.
            positions: [n] position within the slot's sequence.
            tokens: [n] vocabulary rows (not ids) to feed.
            want_logits: False leaves the vocabulary projection out.

        Returns:
            [n, V] logits for the tokens that follow; None unless wanted.
        """
        rows = np.arange(len(slots))
        gathered: torch.Tensor | None = None
        if len(np.unique(slots)) == len(slots):
            rows = slots  # plain decoding: row i is slot i, and its keys need not be gathered
        else:
            gathered = self._padded(rows, slots, self.num_rows)
        write_slots = self._padded(rows, slots, self.num_rows)
        at = self._padded(rows, positions, 0)
        num_blocks = int(positions.max(initial=0)) // BLOCK + 1
        bias = self._bias[:num_blocks].index_select(1, at)
        where = self._places(write_slots.numpy(), at.numpy())
        size = self._keys.shape[-1]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for cache, new in ((self._keys, k), (self._values, v)):
                cache[layer].view(-1, size).index_copy_(0, where, new.reshape(-1, size))
            return self._attend_blocks(layer, q, gathered, bias)

        hidden = self.model.run(self._padded(rows, tokens, 0), at, attend)
        if not want_logits:
            return None
        logits: NDArray[np.float32] = F.linear(hidden, self.model.head).numpy()
        return logits[rows]

    def _places(self, slots: IntArray, positions: IntArray) -> torch.Tensor:
        """[R * h] where each row's heads go in a layer's cache, counted in keys."""
        num_slots, heads = self._keys.shape[2:4]
        block, offset = np.divmod(positions, BLOCK)
        first = (block * num_slots + slots) * (heads * BLOCK) + offset
        return torch.from_numpy((first[:, None] + self._head_offsets).reshape(-1))

    def _padded(self, rows: IntArray, values: IntArray, filler: int) -> torch.Tensor:
        padded = np.full(self.num_rows, filler, dtype=np.int64)
        padded[rows] = values
        return torch.from_numpy(padded)

    def _attend_blocks(
        self, layer: int, q: torch.Tensor, slots: torch.Tensor | None, bias: torch.Tensor
    ) -> torch.Tensor:
        """Softmax attention of each row over its slot's cached positions.

        Args:
            layer: Whose cache.
            q: [R, h, d].
            slots: [R]; None where row i is slot i.
            bias: [blocks to walk, R, 1, BLOCK] -inf behind a row's own position, else 0.

        Returns:
            [R, h, d].
        """
        rows, heads, size = q.shape
        query = (q * size**-0.5).reshape(rows * heads, 1, size)
        scores = torch.empty(len(bias), rows, heads, BLOCK)
        for block in range(len(bias)):
            keys = self._of_rows(self._keys[layer, block], slots)
            torch.bmm(query, keys.transpose(1, 2), out=scores[block].view(-1, 1, BLOCK))
        scores += bias
        peak = scores.amax((0, -1)).unsqueeze(-1)
        weights = scores.sub_(peak).exp_()
        sums = weights.sum(-1, keepdim=True)
        total, mixed = torch.zeros(rows, heads, 1), torch.zeros(rows, heads, size)
        # One after the other: a block of zeros more must not change the order of the sums.
        for block, of_block in enumerate(weights):
            total += sums[block]
            values = self._of_rows(self._values[layer, block], slots)
            mixed += torch.bmm(of_block.view(rows * heads, 1, BLOCK), values).view(q.shape)
        return mixed / total

    def _of_rows(self, cache: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
        """[R * h, BLOCK, d] of one block: a view, or a copy that the next call overwrites."""
        if slots is None:
            found = cache[: self.num_rows]
        else:
            found = torch.index_select(cache, 0, slots, out=self._gathered)
        return found.view(-1, BLOCK, cache.shape[-1])

    def score(self, tokens: IntArray, slot: int = 0) -> FloatArray:
        """[T] nats of each token given those before it, plain softmax; NaN at position 0.

        Overwrites one slot. The same bits whatever was scored before, and however many slots hold
        sequences of others.

        Raises:
            BatchError: more tokens than the cache has positions.
        """
        if len(tokens) > self.model.config.max_context_tokens:
            raise BatchError(
                f"{len(tokens)} tokens to score exceed max_context_tokens "
                f"{self.model.config.max_context_tokens}"
            )
        scores = np.full(len(tokens), np.nan)
        for start in range(0, len(tokens) - 1, self.num_rows):
            at = np.arange(start, min(start + self.num_rows, len(tokens) - 1))
            logits = self.step(np.full(len(at), slot), at, tokens[at])
            logprobs = torch.log_softmax(torch.from_numpy(logits).double(), -1)
            scores[at + 1] = logprobs.numpy()[np.arange(len(at)), tokens[at + 1]]
        return scores
