from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import MissingDependencyError, TokenizerError
from miniverl_dist.tokens.hf import package_file
from miniverl_dist.tokens.qwen import merges_by_rank, read_ranks


def bpe_by_rank(text: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Join the neighbours whose joint text has the lowest rank, leftmost first."""
    parts = [bytes([byte]) for byte in text]
    while True:
        joint = [(ranks.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
        known = [(rank, i) for rank, i in joint if rank is not None]
        if not known:
            return parts
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def bpe_by_merges(text: bytes, merges: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    order = {pair: n for n, pair in enumerate(merges)}
    parts = [bytes([byte]) for byte in text]
    while True:
        known = [(order[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in order]
        if not known:
            return parts
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(deadline=None, max_examples=150)
@given(
    words=st.lists(st.binary(min_size=2, max_size=6).map(lambda b: bytes(c % 3 + 97 for c in b))),
    seed=st.integers(0, 10**6),
    text=st.binary(max_size=24).map(lambda b: bytes(c % 3 + 97 for c in b)),
)
def test_merges_equal_bpe_by_rank(words: list[bytes], seed: int, text: bytes) -> None:
    """Also where ranks are out of order: parts of a token may rank behind it."""
    tokens = sorted({w[:end] for w in words for end in range(2, len(w) + 1)})
    random.Random(seed).shuffle(tokens)
    ranks = {t: i for i, t in enumerate([*(bytes([b]) for b in range(256)), *tokens])}
    assert bpe_by_merges(text, merges_by_rank(ranks)) == bpe_by_rank(text, ranks)


def test_a_token_that_bpe_never_reaches_has_no_merge() -> None:
    ranks = {bytes([b]): b for b in range(256)} | {
        b"bc": 256,
        b"ab": 257,
        b"abc": 258,
        b"abcd": 9999,
    }
    assert merges_by_rank(ranks) == [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc"), (b"abc", b"d")]
    del ranks[b"abc"]
    assert merges_by_rank(ranks) == [(b"b", b"c"), (b"a", b"b")]


def test_rank_file() -> None:
    assert read_ranks(b"YQ== 0\n\nYmM= 1\n", "here") == {b"a": 0, b"bc": 1}
    with pytest.raises(TokenizerError, match="here, line 2"):
        read_ranks(b"YQ== 0\nYmM=\n", "here")
    with pytest.raises(TokenizerError, match="here, line 1"):
        read_ranks(b"Y 0\n", "here")


def test_a_missing_package_names_the_command() -> None:
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[local\]'"):
        package_file("no_such_package_anywhere", "file")
    with pytest.raises(MissingDependencyError, match="no_such_file"):
        package_file("json", "no_such_file")
