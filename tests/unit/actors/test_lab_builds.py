"""How much a teacher of whole distributions reads, and what says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.lab_builds import text_limit
from miniverl_dist.config.roles import TeacherConfig

HF = {"kind": "hf", "path": Path("m")}
TOY = {
    "kind": "toy",
    "num_layers": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "ffn_size": 64,
    "max_context_tokens": 160,
    "batch_slots": 1,
}
FIT = {"num_steps": 1, "batch_size": 1, "learning_rate": 1e-3}


class Backbone:
    max_context_tokens = 90


@pytest.mark.parametrize(
    ("model", "backbone", "allowed", "expected"),
    [
        (HF, None, 100, (100, "teacher.max_prefill_tokens")),
        (TOY, None, 100, (100, "teacher.max_prefill_tokens")),
        (TOY, None, 200, (160, "teacher.model.max_context_tokens")),
        (
            {"kind": "student_backbone"},
            Backbone(),
            100,
            (90, "the student's backbone reads no more"),
        ),
        ({"kind": "student_backbone"}, Backbone(), 80, (80, "teacher.max_prefill_tokens")),
    ],
)
def test_the_smaller_limit_counts_and_is_named(
    model: dict[str, Any], backbone: Any, allowed: int, expected: tuple[int, str]
) -> None:
    fields: dict[str, Any] = {"tokenizer": "qwen3.6", "rendering": "verbatim", "model": model}
    if model is TOY:
        fields["fit"] = FIT
    teacher = TeacherConfig.model_validate({**fields, "max_prefill_tokens": allowed})
    found = text_limit(teacher, backbone)
    assert (found.num_tokens, found.set_by) == expected
