"""Several engines behind one: requests that share a prompt go where its prefix is cached.

A prompt belongs to the first prompt that it extends: a group's siblings begin with the same one,
and each later turn of an episode extends it. That root decides the engine by rendezvous hashing: of
all engines the one with the highest hash of (engine, root). An engine that is lost therefore moves
its own share only, and one that comes takes its share from all others.

Shapes: T tokens of a prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import EngineError, EngineLostError, PublishError
from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest
from miniverl_dist.ports import WeightSnapshot
from rollout_server.engines.base import Engine

Hashes = NDArray[np.uint64]

MAX_ROOTS = 4096
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STEP = np.uint64(0x9E3779B97F4A7C15)


def prefix_hashes(ids: Sequence[int]) -> Hashes:
    """[T]: entry i stands for the first i + 1 tokens, in their order."""
    tokens = np.asarray(ids, dtype=np.int64).astype(np.uint64)
    places = np.arange(1, len(tokens) + 1, dtype=np.uint64)
    # Sums of well-mixed (token, place) pairs: equal prefixes have equal sums, all in one pass.
    hashes: Hashes = np.cumsum(_mixed(_mixed(tokens + _STEP) ^ (places * _STEP)), dtype=np.uint64)
    return hashes


def _mixed(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))


class PromptRoots:
    """Remembers the prompts that began something.

    Args:
        max_roots: Kept, least recently used first out. A prompt whose root is forgotten becomes a
            root itself: its cached prefix may then lie elsewhere, nothing else.
    """

    def __init__(self, max_roots: int = MAX_ROOTS) -> None:
        self._max_roots = max_roots
        self._lengths: Counter[int] = Counter()
        self._roots: OrderedDict[tuple[int, int], None] = OrderedDict()

    def root(self, ids: Sequence[int]) -> tuple[int, int]:
        """(length, hash) of the shortest known prompt that ``ids`` begins with, or of ``ids``."""
        hashes = prefix_hashes(ids)
        for length in sorted(length for length in self._lengths if length <= len(ids)):
            found = (length, int(hashes[length - 1]))
            if found in self._roots:
                self._roots.move_to_end(found)
                return found
        own = (len(ids), int(hashes[-1]) if len(ids) else 0)
        self._add(own)
        return own

    def _add(self, root: tuple[int, int]) -> None:
        self._roots[root] = None
        self._lengths[root[0]] += 1
        if len(self._roots) > self._max_roots:
            (length, _), _ = self._roots.popitem(last=False)
            self._lengths[length] -= 1
            self._lengths += Counter()  # drops lengths that no root has any more


def ranked(root: tuple[int, int], names: Sequence[str]) -> list[str]:
    """Engines in the order in which a root wants them."""

    def weight(name: str) -> bytes:
        text = f"{root[0]}\0{root[1]}\0{name}".encode()
        return hashlib.blake2b(text, digest_size=8).digest()

    return sorted(names, key=weight, reverse=True)


class AffinityEngine:
    """Several engines as one; see ``rollout_server.engines.base.Engine``.

    Args:
        engines: With distinct names; the first is never special.
        name: Of all of them together, in receipts and events.
        max_roots: See ``PromptRoots``.
        max_load_ratio: An engine with more requests than this many times the mean is passed over:
            what waits in its queue costs more than a prefix.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        name: str = "engines",
        max_roots: int = MAX_ROOTS,
        max_load_ratio: float = 2.0,
    ) -> None:
        self.name = name
        self._engines = {engine.name: engine for engine in engines}
        if not engines or len(self._engines) < len(engines):
            raise EngineError(
                f"{name}: expected engines of distinct names, found {[e.name for e in engines]}"
            )
        self._max_load_ratio = max_load_ratio
        self._roots = PromptRoots(max_roots)
        self._lost: set[str] = set()
        self._loads: Counter[str] = Counter()

    @property
    def weight_version(self) -> int:
        """Of all engines in use; -1 where they differ or none is left."""
        versions = {self._engines[name].weight_version for name in self.standing}
        return versions.pop() if len(versions) == 1 else -1

    @property
    def standing(self) -> tuple[str, ...]:
        """Names of the engines in use."""
        return tuple(name for name in self._engines if name not in self._lost)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """See ``Engine``; a request whose engine is lost is asked again at the next one.

        Raises:
            EngineLostError: no engine is left.
        """
        root = self._roots.root(request.input_ids)
        while True:
            name = self._chosen(root)
            self._loads[name] += 1
            try:
                return await self._engines[name].generate(request)
            except EngineLostError:
                self._lost.add(name)
            finally:
                self._loads[name] -= 1

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        """Into all engines, lost ones too; one that does not take them leaves the rotation.

        Raises:
            PublishError: not one has taken them.
        """
        loads = (engine.load_weights(snapshot) for engine in self._engines.values())
        # Waits for all of them; each is bounded by its own deadlines.
        results = await asyncio.gather(*loads, return_exceptions=True)
        checksums = {}
        for name, result in zip(self._engines, results, strict=True):
            if isinstance(result, str):
                checksums[name] = result
            elif not isinstance(result, EngineError):
                raise result
        taken = {name for name, found in checksums.items() if found == snapshot.checksum}
        self._lost = set(self._engines) - (taken or checksums.keys())
        if not checksums:
            raise PublishError(
                f"{self.name}: no engine has taken policy version {snapshot.policy_version}: "
                + "; ".join(str(result) for result in results)
            )
        return snapshot.checksum if taken else next(iter(checksums.values()))

    async def close(self) -> None:
        """See ``Engine``."""
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    def _chosen(self, root: tuple[int, int]) -> str:
        standing = self.standing
        if not standing:
            raise EngineLostError(f"{self.name}: all of {', '.join(self._engines)} are lost")
        mean = (1 + sum(self._loads[name] for name in standing)) / len(standing)
        for name in ranked(root, standing):
            if self._loads[name] < max(self._max_load_ratio * mean, 1):
                return name
        raise AssertionError("some engine has no more than the mean")
