from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.alignment.targets import map_top_k, shared_ids
from miniverl_dist.errors import BatchError
from miniverl_dist.schemas.targets import NO_TOKEN, TopKTargets
from miniverl_dist.tokens.load import load_tokenizer
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike
from tests.reference.shared_tokens import map_row, student_id_of
from tests.reference.tiny_tokenizer import deepseek_like, marked_spec, qwen_like, tokenizer

pytest.importorskip("tokenizers")

STUDENT = qwen_like("Hello", " Pan", "tom")
TEACHER = deepseek_like("Hel", "lo", " Pantom", "Yes")
TURN_ENDS = STUDENT.special_id("<|im_end|>"), TEACHER.special_id("<｜end▁of▁sentence｜>")


def id_of(tokenizer: TokenizerLike, piece: str) -> int:
    return tokenizer.byte_table.pieces.index(piece.encode())


# --- ids -------------------------------------------------------------------------------------


def test_tokens_of_the_same_bytes_stand_for_each_other() -> None:
    shared = shared_ids(STUDENT, TEACHER, TURN_ENDS)
    assert shared[id_of(TEACHER, "Hel")] == id_of(STUDENT, "Hel")
    assert shared[id_of(TEACHER, " Pan")] == id_of(STUDENT, " Pan")
    assert shared[id_of(TEACHER, "</think>")] == id_of(STUDENT, "</think>")
    assert shared[ord("x")] == ord("x")
    assert shared[id_of(TEACHER, "Yes")] == shared[id_of(TEACHER, " Pantom")] == NO_TOKEN


def test_of_special_tokens_only_the_turn_ends_correspond() -> None:
    specials = np.flatnonzero(TEACHER.byte_table.special)
    with_ends, without = (shared_ids(STUDENT, TEACHER, ends) for ends in (TURN_ENDS, None))
    assert without[specials].tolist() == [NO_TOKEN] * len(specials)
    with_ends[TURN_ENDS[1]] -= TURN_ENDS[0] - NO_TOKEN
    assert with_ends.tolist() == without.tolist()


@pytest.mark.parametrize(("student", "teacher"), [(STUDENT, TEACHER), (TEACHER, STUDENT)])
def test_the_map_is_that_of_a_plain_search(student: TokenizerLike, teacher: TokenizerLike) -> None:
    ends = TURN_ENDS if student is STUDENT else TURN_ENDS[::-1]
    expected = [student_id_of(i, student, teacher, ends) for i in range(teacher.vocab_size)]
    found = shared_ids(student, teacher, ends)
    assert found.tolist() == [NO_TOKEN if i is None else i for i in expected]


def test_one_tokenizer_twice_shares_everything() -> None:
    for ends in (None, (TURN_ENDS[0], TURN_ENDS[0])):
        found = shared_ids(STUDENT, STUDENT, ends)
        assert found.tolist() == list(range(STUDENT.vocab_size))


def test_a_turn_end_has_one_counterpart_in_one_tokenizer_too() -> None:
    other = STUDENT.special_id("<|endoftext|>")
    found = shared_ids(STUDENT, STUDENT, (TURN_ENDS[0], other))
    assert found[other] == TURN_ENDS[0]
    assert found[TURN_ENDS[0]] == NO_TOKEN
    assert_one_to_one(found)


def test_ids_outside_of_a_sub_vocabulary_have_no_counterpart() -> None:
    narrow = SubVocabulary(STUDENT, {id_of(STUDENT, "Hel"), TURN_ENDS[0]})
    found = shared_ids(narrow, TEACHER, TURN_ENDS)
    assert set(found[found >= 0].tolist()) == {*narrow.ids}
    of_narrow = shared_ids(TEACHER, narrow, None)
    assert set(np.flatnonzero(of_narrow >= 0).tolist()) == {*narrow.ids} - {TURN_ENDS[0]}
    specials = SubVocabulary(TEACHER, [TURN_ENDS[1]])
    assert np.flatnonzero(shared_ids(narrow, specials, None) >= 0).tolist() == [*range(256)]
    wide = SubVocabulary(STUDENT, {id_of(STUDENT, " Pan"), TURN_ENDS[0]})
    both = shared_ids(narrow, wide, None)
    assert np.flatnonzero(both >= 0).tolist() == [*range(256), TURN_ENDS[0]]
    assert both[both >= 0].tolist() == [*range(256), TURN_ENDS[0]]


