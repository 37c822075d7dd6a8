"""The names in a pickle, read without loading it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from miniverl_dist.backends.megatron.index_check import check_index
from miniverl_dist.errors import CheckpointError


class _Calls:
    def __init__(self, function: Any) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return self._function, ("would have run",)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_foreign_name_is_found_under_every_protocol(tmp_path: Path, protocol: int) -> None:
    value = [torch.Size([2, 3]), "text", {"nested": _Calls(len)}]
    path = written(tmp_path / ".metadata", pickle.dumps(value, protocol))
    with pytest.raises(CheckpointError, match=r"names (__builtin__|builtins)\.len"):
        check_index(path)


def test_known_names_pass(tmp_path: Path) -> None:
    value = [torch.Size([2, 3]), torch.float32, torch.float32, torch.bfloat16, ("torch", "Size")]
    check_index(written(tmp_path / ".metadata", pickle.dumps(value)))
    # The same place of the memo twice: what counts is what was put there last.
    twice = b"\x80\x04\x8c\x02osq\x00\x8c\x05torchq\x000h\x00\x8c\x04Size\x93."
    check_index(written(tmp_path / ".metadata", twice))


@pytest.mark.parametrize(
    "data",
    [
        # A dotted name would reach a module through one that is allowed.
        b"\x80\x04\x8c\x05torch\x8c\x0bos.SizeNope\x93.",
        # The name lies under another value on the stack, which is taken away again.
        b"\x80\x04\x8c\x02os\x8c\x06system\x8c\x05torch\x8c\x04Size00\x93.",
        # The memo is overwritten between the two uses of its place.
        b"\x80\x04\x8c\x05torchq\x00\x8c\x02osq\x000h\x00\x8c\x04Size\x93.",
        b"(S'x'\nios\nsystem\n.",
        b"\x82\x01.",
        b"Pname\n.",
    ],
)
def test_names_that_hide_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CheckpointError, match="no index holds"):
        check_index(written(tmp_path / ".metadata", data))


def test_a_cut_off_file_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / ".metadata", pickle.dumps([torch.Size([2])])[:-3])
    with pytest.raises(ValueError, match=r"pickle|exhausted|expected"):
        check_index(path)
