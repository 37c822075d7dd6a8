"""Alignment against a byte-by-byte oracle, on boundaries and texts that break naive ways."""

from __future__ import annotations

import sys
import tracemalloc
import unicodedata
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from miniverl_dist.alignment.mau import Units, align
from miniverl_dist.errors import AlignmentError
from tests.reference.alignment import slow_align

TEXTS = {
    "empty": "",
    "ascii": "the cat sat",
    "cjk": "日本語のテキストを整列する",
    "emoji": "ok 😀👩‍👩‍👧‍👦🇯🇵!",
    "nfc": unicodedata.normalize("NFC", "Café naïve Ångström"),
    "nfd": unicodedata.normalize("NFD", "Café naïve Ångström"),
    "tool_xml": "<tool_call>\n<function=cd>\n<parameter=folder>\ndocs\n</parameter>\n</function>",
    "blank": " \t\n\n  ",
}


@st.composite
def cuts(draw: st.DrawFn, num_bytes: int) -> list[int]:
    """Ends of an arbitrary tokenisation of ``num_bytes``; some tokens carry no bytes."""
    inner = draw(st.sets(st.integers(1, max(1, num_bytes - 1))))
    ends = sorted(end for end in inner if end < num_bytes)
    ends += [num_bytes] if num_bytes else []
    repeats = draw(st.lists(st.sampled_from([0, *ends]), max_size=3))
    return sorted(ends + repeats)


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    num_bytes = draw(st.integers(0, 40))
    return draw(cuts(num_bytes)), draw(cuts(num_bytes))


def assert_equals_oracle(student: Sequence[int], teacher: Sequence[int]) -> None:
    units = align(student, teacher)
    assert (
        units.student_unit.tolist(),
        units.teacher_unit.tolist(),
        units.num_units,
    ) == slow_align(student, teacher)


def ends_of(*pieces: str | bytes) -> list[int]:
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return list(accumulate(map(len, raw)))


@settings(deadline=None, max_examples=300)
@given(two_cuts())
def test_equals_the_byte_oracle_on_any_boundaries(ends: tuple[list[int], list[int]]) -> None:
    assert_equals_oracle(*ends)


@pytest.mark.parametrize("name", TEXTS)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_equals_the_byte_oracle_on_text(name: str, data: st.DataObject) -> None:
    num_bytes = len(TEXTS[name].encode())
    assert_equals_oracle(data.draw(cuts(num_bytes)), data.draw(cuts(num_bytes)))


def test_worked_example_of_the_module() -> None:
    units = align(ends_of("ok", " ", "<tool>"), ends_of("ok ", "<", "tool", ">"))
    assert units.student_unit.tolist() == [0, 0, 1]
    assert units.teacher_unit.tolist() == [0, 1, 1, 1]
    assert units.num_units == 2


@settings(deadline=None)
@given(two_cuts())
def test_neither_side_is_special(ends: tuple[list[int], list[int]]) -> None:
    units, swapped = align(*ends), align(*reversed(ends))
    assert units.student_unit.tolist() == swapped.teacher_unit.tolist()
    assert units.teacher_unit.tolist() == swapped.student_unit.tolist()


@settings(deadline=None)
@given(two_cuts())
def test_units_have_bytes_on_both_sides_and_follow_each_other(
    ends: tuple[list[int], list[int]],
) -> None:
    units = align(*ends)
    for side in (units.student_unit, units.teacher_unit):
        covered = side[side >= 0]
        assert np.unique(covered).tolist() == list(range(units.num_units))
        assert (np.diff(covered) >= 0).all()


def test_same_tokenisation_gives_one_unit_per_token() -> None:
    units = align([1, 4, 9], [1, 4, 9])
    assert units.student_unit.tolist() == units.teacher_unit.tolist() == [0, 1, 2]


def test_empty_span_has_no_unit() -> None:
    units = align([], [])
    assert (units.student_unit.size, units.teacher_unit.size, units.num_units) == (0, 0, 0)


def test_span_of_byteless_tokens_against_nothing() -> None:
    units = align([0, 0], [])
    assert units.student_unit.tolist() == [-1, -1]
    assert units.num_units == 0


