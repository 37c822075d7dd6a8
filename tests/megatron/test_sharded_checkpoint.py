"""Sharded checkpoints: written under one layout, taken up under another, or refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.requirements import require_megatron

require_megatron()

from miniverl_dist.backends.weights_io import TokenizerIdentity  # noqa: E402
from miniverl_dist.config.cluster import ParallelConfig  # noqa: E402
from miniverl_dist.config.recipe import LossConfig  # noqa: E402
from miniverl_dist.errors import CheckpointError, TokenizerMismatchError  # noqa: E402
from tests.support.megatron_student import (  # noqa: E402
    folder,
    sft_batch,
    student,
    train_batch,
)
from tests.support.ranks import Rank, run_ranks  # noqa: E402

LOSS = LossConfig(kl_coef=0.1)
ONE = ParallelConfig()
TP2 = ParallelConfig(tensor=2, sequence=True)
PP2 = ParallelConfig(pipeline=2)
EP2 = ParallelConfig(expert=2)


class Written(NamedTuple):
    """How a student went on behind its checkpoint."""

    losses: list[float]
    weights: dict[str, Any]


def losses(backend: Any) -> list[float]:
    """Of the next steps: those after the first depend on moments and step count."""
    return [
        backend.update(train_batch(2)).metrics["loss"],
        backend.update(train_batch(3)).metrics["loss"],
        backend.sft_update(sft_batch(), 1e-3)["loss"],
    ]


def write(rank: Rank, model_type: str, directory: Path, fields: dict[str, Any]) -> Written:
    """Warm-up, two updates, a checkpoint, and on."""
    backend = student(rank, model_type, loss=LOSS, **fields)
    with closing(backend):
        backend.sft_update(sft_batch(), 1e-3)
        backend.finish_warmup()
        backend.update(train_batch(0, num_minibatches=2))
        backend.update(train_batch(1))
        backend.save(directory)
        weights = dict(backend.snapshot().tensors)
        return Written(losses(backend), weights)


def resume(rank: Rank, model_type: str, directory: Path, fields: dict[str, Any]) -> Written:
    backend = student(rank, model_type, loss=LOSS, **fields)
    with closing(backend):
        # Moments and counters of its own, which have to give way.
        backend.update(train_batch(5))
        backend.load(directory, 3)
        assert (backend.policy_version, backend.num_updates) == (3, 2)
        weights = dict(backend.snapshot().tensors)
        return Written(losses(backend), weights)


def check(
    tmp_path: Path,
    model_type: str,
    writer: tuple[int, dict[str, Any]],
    readers: list[tuple[int, dict[str, Any]]],
    tolerance: float = 1e-6,
) -> None:
    folder(model_type, 0)
    world, fields = writer
    wanted = run_ranks(world, write, model_type, tmp_path / "ck", fields)[0]
    for world, fields in readers:
        found = run_ranks(world, resume, model_type, tmp_path / "ck", fields)[0]
        for name, value in wanted.weights.items():
            np.testing.assert_array_equal(found.weights[name], value, err_msg=name)
        # Policy losses are differences around 0 of numbers around 1.
        expected = pytest.approx(wanted.losses, rel=tolerance, abs=tolerance)
        assert found.losses == expected, fields


def test_a_tensor_parallel_checkpoint_resumes_in_stages_and_on_one_rank(tmp_path: Path) -> None:
    readers = [(2, {"parallel": TP2}), (2, {"parallel": PP2}), (1, {"parallel": ONE})]
    check(tmp_path, "qwen3", (2, {"parallel": TP2}), readers)


def test_experts_are_regrouped_with_their_moments(tmp_path: Path) -> None:
    plain = {"parallel": ONE, "distributed_optimizer": False}
    readers = [(1, {"parallel": ONE}), (1, plain), (2, {"parallel": TP2}), (2, {"parallel": EP2})]
    check(tmp_path, "qwen3_moe", (2, {"parallel": EP2}), readers)


def test_a_delta_net_checkpoint_resumes_under_another_layout(tmp_path: Path) -> None:
    plain = {"parallel": ONE, "distributed_optimizer": False}
    check(tmp_path, "qwen3_5_moe", (2, {"parallel": TP2}), [(2, {"parallel": PP2}), (1, plain)])


def test_bfloat16_masters_survive(tmp_path: Path) -> None:
    """Weights alone would lose what the masters have beyond 8 bits, and the losses would differ."""
    half = {"dtype": "bfloat16", "parallel": ONE}
    plain = half | {"distributed_optimizer": False}
    check(tmp_path, "qwen3", (1, half), [(1, half), (1, plain)], tolerance=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "qwen3_5_moe"])
def test_four_ranks_resume_under_other_layouts(tmp_path: Path, model_type: str) -> None:
    both = ParallelConfig(tensor=2, sequence=True, pipeline=2)
    context = ParallelConfig(context=2)
    readers = [(2, {"parallel": context}), (4, {"parallel": TP2}), (1, {"parallel": ONE})]
    check(tmp_path, model_type, (4, {"parallel": both}), readers)


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one rank at policy version 1."""
    directory = tmp_path_factory.mktemp("saved") / "ck"
    with closing(student(None, "qwen3", loss=LOSS)) as backend:
        backend.update(train_batch())
        backend.save(directory)
        before = files_of(directory)
        again = directory.parent / "again"
        backend.save(again)
        assert files_of(again) == before
        backend.update(train_batch())
    assert files_of(directory) == before
    return directory


