from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.reporting import record_tail
from miniverl_dist.reporting.record_tail import lines_from_end, num_lines


@given(
    lines=st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"x")), max_size=8),
    block=st.integers(1, 9),
    is_cut=st.booleans(),
)
@settings(deadline=None)
def test_it_is_the_file_read_backwards_whatever_the_blocks(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], block: int, is_cut: bool
) -> None:
    path = tmp_path_factory.mktemp("tail") / "f"
    path.write_bytes(b"".join(line + b"\n" for line in lines) + (b"rest" if is_cut else b""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_tail, "_BLOCK_BYTES", block)
        found = list(lines_from_end(path, max_bytes=10**6))
    with path.open("rb") as file:
        assert found[::-1] == file.readlines()


def test_only_whole_lines_of_the_last_bytes(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one\ntwo\nthree\n")
    assert list(lines_from_end(path, max_bytes=8)) == [b"three\n"]
    assert list(lines_from_end(path, max_bytes=9)) == [b"three\n"]
    assert list(lines_from_end(path, max_bytes=14)) == [b"three\n", b"two\n", b"one\n"]


def test_a_large_file_is_not_read_for_its_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.seek(1 << 36)  # a sparse file of 64 GiB: reading it whole would time out
        file.write(b"\na\nb\n")
    assert list(islice(lines_from_end(path, max_bytes=1 << 40), 2)) == [b"b\n", b"a\n"]


def test_finished_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert num_lines(path) == 0
    path.write_bytes(b"")
    assert num_lines(path) == 0
    path.write_bytes(300_000 * b"ab\n" + b"half")
    assert num_lines(path) == 300_000
