"""An hf student begins with another run's weights or adapter, and with nothing else of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.builds import build_student, prepare_student
from actors.export import export_run
from actors.student_side import student_tokenizer
from actors.warm_start import WARM_START_FOLDER, provenance, require_warm_start, take_over_student
from miniverl_dist.backends.hf import HFBackend
from miniverl_dist.backends.rank_address import RankAddress
from miniverl_dist.config.load import load_config
from miniverl_dist.errors import (
    CheckpointError,
    ChecksumError,
    ConfigError,
    MiniverlError,
    TokenizerMismatchError,
)
from tests.support.hf_run import hf_run, tokenizer_folder
from tests.support.hf_student import hf_batch

KINDS: dict[str, dict[str, Any]] = {"lora": {}, "full": {"lora": None}}


def started(root: Path, source: Path, name: str = "second", **model: Any) -> HFBackend:
    """A student over the same recipe that starts from ``source``; a run's whole preparation."""
    described = json.dumps({"student": {"model": model, "warm_start": str(source)}})
    (root / f"{name}.yaml").write_text(f"extends: run.yaml\n{described[1:-1]}\n")
    loaded = load_config(root / f"{name}.yaml", ["loss.kl_coef=0.1"])
    run_dir = root / name
    run_dir.mkdir(exist_ok=True)
    require_warm_start(loaded.config)
    take_over_student(loaded.config, run_dir)
    own = student_tokenizer(loaded.config, run_dir)
    prepare_student(loaded.config, own, run_dir)
    student = build_student(loaded.config, own, run_dir, RankAddress())
    assert isinstance(student, HFBackend)
    return student


@pytest.mark.parametrize("place", ["run", "checkpoint"])
@pytest.mark.parametrize("kind", KINDS)
async def test_weights_are_the_sources_and_all_else_is_new(
    kind: str, place: str, tmp_path: Path
) -> None:
    run, source = await hf_run(tmp_path, **KINDS[kind])
    found = started(tmp_path, run if place == "run" else run / "checkpoints" / "step-000002")
    batch = hf_batch(5)
    np.testing.assert_array_equal(found.logprobs(batch), source.logprobs(batch))
    assert (found.policy_version, found.num_updates) == (0, 0)
    told = provenance(tmp_path / "second")
    assert told is not None
    assert (told["kind"], told["policy_version"]) == ("checkpoint", 2)
    assert len(told["weights_sha256"]) == 64
    assert str(tmp_path) not in json.dumps(told)
    # The reference is where this run begins, not where the source did.
    metrics = found.update(hf_batch(1)).metrics
    assert metrics["reference_kl_mean"] == 0


async def test_an_adapters_folder_is_a_start(tmp_path: Path) -> None:
    run, source = await hf_run(tmp_path)
    export_run(run, tmp_path / "adapter", "adapter")
    found, batch = started(tmp_path, tmp_path / "adapter"), hf_batch(5)
    np.testing.assert_array_equal(found.logprobs(batch), source.logprobs(batch))
    told = provenance(tmp_path / "second")
    assert told is not None
    assert told["kind"] == "adapter"
    # The run has a copy of its own.
    shutil.rmtree(tmp_path / "adapter")
    shutil.rmtree(run)
    assert (tmp_path / "second" / WARM_START_FOLDER / "adapter_model.safetensors").is_file()


OTHERS: dict[str, tuple[dict[str, Any], type[MiniverlError], str]] = {
    "whole weights": (
        {"lora": None},
        CheckpointError,
        "the weights have lora .* student.model has None",
    ),
    "another rank": ({"lora": {"rank": 8}}, CheckpointError, "the weights have lora"),
    "another dtype": ({"dtype": "bfloat16"}, CheckpointError, "the weights have dtype float32"),
}


@pytest.mark.parametrize("other", OTHERS)
async def test_a_student_of_another_form_is_refused(other: str, tmp_path: Path) -> None:
    run, _ = await hf_run(tmp_path)
    changes, error, message = OTHERS[other]
    with pytest.raises(error, match=message):
        started(tmp_path, run, **changes)
    assert not (tmp_path / "second" / WARM_START_FOLDER).exists()


async def test_another_base_is_refused(tmp_path: Path) -> None:
    run, _ = await hf_run(tmp_path)
    base = tmp_path / "base" / "model.safetensors"
    data = base.read_bytes()
    base.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="the weights have base_sha256"):
        started(tmp_path, run)


async def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    run, _ = await hf_run(tmp_path)
    added = (("<|im_start|>", True), ("<|im_end|>", True), ("<|more|>", True))
    tokenizer_folder(tmp_path / "tokenizer", added)
    with pytest.raises(TokenizerMismatchError, match="ids of another tokenizer"):
        started(tmp_path, run)


async def test_an_adapter_of_another_form_is_refused(tmp_path: Path) -> None:
    run, _ = await hf_run(tmp_path)
    folder = tmp_path / "adapter"
    export_run(run, folder, "adapter")
    with pytest.raises(ConfigError, match=r"the adapter has rank 4, student\.model\.lora has 8"):
        started(tmp_path, folder, lora={"rank": 8})
    with pytest.raises(ConfigError, match=r"the adapter is on down_proj, q_proj"):
        started(tmp_path, folder, lora={"target_modules": ["v_proj"]})
    with pytest.raises(ConfigError, match=r"student\.model has no `lora`"):
        started(tmp_path, folder, lora=None)


async def test_what_is_no_start_is_told_what_to_do(tmp_path: Path) -> None:
    run, _ = await hf_run(tmp_path)
    export_run(run, tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"are named as student\.model\.path"):
        started(tmp_path, tmp_path / "whole")


async def test_a_copy_that_is_damaged_is_refused(tmp_path: Path) -> None:
    run, _ = await hf_run(tmp_path)
    started(tmp_path, run)
    path = tmp_path / "second" / WARM_START_FOLDER / "adapter.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ChecksumError, match="adapter"):
        started(tmp_path, run)
