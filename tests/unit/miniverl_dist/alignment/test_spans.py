from __future__ import annotations

import pytest

from miniverl_dist.alignment.mau import align
from miniverl_dist.alignment.spans import byte_ends, split_turn_end, student_byte_ends
from tests.reference.tiny_tokenizer import deepseek_like, qwen_like

pytest.importorskip("tokenizers")

STUDENT = qwen_like("ok ", "é")
TEACHER = deepseek_like("ok", " 😀")
TURN_END = STUDENT.special_id("<|im_end|>")
OTHER = STUDENT.special_id("<|endoftext|>")
OK_BLANK = STUDENT.byte_table.pieces.index(b"ok ")
E_ACUTE = STUDENT.byte_table.pieces.index("é".encode())


def test_a_final_turn_end_is_one_byte_of_its_own() -> None:
    ids = [OK_BLANK, E_ACUTE, TURN_END]
    ends = student_byte_ends(ids, STUDENT, TURN_END)
    assert ends.tolist() == [3, 5, 6]
    assert student_byte_ends([TURN_END], STUDENT, TURN_END).tolist() == [1]
    assert student_byte_ends([], STUDENT, TURN_END).tolist() == []


def test_a_span_without_its_turn_end_has_no_extra_byte() -> None:
    assert student_byte_ends([OK_BLANK, E_ACUTE], STUDENT, TURN_END).tolist() == [3, 5]
    assert student_byte_ends([ord("a"), OTHER], STUDENT, TURN_END).tolist() == [1, 1]


def test_a_turn_end_that_is_not_final_carries_nothing() -> None:
    ids = [ord("a"), TURN_END, ord("b"), TURN_END]
    assert student_byte_ends(ids, STUDENT, TURN_END).tolist() == [1, 1, 2, 3]
    inside = [ord("a"), TURN_END, OK_BLANK]
    assert student_byte_ends(inside, STUDENT, TURN_END).tolist() == [1, 1, 4]


def test_turn_ends_are_left_out_where_they_are_not_scored() -> None:
    ids = [ord("a"), TURN_END]
    assert student_byte_ends(ids, STUDENT, None).tolist() == [1, 1]
    assert split_turn_end(ids, None) == ((ord("a"), TURN_END), False)
    assert split_turn_end(ids, TURN_END) == ((ord("a"),), True)


def test_peer_1_split_characters_meet_in_one_unit() -> None:
    student = [OK_BLANK, 0xF0, 0x9F, 0x98, 0x80, ord("!")]
    teacher = TEACHER.encode("ok 😀!")
    units = align(
        student_byte_ends(student, STUDENT, TURN_END),
        byte_ends(teacher, TEACHER, has_turn_end=False),
    )
    assert [TEACHER.byte_table.pieces[i] for i in teacher] == [b"ok", " 😀".encode(), b"!"]
    assert units.student_unit.tolist() == [0, 0, 0, 0, 0, 1]
    assert units.teacher_unit.tolist() == [0, 0, 1]


def test_peer_2_empty_spans_and_one_sided_tokens_align() -> None:
    assert align([], byte_ends([], TEACHER, has_turn_end=False)).num_units == 0
    one_sided = [OTHER, ord("a"), ord("b")]
    units = align(student_byte_ends(one_sided, STUDENT, TURN_END), [1, 2])
    assert units.student_unit.tolist() == [-1, 0, 1]


def test_peer_8_different_turn_ends_are_one_unit() -> None:
    student = [*b"hi", TURN_END]
    teacher_ends = byte_ends(list(b"hi"), TEACHER, has_turn_end=True)
    units = align(student_byte_ends(student, STUDENT, TURN_END), teacher_ends)
    assert units.student_unit.tolist() == units.teacher_unit.tolist() == [0, 1, 2]
