"""Who gets which slot, and what of its cache may be used again."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_server.engines.slots import SlotTable


def ids(text: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([ord(c) for c in text], dtype=np.int64)


def run(table: SlotTable, text: str, output: str = "") -> int:
    """A whole request: reserve, compute all but the last token, release."""
    slot = table.reserve(ids(text))
    assert slot is not None
    for token in ids(output):
        table.append(slot, int(token))
    table.cached[slot] = len(text) + max(len(output) - 1, 0)
    table.release(slot)
    return slot


def start(table: SlotTable, text: str) -> tuple[int, tuple[int, int] | None]:
    slot = table.reserve(ids(text))
    assert slot is not None
    return slot, table.best_prefix(slot)


def test_a_next_turn_continues_in_its_own_slot() -> None:
    table = SlotTable(3, 30)
    run(table, "other")
    first = run(table, "system user", " call.")
    slot, found = start(table, "system user call. result")
    # The sampled full stop was never fed: it has no keys yet.
    assert (slot, found) == (first, (first, len("system user call")))


def test_a_sibling_copies_what_it_shares_but_its_last_token() -> None:
    table = SlotTable(3, 30)
    leader = run(table, "prompt")
    run(table, "something else")
    slot, found = start(table, "prompt")
    assert slot not in (leader, None)
    assert found == (leader, 5)


def test_a_slot_that_diverges_keeps_only_the_shared_part() -> None:
    table = SlotTable(1, 30)
    run(table, "abcdef")
    assert start(table, "abcxyz") == (0, (0, 3))


def test_the_slot_idle_for_longest_is_taken_first() -> None:
    table = SlotTable(3, 30)
    slots = [run(table, text) for text in ("aa", "bb", "cc")]
    assert slots == [0, 1, 2]
    run(table, "bb!")  # uses slot 1 again
    assert [table.reserve(ids(text)) for text in ("xx", "yy", "zz", "no")] == [0, 2, 1, None]


def test_a_sibling_waits_while_its_leader_computes_the_prompt() -> None:
    table = SlotTable(3, 30)
    leader, found = start(table, "shared prompt")
    assert found == (leader, 0)
    sibling, found = start(table, "shared prompt")
    assert found is None
    table.cached[leader] = 5
    assert table.best_prefix(sibling) is None
    table.cached[leader] = len("shared prompt")
    assert table.best_prefix(sibling) == (leader, len("shared promp"))


def test_nobody_waits_for_a_younger_request_or_one_that_has_ended() -> None:
    table = SlotTable(3, 30)
    leader, _ = start(table, "shared prompt")
    younger, found = start(table, "shared prompt")
    assert found is None
    assert table.best_prefix(leader) == (leader, 0)
    table.cached[leader] = 4
    table.release(leader)  # cancelled half way
    assert table.best_prefix(younger) == (leader, 4)


def test_nobody_waits_for_generated_tokens() -> None:
    table = SlotTable(2, 30)
    leader, _ = start(table, "ab")
    table.cached[leader] = 2
    for token in ids("cd"):
        table.append(leader, int(token))
    _, found = start(table, "abcdef")
    assert found == (leader, 2)


def test_a_prompt_of_one_token_shares_nothing() -> None:
    table = SlotTable(2, 30)
    run(table, "a")
    _, found = start(table, "a")
    assert found is not None
    assert found[1] == 0


def test_new_weights_make_every_cache_worthless() -> None:
    table = SlotTable(2, 30)
    run(table, "prompt")
    table.clear()
    slot, found = start(table, "prompt")
    assert found == (slot, 0)
    with pytest.raises(AssertionError):
        table.clear()  # a request is running