def test_of_rivals_the_one_that_is_written_counts() -> None:
    """SentencePiece has a letter both as a token and as a byte; it writes the former."""
    marked = tokenizer(marked_spec(["Hel"]))
    (written,) = marked.encode_bytes(b"H")
    rivals = [i for i, piece in enumerate(marked.byte_table.pieces) if piece == b"H"]
    assert len(rivals) == 2
    assert written != min(rivals)
    assert shared_ids(marked, TEACHER, None)[ord("H")] == written
    to_marked = shared_ids(TEACHER, marked, None)
    assert [to_marked[i] for i in rivals] == [NO_TOKEN, ord("H")]
    for found in (shared_ids(marked, TEACHER, None), to_marked):
        assert_one_to_one(found)
    # Where none of them is written alone, the smallest id stands for all.
    assert shared_ids(marked, TEACHER, None)[0xC3] == marked.byte_table.byte_ids[0xC3]


def test_of_rivals_that_nobody_writes_the_smallest_id_counts() -> None:
    spec = marked_spec()
    spec["model"]["vocab"] |= {"a\u2581b": 900, "a b": 901}  # no merge leads to either
    marked, other = tokenizer(spec), qwen_like("a b")
    assert len(marked.encode_bytes(b"a b")) == 3
    assert shared_ids(marked, other, None)[id_of(other, "a b")] == 900
    assert shared_ids(other, marked, None)[900:902].tolist() == [id_of(other, "a b"), NO_TOKEN]


def assert_one_to_one(shared: np.ndarray) -> None:
    images = shared[shared >= 0]
    assert len(np.unique(images)) == len(images)


@pytest.mark.tokenizers
@pytest.mark.parametrize("turned", [False, True])
def test_real_tokenizers_share_what_they_spell_alike(turned: bool) -> None:
    qwen, deepseek = load_tokenizer("qwen3.6"), load_tokenizer("deepseek-v4")
    ends = qwen.special_id("<|im_end|>"), deepseek.special_id("<｜end▁of▁sentence｜>")
    student, teacher = (deepseek, qwen) if turned else (qwen, deepseek)
    started = time.process_time()
    found = shared_ids(student, teacher, ends[::-1] if turned else ends)
    assert time.process_time() - started < 2
    assert_one_to_one(found)
    where = np.flatnonzero(found >= 0)
    assert len(where) == 108_774
    ours, theirs = student.byte_table, teacher.byte_table
    for teacher_id, student_id in zip(where.tolist(), found[where].tolist(), strict=True):
        assert ours.pieces[student_id] == theirs.pieces[teacher_id]
        is_end = teacher_id == (ends[0] if turned else ends[1])
        assert bool(ours.special[student_id]) is bool(theirs.special[teacher_id]) is is_end
    # Nothing is left out: the rest of the teacher's pieces are no pieces of the student.
    rest = np.flatnonzero((found < 0) & ~theirs.special).tolist()
    assert {theirs.pieces[i] for i in rest}.isdisjoint(ours.pieces)


# --- rows ------------------------------------------------------------------------------------

SHARED = shared_ids(STUDENT, TEACHER, TURN_ENDS)
COUNTERPART = {i: student_id_of(i, STUDENT, TEACHER, TURN_ENDS) for i in range(TEACHER.vocab_size)}


def teacher_rows(
    seed: int, rows: int, width: int, sharpness: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The top of random distributions over the teacher's vocabulary, most likely first."""
    logits = np.random.default_rng(seed).normal(size=(rows, TEACHER.vocab_size)) * sharpness
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    entropies = -(np.exp(logprobs) * logprobs).sum(axis=1)
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :width]
    return ids, np.take_along_axis(logprobs, ids, axis=1), entropies


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 4),
    width=st.integers(1, 40),
    k=st.integers(1, 12),
    sharpness=st.floats(0, 40),
)
def test_every_row_is_the_teachers_distribution_over_shared_tokens(
    seed: int, rows: int, width: int, k: int, sharpness: float
) -> None:
    ids, logprobs, entropies = teacher_rows(seed, rows, width, sharpness)
    found = map_top_k(ids, logprobs, entropies, SHARED, k)
    assert found.token_ids.shape == (rows, k)
    assert np.array_equal(found.entropies, entropies)
    mass = np.exp(found.logprobs).sum(axis=1) + np.exp(found.tail_logprobs)
    assert np.abs(mass - 1).max() < 1e-12
    for row in range(rows):
        kept, tail = map_row(ids[row].tolist(), logprobs[row].tolist(), COUNTERPART, k)
        real = found.token_ids[row] != NO_TOKEN
        ours, theirs = found.token_ids[row][real], found.logprobs[row][real]
        assert dict(zip(ours.tolist(), theirs.tolist(), strict=True)) == kept
        assert not real[len(kept) :].any()
        assert ours.tolist() == list(kept)
        assert np.exp(found.tail_logprobs[row]) == pytest.approx(tail, abs=1e-12)


