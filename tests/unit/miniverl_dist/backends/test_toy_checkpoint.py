"""What a student stores: resumed bit for bit, refused when it is another's, all or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from miniverl_dist.backends.toy import ToyBackend
from miniverl_dist.backends.weights_io import TokenizerIdentity, read_json, write_json
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.errors import CheckpointError, TokenizerMismatchError
from miniverl_dist.schemas.weights import weights_checksum
from tests.support.toy import (
    TOKENIZER,
    VOCABULARY_IDS,
    random_batch,
    sft_batch,
    state_of,
    tiny_backend,
    tiny_config,
)


@pytest.mark.parametrize("kl_coef", [0.0, 0.2], ids=["no reference", "reference"])
@pytest.mark.parametrize("estimator", ["k3", "k1_in_reward"])
def test_a_resumed_student_goes_on_bit_for_bit(
    kl_coef: float, estimator: str, tmp_path: Path
) -> None:
    loss = LossConfig.model_validate({"kl_coef": kl_coef, "kl_estimator": estimator})
    optim = OptimConfig(lr=5e-3, warmup_steps=2, schedule="linear")

    def student() -> ToyBackend:
        return tiny_backend(loss=loss, optim=optim, num_steps=4)

    straight, first = student(), student()
    for backend in (straight, first):
        backend.sft_update(sft_batch(30), 5e-3)
        backend.finish_warmup()
        for seed in (20, 21):
            backend.update(random_batch(seed, num_minibatches=2))
    first.save(tmp_path / "checkpoint")
    resumed = tiny_backend(loss=loss, optim=optim, num_steps=4, seed=99)
    resumed.load(tmp_path / "checkpoint", 4)
    assert state_of(resumed, tmp_path / "a") == state_of(first, tmp_path / "b")
    for seed in (22, 23):
        one = straight.update(random_batch(seed, num_minibatches=2))
        other = resumed.update(random_batch(seed, num_minibatches=2))
        assert one.metrics | {"seconds_update": 0} == other.metrics | {"seconds_update": 0}
    assert state_of(straight, tmp_path / "c") == state_of(resumed, tmp_path / "d")


def other_student(**changes: object) -> ToyBackend:
    arguments: dict[str, object] = {
        "config": tiny_config(),
        "vocabulary_ids": VOCABULARY_IDS,
        "tokenizer": TOKENIZER,
    }
    return ToyBackend(
        **(arguments | changes),  # type: ignore[arg-type]
        loss=LossConfig(),
        optim=OptimConfig(),
        num_steps=1,
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"tokenizer": TokenizerIdentity("other", "0" * 64)},
            TokenizerMismatchError,
            r"ids of test \(ffffffffffff\), this student holds other",
        ),
        ({"vocabulary_ids": VOCABULARY_IDS[1:]}, CheckpointError, "covers 53 ids, this student 52"),
        ({"config": tiny_config(num_heads=4)}, CheckpointError, "num_heads 2, expected 4"),
        ({"config": tiny_config(num_layers=3)}, CheckpointError, "num_layers 2, expected 3"),
    ],
)
def test_a_checkpoint_of_another_student_is_refused(
    changes: dict[str, object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    tiny_backend().save(tmp_path)
    student = other_student(**changes)
    before = weights_checksum(student.model.arrays())
    with pytest.raises(error, match=message):
        student.load(tmp_path, 0)
    assert weights_checksum(student.model.arrays()) == before


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    backend = tiny_backend()
    backend.update(random_batch(43))
    backend.save(tmp_path)
    with pytest.raises(CheckpointError, match="is of policy version 1, expected 2"):
        tiny_backend().load(tmp_path, 2)


def test_broken_counters_are_refused(tmp_path: Path) -> None:
    tiny_backend().save(tmp_path)
    write_json(
        tmp_path / "trainer.json", read_json(tmp_path / "trainer.json") | {"num_updates": 1.5}
    )
    with pytest.raises(CheckpointError, match="needs the integers"):
        tiny_backend().load(tmp_path, 0)


@pytest.mark.parametrize("name", ["reference.safetensors", "optimizer.safetensors"])
def test_a_load_that_fails_late_changes_nothing(name: str, tmp_path: Path) -> None:
    loss = LossConfig(kl_coef=0.1)
    other = tiny_backend(loss=loss, seed=5)
    other.update(random_batch(44))
    other.save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / name).write_bytes(b"{}")
    backend = tiny_backend(loss=loss)
    backend.update(random_batch(45))
    before = state_of(backend, tmp_path / "before")
    with pytest.raises(CheckpointError, match=name):
        backend.load(tmp_path / "checkpoint", 1)
    assert state_of(backend, tmp_path / "after") == before
