"""Which slot of a KV cache holds which tokens, and who may reuse them.

Torch-free bookkeeping of ``ToyEngine``: a slot is *busy* while a request owns it and *idle*
afterwards, with its cache kept until another request needs the slot (least recently used first).

Shapes: S slots, C positions per slot, P tokens of a prompt.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.schemas.batch import IntArray


class SlotTable:
    """Tokens and cached lengths of all slots."""

    def __init__(self, num_slots: int, max_context: int) -> None:
        self.tokens: IntArray = np.zeros((num_slots, max_context), dtype=np.int64)
        """[S, C] vocabulary rows; valid up to ``lengths``."""
        self.lengths: IntArray = np.zeros(num_slots, dtype=np.int64)
        """[S] known tokens."""
        self.cached: IntArray = np.zeros(num_slots, dtype=np.int64)
        """[S] leading tokens whose keys and values are computed; <= ``lengths``."""
        self._prompt_lengths: IntArray = np.zeros(num_slots, dtype=np.int64)
        self._busy: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self._order: IntArray = np.zeros(num_slots, dtype=np.int64)
        """[S] rises with every reservation and release: age of busy slots, recency of idle ones."""
        self._tick = 0

    def clear(self) -> None:
        """Forget all caches (new weights).

        Only idle slots may be left: a busy one would go on with keys of the old weights.
        """
        assert not self._busy.any()
        self.cached[:] = 0

    def reserve(self, prompt: IntArray) -> int | None:
        """Give a request a slot; None when all are busy.

        A slot whose whole cache begins the prompt (the same episode's former turn) is continued
        in place; otherwise the slot goes that has been idle longest.
        """
        idle = np.flatnonzero(~self._busy)
        if not len(idle):
            return None
        reusable = np.minimum(self._shared(prompt), self.cached)
        continued = np.where(reusable == self.cached, reusable, 0)[idle]
        if continued.any():
            slot = int(idle[np.argmax(continued)])
        else:
            slot = int(idle[np.argmin(self._order[idle])])
        self.tokens[slot, : len(prompt)] = prompt
        self.lengths[slot] = self._prompt_lengths[slot] = len(prompt)
        self.cached[slot] = reusable[slot]
        self._busy[slot] = True
        self._touch(slot)
        return slot

    def best_prefix(self, slot: int) -> tuple[int, int] | None:
        """Where the longest cached prefix of a reserved slot's prompt lies: (source, length).

        None: an older request is still computing a longer shared prefix; ask again after a step.
        Waiting for older requests only cannot go round in a circle.
        """
        shared = self._shared(self.tokens[slot, : self.lengths[slot]])
        now = np.minimum(shared, self.cached)
        older = self._busy & (self._order < self._order[slot])
        soon = np.where(older, np.minimum(shared, self._prompt_lengths), 0)
        source = slot if now[slot] == now.max() else int(np.argmax(now))
        if soon.max() > now[source]:
            return None
        return source, int(now[source])

    def append(self, slot: int, token: int) -> None:
        """Add a sampled token, not cached yet."""
        self.tokens[slot, self.lengths[slot]] = token
        self.lengths[slot] += 1

    def release(self, slot: int) -> None:
        """End a slot's request; what is cached stays reusable."""
        self._busy[slot] = False
        self._touch(slot)

    def _shared(self, prompt: IntArray) -> IntArray:
        """[S] common leading tokens, at most P - 1: the last token makes the first logits."""
        differs = np.ones((len(self.tokens), len(prompt)), dtype=np.bool_)
        # What stands behind a slot's known tokens may agree by chance: callers cut by what is
        # cached, or by the other prompt.
        differs[:, :-1] = self.tokens[:, : len(prompt) - 1] != prompt[:-1]
        shared: IntArray = differs.argmax(axis=1)
        return shared

    def _touch(self, slot: int) -> None:
        self._tick += 1
        self._order[slot] = self._tick
