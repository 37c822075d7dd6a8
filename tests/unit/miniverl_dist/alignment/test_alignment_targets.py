from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.alignment.targets import shared_ids
from miniverl_dist.objective.distribution import FullTargets, TopKRows, keep_top_k
from miniverl_dist.schemas.targets import NO_TOKEN
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


def teacher_rows(seed: int, rows: int, sharpness: float) -> FullTargets:
    """Random distributions over the teacher's vocabulary, float64."""
    logits = np.random.default_rng(seed).normal(size=(rows, TEACHER.vocab_size)) * sharpness
    return FullTargets(torch.log_softmax(torch.from_numpy(logits), dim=1))


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 4),
    k=st.integers(1, 12),
    sharpness=st.floats(0.1, 40),
)
def test_every_row_is_the_teachers_distribution_over_shared_tokens(
    seed: int, rows: int, k: int, sharpness: float
) -> None:
    full = teacher_rows(seed, rows, sharpness)
    found = keep_top_k(full, k, torch.from_numpy(SHARED))
    assert found.rows.shape == (rows, k)
    for row in range(rows):
        falling = torch.argsort(full.logprobs[row], descending=True, stable=True)
        kept, tail = map_row(falling.tolist(), full.logprobs[row][falling].tolist(), COUNTERPART, k)
        assert found.rows[row].tolist() == list(kept)
        assert found.logprobs[row].tolist() == list(kept.values())
        assert found.tail_logprobs[row].exp().item() == pytest.approx(tail, abs=1e-12)


def row(masses: dict[int, float], k: int) -> TopKRows:
    """A distribution of some teacher ids with mass."""
    logprobs = torch.full((1, TEACHER.vocab_size), -torch.inf, dtype=torch.float64)
    for token_id, mass in masses.items():
        logprobs[0, token_id] = np.log(mass)
    return keep_top_k(FullTargets(logprobs), k, torch.from_numpy(SHARED))


YES, PANTOM = id_of(TEACHER, "Yes"), id_of(TEACHER, " Pantom")


def test_what_the_student_lacks_is_in_the_tail() -> None:
    found = row({YES: 0.4, ord("a"): 0.3, PANTOM: 0.1, ord("b"): 0.12, ord("c"): 0.08}, 2)
    assert found.rows.tolist() == [[ord("a"), ord("b")]]
    assert found.tail_logprobs.exp().item() == pytest.approx(0.58)


def test_a_row_without_a_shared_token_is_all_tail() -> None:
    found = row({YES: 0.75, PANTOM: 0.25}, 3)
    assert found.rows.tolist() == [[NO_TOKEN] * 3]
    assert found.tail_logprobs.item() == pytest.approx(0.0, abs=1e-15)


def test_a_small_tail_keeps_its_digits() -> None:
    """1 minus the kept mass would be 0 here."""
    found = row({ord("a"): 1.0, YES: 1e-30}, 2)
    assert found.tail_logprobs.item() == pytest.approx(np.log(1e-30))


def test_nothing_left_is_no_tail() -> None:
    assert row({ord("a"): 0.5, ord("b"): 0.5}, 2).tail_logprobs.isneginf().all()
