"""A teacher over the student's backbone: it answers as its own weights would, and stays."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.export import export_run
from miniverl_dist.backends.hf import HFBackend
from miniverl_dist.backends.hf_adapters import REFERENCE
from miniverl_dist.backends.hf_teacher import BackboneTeacher
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.config.roles import BackboneTeacherConfig, HFStudentConfig
from miniverl_dist.errors import BatchError, ConfigError, RequestRejectedError
from teacher_server.scorer import PrefillScorer, load_scorer
from tests.support.hf_run import hf_run
from tests.support.hf_student import TOKENIZER, hf_batch, hf_student, lora, student_config

TEXT = tuple(range(3, 60))


def student_of(base: Path, num_ids: int, **changes: Any) -> HFBackend:
    """Another student over the folder of ``hf_run``, with sizes of its own."""
    described = {"kind": "hf", "path": base, "device": "cpu", "max_context_tokens": 150}
    config = HFStudentConfig.model_validate(
        described | {"lora": lora(rank=2, target_modules=("v_proj",))} | changes
    )
    return HFBackend(
        config,
        num_ids,
        TOKENIZER,
        loss=LossConfig(kl_coef=0.1),
        optim=OptimConfig(lr=0.1),
        num_steps=9,
    )


def teacher_of(student: HFBackend, adapter: Path | None = None) -> BackboneTeacher:
    config = BackboneTeacherConfig(kind="student_backbone", adapter=adapter)
    teacher = BackboneTeacher(config, student.student.model.config, len(student.vocabulary))
    teacher.attach(student.student)
    return teacher


def scores(model: BackboneTeacher) -> np.ndarray[Any, Any]:
    return PrefillScorer(model, name="t").score(TEXT, 1)


@pytest.fixture
async def exported(tmp_path: Path) -> tuple[Path, Path, Path, int]:
    """Base folder, adapter of a trained run, the same merged, and how many ids there are."""
    run, student = await hf_run(tmp_path)
    export_run(run, tmp_path / "adapter", "adapter")
    export_run(run, tmp_path / "merged", "hf")
    return tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", len(student.vocabulary)


async def test_an_adapter_teaches_as_the_merged_weights_do(
    exported: tuple[Path, Path, Path, int],
) -> None:
    base, adapter, merged, num_ids = exported
    student = student_of(base, num_ids)  # other sizes and layers than the teacher's adapter
    found = scores(teacher_of(student, adapter))
    # The folder's softmax has rows behind the tokenizer's ids, so compare differences of logprobs.
    whole = load_scorer(merged).model
    rows = torch.tensor(TEXT)
    with torch.no_grad():
        logits = whole.logits(whole.hidden(rows))[:-1, :num_ids].double()
    expected = torch.log_softmax(logits, -1).gather(1, rows[1:, None])[:, 0].numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert np.abs(found - scores(teacher_of(student_of(base, num_ids)))).max() > 1e-3


async def test_training_moves_neither_teacher(exported: tuple[Path, Path, Path, int]) -> None:
    base, adapter, _, num_ids = exported
    student = student_of(base, num_ids)
    with_adapter = teacher_of(student, adapter)
    bare = BackboneTeacher(
        BackboneTeacherConfig(kind="student_backbone"), student.student.model.config, num_ids
    )
    bare.attach(student.student)
    before, actor = (scores(with_adapter), scores(bare)), student.logprobs(hf_batch(5))
    student.update(hf_batch(1))
    np.testing.assert_array_equal(scores(with_adapter), before[0])
    np.testing.assert_array_equal(scores(bare), before[1])
    assert np.nanmax(np.abs(student.logprobs(hf_batch(5)) - actor)) > 1e-4


def test_each_thread_has_its_own_role() -> None:
    student = hf_student(loss=LossConfig(kl_coef=0.1), lora=lora()).student
    assert student.adapters is not None
    seen: list[str | None] = []
    with student.adapters.acting_as(None):
        worker = threading.Thread(target=lambda: seen.append(student.adapters.acting))  # type: ignore[union-attr]
        worker.start()
        worker.join()
        with student.adapters.acting_as(REFERENCE):
            assert student.adapters.acting == REFERENCE
        assert student.adapters.acting is None
    assert (seen, student.adapters.acting) == (["actor"], "actor")


def test_dropout_is_not_the_teachers() -> None:
    backend = hf_student(lora=lora(dropout=0.5))
    adapters = backend.student.adapters
    assert adapters is not None
    factors = {name: factor.detach() + 0.1 for name, factor in adapters.factors("actor").items()}
    adapters.add("teacher", lora(), factors)
    rows = torch.tensor(TEXT)[None]

    def states(role: str) -> torch.Tensor:
        with torch.no_grad(), adapters.acting_as(role), adapters.dropout(seed=1):
            return backend.student.model.hidden(rows)

    with torch.no_grad(), adapters.acting_as("teacher"):
        assert torch.equal(states("teacher"), backend.student.model.hidden(rows))
    adapters.load("actor", factors)
    with torch.no_grad():
        assert not torch.equal(states("actor"), backend.student.model.hidden(rows))


def test_a_student_of_whole_weights_is_no_backbone() -> None:
    with pytest.raises(ConfigError, match=r"trains its whole weights.*add student\.model\.lora"):
        teacher_of(hf_student(lora=None))


def test_it_answers_from_attach_on() -> None:
    teacher = BackboneTeacher(BackboneTeacherConfig(kind="student_backbone"), student_config(), 97)
    with pytest.raises(ConfigError, match="not loaded yet"):
        teacher.hidden(torch.tensor([1, 2]))


def test_what_it_cannot_read_is_refused() -> None:
    teacher = teacher_of(hf_student(lora=lora()))
    with pytest.raises(RequestRejectedError, match="0 to 96"):
        teacher.rows([96, 97])
    with pytest.raises(BatchError, match="151 tokens exceeds max_context_tokens"):
        teacher.hidden(torch.zeros(151, dtype=torch.int64))


EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora is True; only plain LoRA"),
    "rslora": ({"use_rslora": True}, "use_rslora is True"),
    "bias": ({"bias": "all"}, "bias is 'all'"),
    "kind": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "saved": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "pattern": ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    "regex": ({"target_modules": ".*_proj"}, "expected a list"),
    "no rank": ({"r": None}, "describes no LoRA adapter"),
    "another rank": ({"r": 5}, r"lora_A' is .*, expected .*another rank"),
    "other layers": ({"target_modules": ["q_proj"]}, "other layers"),
    "no layer": ({"target_modules": ["nope"]}, "no linear layer 'nope'"),
}


@pytest.mark.parametrize("edit", EDITS)
async def test_an_adapter_of_another_form_is_refused(
    edit: str, exported: tuple[Path, Path, Path, int]
) -> None:
    base, adapter, _, num_ids = exported
    changes, why = EDITS[edit]
    described = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(described | changes))
    with pytest.raises(ConfigError, match=why):
        teacher_of(student_of(base, num_ids), adapter)


async def test_damaged_adapters_are_refused(exported: tuple[Path, Path, Path, int]) -> None:
    base, adapter, merged, num_ids = exported
    student = student_of(base, num_ids)
    weights = adapter / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-7])
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors cannot be read"):
        teacher_of(student, adapter)
    shutil.copy(merged / "model.safetensors", weights)
    with pytest.raises(ConfigError, match=r"expected tensors base_model\.model\.LAYER"):
        teacher_of(student, adapter)
    weights.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        teacher_of(student, adapter)
    with pytest.raises(ConfigError, match=r"holds no adapter.*export RUN --format adapter"):
        teacher_of(student, base)
