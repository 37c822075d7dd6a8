"""A safetensors file is as long as its header says, and every tensor as its shape."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from actors.tensor_headers import stored_shapes
from miniverl_dist.errors import ConfigError

TENSORS = {"a": np.ones((3, 5), np.float32), "b": np.ones(4, np.int64), "c": np.ones((), np.int8)}
WHOLE = save(TENSORS, metadata={"format": "pt"})


def read(folder: Path, data: bytes) -> dict[str, tuple[int, ...]]:
    file = folder / "model.safetensors"
    file.write_bytes(data)
    return stored_shapes([file], "here")


def test_shapes_of_a_whole_file(tmp_path: Path) -> None:
    assert read(tmp_path, WHOLE) == {"a": (3, 5), "b": (4,), "c": ()}


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, len(WHOLE) - 1))
def test_a_file_cut_off_anywhere_is_refused(
    length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(ConfigError, match=r"^here: model\.safetensors is (damaged|no safetensors)"):
        read(tmp_path_factory.mktemp("cut"), WHOLE[:length])


def test_a_file_with_more_behind_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is damaged: it has \d+ bytes, its header describes"):
        read(tmp_path, WHOLE + b"\0")


def with_header(header: Any, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            with_header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)),
            "its header gives 'a' 8 bytes, its shape takes 12",
        ),
        (with_header({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "is no safetensors file"),
        (with_header(["a"], b""), "is no safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "is no safetensors file"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    data: bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, data)


def test_types_of_half_a_byte_are_counted_as_a_whole_only(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    assert read(tmp_path, with_header(header, bytes(2))) == {"a": (4,)}


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(No such file or directory\)"):
        stored_shapes([tmp_path / "none.safetensors"], "here")