def test_what_a_checkpoint_holds(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == [
        "exp_avg",
        "exp_avg_sq",
        "reference",
        "student.json",
        "weights",
    ]
    found = json.loads((saved / "student.json").read_text())
    assert found["policy_version"] == found["num_updates"] == found["num_optimizer_steps"] == 1
    assert found["tokenizer"] == {"name": "test", "fingerprint": "f" * 64}


def copy_of(saved: Path, tmp_path: Path, spoil: Callable[[Path], object]) -> Path:
    directory = tmp_path / "ck"
    for name, data in files_of(saved).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    spoil(directory)
    return directory


def refused(
    directory: Path, error: type[Exception], message: str, version: int = 1, **fields: Any
) -> None:
    """The load is refused, and the student is what it was."""
    with closing(student(None, fields.pop("model_type", "qwen3"), loss=LOSS, **fields)) as backend:
        backend.update(train_batch(4))
        before = dict(backend.snapshot().tensors)
        with pytest.raises(error, match=message):
            backend.load(directory, version)
        assert backend.policy_version == 1
        for name, value in backend.snapshot().tensors.items():
            np.testing.assert_array_equal(value, before[name])
        backend.update(train_batch(4))


def test_another_version_tokenizer_or_architecture_is_refused(saved: Path) -> None:
    refused(saved, CheckpointError, "of policy version 1, expected 2", version=2)
    other = TokenizerIdentity("other", "e" * 64)
    refused(saved, TokenizerMismatchError, "trained on ids of test", tokenizer=other)
    refused(saved, CheckpointError, "the checkpoint has", model_type="qwen3_moe")
    refused(saved, CheckpointError, "dtype float32, expected bfloat16", dtype="bfloat16")


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


class _Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code in a load path has run",))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "student.json").unlink(), "cannot read student.json"),
        (lambda d: (d / "student.json").write_text("{}"), "student.json is malformed"),
        (lambda d: (d / "weights" / "metadata.json").unlink(), "not written to its end"),
        (lambda d: (d / "exp_avg" / ".metadata").unlink(), "exp_avg of the checkpoint cannot be"),
        (lambda d: cut_off(d / "exp_avg_sq" / ".metadata"), "exp_avg_sq of the checkpoint"),
        (lambda d: cut_off(d / "reference" / "__0_0.distcp"), "reference of the checkpoint"),
        (
            lambda d: (d / "weights" / ".metadata").write_bytes(pickle.dumps(_Attack())),
            r"names builtins.print, which no index holds",
        ),
    ],
)
def test_a_broken_checkpoint_is_refused_and_changes_nothing(
    saved: Path, tmp_path: Path, spoil: Callable[[Path], object], message: str, capsys: Any
) -> None:
    refused(copy_of(saved, tmp_path, spoil), CheckpointError, message)
    assert "has run" not in capsys.readouterr().out


def unwritable(rank: Rank, directory: Path) -> str:
    with closing(student(rank, "qwen3", parallel=TP2)) as backend:
        with pytest.raises(CheckpointError) as error:
            backend.save(directory)
        return str(error.value)


def test_a_failed_write_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    messages = run_ranks(2, unwritable, tmp_path / "file" / "ck")
    assert all("cannot make" in message for message in messages)