def test_the_whole_vocabulary_of_one_tokenizer_is_kept_as_it_is() -> None:
    size = TEACHER.vocab_size
    ids, logprobs, entropies = teacher_rows(1, 3, size, 3.0)
    found = map_top_k(ids, logprobs, entropies, shared_ids(TEACHER, TEACHER, None), size)
    assert np.array_equal(found.token_ids, ids)
    assert np.array_equal(found.logprobs, logprobs)
    assert found.tail_logprobs.tolist() == [-np.inf] * 3


def row(ids: list[int], masses: list[float], k: int) -> TopKTargets:
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.array([masses]))
    return map_top_k(np.array([ids]), logprobs, np.array([0.5]), SHARED, k)


YES, PANTOM = id_of(TEACHER, "Yes"), id_of(TEACHER, " Pantom")


def test_what_the_student_lacks_is_in_the_tail() -> None:
    found = row([YES, ord("a"), PANTOM, ord("b"), ord("c")], [0.4, 0.3, 0.1, 0.1, 0.05], 2)
    assert found.token_ids.tolist() == [[ord("a"), ord("b")]]
    assert np.exp(found.tail_logprobs) == pytest.approx([0.6])


def test_a_row_without_a_shared_token_is_all_tail() -> None:
    found = row([YES, PANTOM], [0.75, 0.25], 3)
    assert found.token_ids.tolist() == [[NO_TOKEN] * 3]
    assert found.tail_logprobs.tolist() == [0.0]


def test_a_small_tail_keeps_its_digits() -> None:
    """1 minus the kept mass would be 0 here."""
    found = row([ord("a"), YES], [1.0, 1e-30], 2)
    assert found.tail_logprobs == pytest.approx([np.log(1e-30)])


def test_a_tail_within_rounding_is_none() -> None:
    assert row([ord("a"), ord("b")], [0.9, 0.1 - 1e-16], 2).tail_logprobs.tolist() == [-np.inf]
    assert row([ord("a"), ord("b")], [0.9, 0.1 + 1e-6], 2).tail_logprobs.tolist() == [-np.inf]
    found = row([ord("a"), ord("b")], [0.9, 0.1 - 1e-9], 2)
    assert np.exp(found.tail_logprobs) == pytest.approx([1e-9], rel=1e-4)


def test_tokens_that_are_impossible_or_not_there_are_not_kept() -> None:
    found = row([ord("a"), ord("b"), NO_TOKEN], [1.0, 0.0, 0.0], 3)
    assert found.token_ids.tolist() == [[ord("a"), NO_TOKEN, NO_TOKEN]]
    assert SHARED[NO_TOKEN] >= 0  # where an index of -1 would lead
    found = row([ord("a"), NO_TOKEN], [0.75, 0.25], 2)
    assert found.token_ids.tolist() == [[ord("a"), NO_TOKEN]]
    assert np.exp(found.tail_logprobs) == pytest.approx([0.25])


def test_no_rows() -> None:
    none = np.zeros((0, 4))
    found = map_top_k(none.astype(np.int64), none, np.zeros(0), SHARED, 2)
    assert (len(found), found.token_ids.shape) == (0, (0, 2))


@pytest.mark.parametrize(
    ("ids", "masses", "why"),
    [
        ([1, 2], [0.4, 0.6], "must fall within a row"),
        ([1, 2], [0.4, float("nan")], "must fall within a row"),
        ([1, 1], [0.4, 0.3], "stands twice"),
        ([1, 100_000], [0.4, 0.3], "its vocabulary has"),
        ([1, -2], [0.4, 0.3], "its vocabulary has"),
        ([1, 2], [0.9, 0.3], "expected 1"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(
    ids: list[int], masses: list[float], why: str
) -> None:
    with pytest.raises(BatchError, match=why):
        row(ids, masses, 2)


def test_ids_and_logprobs_go_together() -> None:
    with pytest.raises(BatchError, match=r"expected \[rows, k\] twice"):
        map_top_k(np.zeros((1, 2), np.int64), np.zeros((1, 3)), np.zeros(1), SHARED, 2)