def test_arrays_are_int32_and_read_only() -> None:
    units = align(np.array([2, 3], dtype=np.int32), (1, 3))
    assert units.student_unit.dtype == units.teacher_unit.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        units.student_unit[0] = 5


def test_does_not_touch_its_input() -> None:
    ends = np.array([1, 3], dtype=np.int64)
    align(ends, ends)
    assert ends.flags.writeable
    assert ends.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("student", "teacher", "says"),
    [
        ([3], [4], "end at byte 3, teacher tokens at byte 4"),
        ([], [2], "end at byte 0"),
        ([5], [], "teacher tokens at byte 0"),
        ([-1, 2], [2], "student token 0 ends at byte -1, before byte 0"),
        ([2], [1, 3, 2], "teacher token 2 ends at byte 2, before byte 3"),
        ([1.0, 2.0], [2], "dtype float64"),
        ([[1, 2]], [2], "shape"),
        ([True], [1], "dtype bool"),
    ],
)
def test_refuses_what_cannot_be_aligned(student: list[int], teacher: list[int], says: str) -> None:
    with pytest.raises(AlignmentError, match=says):
        align(student, teacher)


def test_tutorial_zero_width_tokens_are_not_counted_twice() -> None:
    # A token without bytes inside "a|b" on both sides: it must neither join a unit nor make one.
    units = align([0, 1, 1, 2, 2], [1, 1, 1, 2])
    assert units.student_unit.tolist() == [-1, 0, -1, 1, -1]
    assert units.teacher_unit.tolist() == [0, -1, -1, 1]
    assert units.num_units == 2


def test_tutorial_bytes_not_characters() -> None:
    # "é" is two bytes and one character: by characters the teacher's "éa" would end before "b".
    units = align(ends_of("é", "a", "b"), ends_of("éa", "b"))
    assert units.student_unit.tolist() == [0, 0, 1]


def random_ends(num_tokens: int, seed: int) -> NDArray[np.int64]:
    """Ends of ``num_tokens`` tokens of 4 bytes on average."""
    inner = np.random.default_rng(seed).choice(4 * num_tokens - 1, num_tokens - 1, replace=False)
    return np.append(np.sort(inner) + 1, 4 * num_tokens)


def traced_steps(run: Callable[[], object]) -> int:
    """Python lines executed plus C functions called: what a loop over tokens would multiply."""
    steps = 0

    def count(*_: object) -> Callable[..., object]:
        nonlocal steps
        steps += 1
        return count

    old_trace, old_profile = sys.gettrace(), sys.getprofile()
    sys.settrace(count)
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.settrace(old_trace)
        sys.setprofile(old_profile)
    return steps


def peak_bytes(run: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_tutorial_quadratic_alignment() -> None:
    # Quadratic work has to show as Python steps that grow with the tokens, or as a table of
    # student times teacher entries: the steps stay the same and the memory grows linearly.
    short, long = ((random_ends(n, 0), random_ends(n, 1)) for n in (1024, 16384))
    align(*short)  # imports and caches of the first call are not of interest
    assert traced_steps(lambda: align(*short)) == traced_steps(lambda: align(*long))
    assert peak_bytes(lambda: align(*long)) < 20 * peak_bytes(lambda: align(*short))


def test_memory_does_not_grow_with_the_length_in_bytes() -> None:
    found: list[Units] = []
    peak = peak_bytes(lambda: found.append(align([10**12, 10**13], [3, 10**12, 10**13])))
    assert found[0].num_units == 2
    assert peak < 100_000


def test_peer_1_split_multibyte_character_reconciles() -> None:
    units = align(ends_of("ok ", b"\xf0\x9f", b"\x98\x80", "!"), ends_of("ok ", "😀", "!"))
    assert units.student_unit.tolist() == [0, 1, 1, 2]
    assert units.teacher_unit.tolist() == [0, 1, 2]


def test_peer_2_one_sided_bos_and_empty_span() -> None:
    units = align([0, 1, 2], [1, 2])
    assert units.student_unit.tolist() == [-1, 0, 1]
    assert units.teacher_unit.tolist() == [0, 1]
    assert align([], [0]).teacher_unit.tolist() == [-1]
