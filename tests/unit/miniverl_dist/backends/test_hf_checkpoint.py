"""What an hf student stores: resumed bit for bit, refused when it is another's, all or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miniverl_dist.backends.hf import HFBackend
from miniverl_dist.backends.weights_io import TokenizerIdentity, read_json, write_json
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.errors import CheckpointError, TokenizerMismatchError
from tests.support.hf_student import (
    NUM_IDS,
    hf_batch,
    hf_sft_batch,
    hf_student,
    lora,
    student_config,
    student_folder,
    student_state,
)

OPTIM = OptimConfig(lr=5e-3, warmup_steps=2, schedule="linear")
STUDENTS: dict[str, dict[str, Any]] = {
    "full": {},
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"lora": lora()},
    "lora dropout": {"lora": lora(dropout=0.3)},
    "lora bfloat16": {"lora": lora(), "dtype": "bfloat16"},
}


@pytest.mark.parametrize("kind", STUDENTS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.2], ids=["no reference", "reference"])
def test_a_resumed_student_goes_on_bit_for_bit(kind: str, kl_coef: float, tmp_path: Path) -> None:
    def student(seed: int = 0) -> HFBackend:
        loss = LossConfig(kl_coef=kl_coef, kl_estimator="k1_in_reward")
        return hf_student(loss=loss, optim=OPTIM, num_steps=4, seed=seed, **STUDENTS[kind])

    straight, first = student(), student()
    for backend in (straight, first):
        backend.sft_update(hf_sft_batch(30), 5e-3)
        backend.finish_warmup()
        for seed in (20, 21):
            backend.update(hf_batch(seed, num_minibatches=2))
    first.save(tmp_path / "checkpoint")
    resumed = student()
    resumed.sft_update(hf_sft_batch(31), 5e-3)
    resumed.load(tmp_path / "checkpoint", 4)
    assert student_state(resumed, tmp_path / "a") == student_state(first, tmp_path / "b")
    assert resumed.snapshot().checksum == first.snapshot().checksum
    for seed in (22, 23):
        one = straight.update(hf_batch(seed, num_minibatches=2))
        other = resumed.update(hf_batch(seed, num_minibatches=2))
        assert one.metrics | {"seconds_update": 0} == other.metrics | {"seconds_update": 0}
    assert student_state(straight, tmp_path / "c") == student_state(resumed, tmp_path / "d")


def test_an_adapter_is_small_on_disk(tmp_path: Path) -> None:
    hf_student(lora=lora(rank=1), loss=LossConfig(kl_coef=0.1)).save(tmp_path)
    files = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(files) == {
        "student.json",
        "adapter.safetensors",
        "reference.safetensors",
        "optimizer.safetensors",
    }
    whole = (student_folder() / "model.safetensors").stat().st_size
    assert files["adapter.safetensors"] < whole / 10


def other(**changes: Any) -> HFBackend:
    settings: dict[str, Any] = {"lora": lora()}
    return hf_student(**settings | changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: other(family="llama"), r"the checkpoint has .*, expected"),
        (lambda: other(lora=lora(rank=8)), r"has lora .*'rank': 4.*, expected .*'rank': 8"),
        (lambda: other(lora=None), r"has lora .*, expected None"),
        (lambda: other(dtype="bfloat16"), "has dtype float32, expected bfloat16"),
        (lambda: other(base_sha256="c" * 64), "has base_sha256 bbb.*, expected ccc"),
    ],
)
def test_a_checkpoint_of_another_student_is_refused(
    make: Any, message: str, tmp_path: Path
) -> None:
    other().save(tmp_path / "checkpoint")
    student = make()
    before = student_state(student, tmp_path / "before")
    with pytest.raises(CheckpointError, match=message):
        student.load(tmp_path / "checkpoint", 0)
    assert student_state(student, tmp_path / "after") == before


def test_a_checkpoint_of_another_tokenizer_or_version_is_refused(tmp_path: Path) -> None:
    backend = other()
    backend.update(hf_batch(1))
    backend.save(tmp_path)
    with pytest.raises(CheckpointError, match="is of policy version 1, expected 2"):
        other().load(tmp_path, 2)
    student = HFBackend(
        student_config(lora=lora()),
        NUM_IDS,
        TokenizerIdentity("other", "0" * 64),
        loss=LossConfig(),
        optim=OptimConfig(),
        num_steps=1,
        base_sha256="b" * 64,
    )
    with pytest.raises(TokenizerMismatchError, match=r"ids of test \(ffff.*student holds other"):
        student.load(tmp_path, 1)


@pytest.mark.parametrize(
    "changes", [{"num_updates": 1.5}, {"tokenizer": None}, {"architecture": 3}, {"lora": 1}]
)
def test_a_malformed_description_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    other().save(tmp_path)
    write_json(tmp_path / "student.json", read_json(tmp_path / "student.json") | changes)
    with pytest.raises(CheckpointError, match=r"student\.json|has lora 1"):
        other().load(tmp_path, 0)


@pytest.mark.parametrize("kind", ["full", "bfloat16", "lora"])
@pytest.mark.parametrize("name", ["reference.safetensors", "optimizer.safetensors"])
def test_a_load_that_fails_late_changes_nothing(kind: str, name: str, tmp_path: Path) -> None:
    loss = LossConfig(kl_coef=0.1)
    first = hf_student(loss=loss, **STUDENTS[kind])
    first.update(hf_batch(44))
    first.save(tmp_path / "checkpoint")
    backend = hf_student(loss=loss, **STUDENTS[kind])
    backend.update(hf_batch(45))
    before = student_state(backend, tmp_path / "before")
    for broken in (b"{}", (tmp_path / "before" / "student.json").read_bytes()):
        (tmp_path / "checkpoint" / name).write_bytes(broken)
        with pytest.raises(CheckpointError, match=name):
            backend.load(tmp_path / "checkpoint", 1)
    # Well-formed, and of another optimizer.
    (tmp_path / "checkpoint" / "reference.safetensors").write_bytes(
        (tmp_path / "before" / "reference.safetensors").read_bytes()
    )
    (tmp_path / "checkpoint" / "optimizer.safetensors").write_bytes(
        (tmp_path / "before" / "reference.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError, match=r"^optimizer"):
        backend.load(tmp_path / "checkpoint", 1)
    assert student_state(backend, tmp_path / "after") == before
