"""What an SGLang server holds once it has taken a model's tensors, and how to tell; torch-free.

The server fuses projections and pads the vocabulary, and says of each parameter that it holds a
digest of its bytes (``/weights_checker``). On a CPU those are SHA-256 of bytes that can be put
together here, so that one wrong, missing or misplaced value shows. On a GPU the digests come from a
kernel of the server's own, over shards: there it can only be seen which parameters have changed.

Source: SGLang 0.5.23, ``srt/utils/weight_checker.py`` and the ``load_weights`` of its models.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.backends.megatron.architecture import Architecture, hf_parameters
from miniverl_dist.errors import PublishError
from miniverl_dist.schemas.weights import NamedArrays

Digests = Mapping[str, str]
"""Name of a parameter -> what the server says of its bytes."""

VOCABULARY_MULTIPLE = 64
"""Rows of embedding and output layer are filled up to a multiple of this, with zeros."""
EXPERT_MULTIPLE = 32
"""On a CPU an expert's inner size is filled up to a multiple of this, with zeros."""
DIGEST_CHARS = 16

_FUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.self_attn\.[qkv]_proj\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(?:gate|up)_proj\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.(?:gate|up)_proj\."), ".gate_up_proj."),
)


def check_tensors(arch: Architecture, tensors: NamedArrays, dtype: str) -> None:
    """Refuse what the server would answer with 200 and not load, or load only in part.

    Raises:
        PublishError: names, shapes or dtypes are not those of the model; names the first.
    """
    expected = hf_parameters(arch)
    unknown = sorted(tensors.keys() - expected.keys())
    missing = sorted(expected.keys() - tensors.keys())
    if unknown or missing:
        raise PublishError(
            f"the weights hold {len(unknown)} tensors that the model does not have "
            f"({', '.join(unknown[:3]) or 'none'}) and lack {len(missing)} "
            f"({', '.join(missing[:3]) or 'none'}): another architecture?"
        )
    for name, shape in expected.items():
        array = tensors[name]
        if array.shape != shape or array.dtype.name != dtype:
            raise PublishError(
                f"weight {name!r} is {array.dtype.name} {array.shape}, the model has {dtype} "
                f"{shape} there"
            )


def is_known_exactly(arch: Architecture) -> bool:
    """Whether the parameters of an unsharded server on a CPU are known here, byte by byte."""
    is_even = arch.ffn_size % EXPERT_MULTIPLE == 0  # how dense layers are filled up is not known
    return arch.model_type in ("qwen3", "qwen3_moe") and is_even


def held_name(name: str) -> str:
    """The server's parameter that a tensor goes into."""
    for pattern, fused in _FUSED:
        found, count = pattern.subn(fused, name)
        if count:
            return found
    return name


def exact_digests(arch: Architecture, tensors: NamedArrays) -> dict[str, str]:
    """Digests of all parameters of an unsharded server on a CPU that holds exactly ``tensors``."""
    parts: defaultdict[str, list[str]] = defaultdict(list)
    # The order of the architecture's names is the order within a fused parameter: q, k, v; gate,
    # up; expert by expert.
    for name in hf_parameters(arch):
        parts[held_name(name)].append(name)
    return {held: _digest(names, tensors) for held, names in parts.items()}


def _digest(names: Sequence[str], tensors: NamedArrays) -> str:
    digest = hashlib.sha256()
    for name in names:
        array = np.ascontiguousarray(_padded(name, tensors[name]))
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:DIGEST_CHARS]


def _padded(name: str, array: NDArray[Any]) -> NDArray[Any]:
    rows = columns = 0
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        rows = -len(array) % VOCABULARY_MULTIPLE
    elif ".experts." in name and name.endswith("down_proj.weight"):
        columns = -array.shape[1] % EXPERT_MULTIPLE
    elif ".experts." in name:
        rows = -len(array) % EXPERT_MULTIPLE
    # Most arrays are as they should be, and a copy of all of a model's weights is dear.
    return np.pad(array, ((0, rows), (0, columns))) if rows or columns else array


@dataclass(frozen=True)
class HeldWeights:
    """What a server has said of its parameters; one mapping per tensor-parallel rank."""

    ranks: tuple[Digests, ...]

    def differences(self, expected: Digests) -> Iterator[str]:
        """Parameters of the only rank that are not as expected, or not there."""
        (held,) = self.ranks
        for name in sorted(expected.keys() | held.keys()):
            if held.get(name) != expected.get(name):
                yield name

    def is_changed(self, former: HeldWeights, name: str) -> bool:
        """Whether any rank holds other bytes of a parameter than it did."""
        pairs = zip(self.ranks, former.ranks, strict=True)
        return any(now.get(name) != then.get(name) for now, then in pairs)

    def unexpected_changes(
        self, former: HeldWeights, changed_tensors: Mapping[str, bool]
    ) -> Iterator[str]:
        """Parameters that changed although none of their tensors did, or the other way round.

        Args:
            former: Before the load.
            changed_tensors: Every tensor of the model, and whether it differs from the former load.
        """
        expected: defaultdict[str, bool] = defaultdict(bool)
        for name, is_changed in changed_tensors.items():
            expected[held_name(name)] |= is_changed
        names = set().union(*self.ranks)
        for name in sorted(names):
            # A parameter whose tensors have other names must change where all of them do.
            if name not in expected and not all(changed_tensors.values()):
                continue
            if self.is_changed(former, name) != expected.get(name, True):
                yield name


def check_exactly(held: HeldWeights, expected: Digests, engine: str) -> None:
    """Raises ``PublishError`` unless the server holds exactly what is expected."""
    wrong = list(held.differences(expected))
    if wrong:
        raise PublishError(
            f"engine {engine} holds other bytes than were sent in {len(wrong)} of {len(expected)} "
            f"parameters, the first is {wrong[0]}: it is ended, the next publish starts it anew"
        )


def check_changes(
    held: HeldWeights, former: HeldWeights, changed_tensors: Mapping[str, bool], engine: str
) -> None:
    """Raises ``PublishError`` unless those parameters have changed that should, and no other."""
    wrong = list(held.unexpected_changes(former, changed_tensors))
    if wrong:
        raise PublishError(
            f"engine {engine}: a load of {sum(changed_tensors.values())} changed tensors did not "
            f"change the parameters that they go into, or changed others: {len(wrong)} are "
            f"unexpected, the first is {wrong[0]}: it is ended, the next publish starts it anew"
        )
