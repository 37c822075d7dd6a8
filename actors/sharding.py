"""How many parameters of a model each rank of a layout holds; counted from tensor names alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from actors.placement import RankPlace
from miniverl_dist.backends.megatron.architecture import Architecture, hf_parameters
from miniverl_dist.config.cluster import ParallelConfig

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.")
_REPLICATED = re.compile(
    r"(?:.*layernorm|self_attn\.[qk]_norm|linear_attn\.norm|mlp\.gate|mlp\.shared_expert_gate)"
    r"\.weight"
)


@dataclass(frozen=True)
class RankParameters:
    """Parameters on one rank, by the group that they are replicated over."""

    dense: int = 0
    """Copies on the data- and context-parallel ranks."""
    expert: int = 0
    """Copies on the expert-data-parallel ranks."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.expert


class Sharding:
    """One architecture under one layout.

    Layers are cut into equal stages; the embedding stands on the first, the head (or the tied
    embedding's second copy) on the last. The vocabulary is padded to a multiple of TP.
    """

    def __init__(self, arch: Architecture, parallel: ParallelConfig) -> None:
        self.arch = arch
        self.parallel = parallel
        self.layers_per_stage = arch.num_layers // parallel.pipeline
        self._shapes = hf_parameters(arch)

    def stage(self, name: str) -> int:
        """The pipeline stage of a tensor."""
        if match := _LAYER.fullmatch(name):
            return int(match[1]) // self.layers_per_stage
        return 0 if name == EMBEDDING else self.parallel.pipeline - 1

    def rank(self, place: RankPlace) -> RankParameters:
        """What one rank holds."""
        return self.cell(place.pp, place.ep)

    def cell(self, pp: int, ep: int) -> RankParameters:
        """What every rank of one stage and expert group place holds."""
        dense = expert = 0
        for name, shape in self._shapes.items():
            if self.stage(name) != pp:
                continue
            if (owner := self._expert_owner(name)) is None:
                dense += self._dense(name, shape)
            elif owner == ep:
                expert += prod(shape) // self.parallel.expert_tensor
        if self._holds_second_embedding(pp):
            dense += self._dense(EMBEDDING, self._shapes[EMBEDDING])
        return RankParameters(dense, expert)

    def stage_tensors(self, pp: int) -> dict[str, int]:
        """Name -> parameters of the unsplit tensors that a stage publishes, in their order."""
        return {n: prod(s) for n, s in self._shapes.items() if self.stage(n) == pp}

    def _holds_second_embedding(self, pp: int) -> bool:
        last = self.parallel.pipeline - 1
        return self.arch.tie_embeddings and pp == last > 0

    def _expert_owner(self, name: str) -> int | None:
        """Which place of the expert group holds a tensor; None for a dense one."""
        match = _LAYER.fullmatch(name)
        found = _EXPERT.match(match[2]) if match else None
        if found is None or self.arch.experts is None:
            return None
        return int(found[1]) // (self.arch.experts.num_experts // self.parallel.expert)

    def _dense(self, name: str, shape: tuple[int, ...]) -> int:
        tensor = self.parallel.tensor
        if name in (EMBEDDING, HEAD):
            return -(-shape[0] // tensor) * prod(shape[1:])
        match = _LAYER.fullmatch(name)
        if match is None or _REPLICATED.fullmatch(match[2]):
            return prod(shape)
        return prod(shape) // tensor


def num_buckets(sizes: Mapping[str, int], bucket_bytes: int) -> int:
    """Buckets of at most ``bucket_bytes`` when tensors are packed in order; a larger one is alone.

    Args:
        sizes: name -> bytes.
        bucket_bytes: limit of one bucket.
    """
    count, filled = 0, 0
    for size in sizes.values():
        if count == 0 or filled + size > bucket_bytes:
            count, filled = count + 1, 0
        filled += size
    return count
