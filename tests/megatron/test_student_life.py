# ruff: noqa: E402 - without megatron nothing below can be imported
"""What a student leaves in its process."""

from __future__ import annotations

import gc
from pathlib import Path

from tests.support.requirements import require_megatron

require_megatron()

from tests.support.megatron_student import student


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_closed_student_leaves_no_thread_behind() -> None:
    """Each process group has threads that poll a hundred times a second."""
    student(None, "qwen3").close()  # whatever torch starts once
    gc.collect()
    before = num_threads()
    backend = student(None, "qwen3")
    assert num_threads() > before + 10
    backend.close()
    del backend
    gc.collect()
    assert num_threads() == before
