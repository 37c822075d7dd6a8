"""Slow alignment oracle: walks the text byte by byte."""

from __future__ import annotations

from collections.abc import Sequence


def slow_align(
    student_ends: Sequence[int], teacher_ends: Sequence[int]
) -> tuple[list[int], list[int], int]:
    """Unit of each student token, of each teacher token, and the number of units."""
    num_bytes = student_ends[-1] if student_ends else 0
    unit_of_byte: list[int] = []
    unit = 0
    for byte in range(num_bytes):
        unit_of_byte.append(unit)
        if byte + 1 in student_ends and byte + 1 in teacher_ends:
            unit += 1
    return _tokens(student_ends, unit_of_byte), _tokens(teacher_ends, unit_of_byte), unit


def _tokens(ends: Sequence[int], unit_of_byte: list[int]) -> list[int]:
    units = []
    start = 0
    for end in ends:
        own = {unit_of_byte[byte] for byte in range(start, end)}
        assert len(own) <= 1, f"token of bytes {start} to {end} lies in units {own}"
        units.append(own.pop() if own else -1)
        start = end
    return units
