"""Which beginnings of texts have been computed, and what the model kept of them.

A tree over tokens: texts that begin alike share the nodes of what they share, so a group's prompt
is held once. It holds a bounded number of tokens; beyond it, the ends that were used longest ago go
first. What a node carries is the caller's business (``Kept``); nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class Kept(Protocol):
    """What the model kept of some consecutive tokens."""

    def cut(self, start: int, end: int) -> Self:
        """A copy of the tokens' part ``[start, end)``, with memory of its own."""


K = TypeVar("K", bound=Kept)


def common_length(first: Ids, second: Ids) -> int:
    """Tokens that two texts share from their beginning on."""
    size = min(len(first), len(second))
    differing = np.flatnonzero(first[:size] != second[:size])
    return int(differing[0]) if len(differing) else size


@dataclass(eq=False)
class _Node(Generic[K]):
    ids: Ids
    kept: K
    siblings: dict[int, _Node[K]]
    """The nodes it stands among, itself included, by their first token."""
    children: dict[int, _Node[K]] = field(default_factory=dict)
    used: int = 0


class PrefixCache(Generic[K]):
    """Prefixes of texts, least recently used ends first out.

    Args:
        max_tokens: Of all nodes together; a longer text keeps its beginning only.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._roots: dict[int, _Node[K]] = {}
        self._ticks = 0
        self.num_tokens = 0

    def match_length(self, ids: Ids) -> int:
        """Tokens at the beginning of ``ids`` that are kept."""
        return sum(size for _, size in self._path(ids))

    def match(self, ids: Ids) -> list[K]:
        """What is kept of the beginning of ``ids``, piece by piece; counts as a use."""
        self._ticks += 1
        pieces = []
        for node, size in self._path(ids):
            node.used = self._ticks
            pieces.append(node.kept if size == len(node.ids) else node.kept.cut(0, size))
        return pieces

    def insert(self, ids: Ids, first: int, kept: K) -> None:
        """Keep ``ids``, of which ``kept`` covers ``ids[first:]``.

        Whatever of it is there already stays as it is. Where the tokens before ``first`` are no
        longer there, nothing can be kept.
        """
        self._ticks += 1
        ids = ids[: self._max_tokens]
        children, matched = self._split_at_end_of_match(ids)
        if matched < first or matched == len(ids):
            return
        rest = ids[matched:].copy()
        kept_rest = kept.cut(matched - first, len(ids) - first)
        children[int(rest[0])] = _Node(rest, kept_rest, children, used=self._ticks)
        self.num_tokens += len(rest)
        while self.num_tokens > self._max_tokens:
            self._evict()

    def _path(self, ids: Ids) -> Iterator[tuple[_Node[K], int]]:
        """Nodes along ``ids``, with the tokens of each that match; only the last in part."""
        children, position = self._roots, 0
        while position < len(ids) and (node := children.get(int(ids[position]))) is not None:
            size = common_length(node.ids, ids[position:])
            yield node, size
            if size < len(node.ids):
                return
            children, position = node.children, position + size

    def _split_at_end_of_match(self, ids: Ids) -> tuple[dict[int, _Node[K]], int]:
        """Where the rest of ``ids`` belongs, and the tokens before it."""
        children, matched = self._roots, 0
        for node, size in list(self._path(ids)):
            matched += size
            end = node if size == len(node.ids) else self._split(node, size)
            end.used, children = self._ticks, end.children
        return children, matched

    def _split(self, node: _Node[K], size: int) -> _Node[K]:
        """Make two nodes of one; returns the upper, which holds the first ``size`` tokens."""
        ids, kept = node.ids, node.kept
        upper = _Node(ids[:size].copy(), kept.cut(0, size), node.siblings, used=node.used)
        node.siblings[int(ids[0])] = upper
        node.ids, node.kept = ids[size:].copy(), kept.cut(size, len(ids))
        node.siblings = upper.children
        upper.children[int(node.ids[0])] = node
        return upper

    def _evict(self) -> None:
        leaf = min((node for node in self._nodes() if not node.children), key=lambda n: n.used)
        del leaf.siblings[int(leaf.ids[0])]
        self.num_tokens -= len(leaf.ids)

    def _nodes(self) -> Iterator[_Node[K]]:
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node
