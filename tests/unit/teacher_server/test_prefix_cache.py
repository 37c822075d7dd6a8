"""The tree of remembered prefixes against the plain list of everything ever inserted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_server.prefix_cache import PrefixCache, common_length


@dataclass(frozen=True)
class Tokens:
    """Keeps the tokens themselves: what comes out shows where it came from."""

    ids: tuple[int, ...]

    def cut(self, start: int, end: int) -> Tokens:
        assert 0 <= start < end <= len(self.ids)
        return Tokens(self.ids[start:end])


def array(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(ids, dtype=np.int64)


def insert(cache: PrefixCache[Tokens], *ids: int, first: int = 0) -> None:
    cache.insert(array(*ids), first, Tokens(ids[first:]))


def matched(cache: PrefixCache[Tokens], *ids: int) -> tuple[int, ...]:
    found = tuple(i for piece in cache.match(array(*ids)) for i in piece.ids)
    assert cache.match_length(array(*ids)) == len(found)
    return found


def test_common_length() -> None:
    assert common_length(array(1, 2, 3), array(1, 2, 4)) == 2
    assert common_length(array(1, 2), array(1, 2, 4)) == 2
    assert common_length(array(), array(1)) == common_length(array(2), array(1)) == 0


def test_what_texts_share_is_held_once() -> None:
    cache: PrefixCache[Tokens] = PrefixCache(100)
    insert(cache, 1, 2, 3, 4)
    insert(cache, 1, 2, 5, 6, first=2)
    assert cache.num_tokens == 6
    assert matched(cache, 1, 2, 3, 4, 9) == (1, 2, 3, 4)
    assert matched(cache, 1, 2, 5) == (1, 2, 5)
    assert matched(cache, 2) == matched(cache) == ()
    insert(cache, 1, 2, 3)
    assert cache.num_tokens == 6


def test_the_end_used_longest_ago_goes_first_and_beginnings_stay() -> None:
    cache: PrefixCache[Tokens] = PrefixCache(6)
    insert(cache, 1, 2, 3, 4)
    insert(cache, 1, 2, 5, 6, first=2)
    matched(cache, 1, 2, 3, 4)
    insert(cache, 9)
    assert matched(cache, 1, 2, 5, 6) == (1, 2)
    assert matched(cache, 1, 2, 3, 4) == (1, 2, 3, 4)
    assert (matched(cache, 9), cache.num_tokens) == ((9,), 5)


def test_a_text_longer_than_the_memory_keeps_its_beginning() -> None:
    cache: PrefixCache[Tokens] = PrefixCache(3)
    insert(cache, 1, 2, 3, 4, 5)
    assert matched(cache, 1, 2, 3, 4, 5) == (1, 2, 3)
    nothing: PrefixCache[Tokens] = PrefixCache(0)
    insert(nothing, 1, 2)
    assert (matched(nothing, 1, 2), nothing.num_tokens) == ((), 0)


def test_an_end_whose_beginning_has_gone_is_not_kept() -> None:
    cache: PrefixCache[Tokens] = PrefixCache(10)
    insert(cache, 1, 2, 3, first=2)
    assert (matched(cache, 1, 2, 3), cache.num_tokens) == ((), 0)


small = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(small, st.booleans()), max_size=25), st.integers(1, 30))
def test_a_match_is_always_a_prefix_that_was_inserted(
    texts: list[tuple[list[int], bool]], max_tokens: int
) -> None:
    cache: PrefixCache[Tokens] = PrefixCache(max_tokens)
    inserted: list[list[int]] = []
    for ids, only_rest in texts:
        known = len(matched(cache, *ids))
        longest = max((common_length(array(*ids), array(*old)) for old in inserted), default=0)
        assert known <= longest
        insert(cache, *ids, first=min(known, len(ids) - 1) if only_rest else 0)
        inserted.append(ids)
        assert cache.num_tokens <= max_tokens
        found = matched(cache, *ids)
        assert found == tuple(ids[: len(found)])
        # What was used last is there, as far as the memory goes.
        assert len(found) == min(len(ids), max_tokens)
