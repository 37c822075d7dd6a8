"""An exported folder is the student, says what it is, and nothing of who made it."""

from __future__ import annotations

import getpass
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from actors.export import export_run
from actors.hf_files import folder_sha256
from miniverl_dist.backends.hf import HFBackend
from miniverl_dist.errors import CheckpointError, ChecksumError, ConfigError
from tests.support.hf_run import hf_run
from tests.support.hf_student import hf_batch, sequences

KINDS: dict[str, dict[str, Any]] = {"lora": {}, "full": {"lora": None}}


def logprobs(model: Any, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    rows = torch.from_numpy(ids)
    with torch.no_grad():
        logits = model(input_ids=rows[None]).logits[0, :-1, : model.num_ids].double()
    found: np.ndarray[Any, Any] = (
        torch.log_softmax(logits, -1).gather(1, rows[1:, None]).squeeze(1).numpy()
    )
    return found


def loaded(folder: Path, student: HFBackend) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.num_ids = len(student.vocabulary)
    return model


@pytest.mark.parametrize("kind", KINDS)
async def test_transformers_loads_the_student(kind: str, tmp_path: Path) -> None:
    run, student = await hf_run(tmp_path, **KINDS[kind])
    told = export_run(run, tmp_path / "out")
    model, batch = loaded(tmp_path / "out", student), hf_batch(5)
    found = student.logprobs(batch)
    base = loaded(tmp_path / "base", student)
    for span in sequences(batch):
        ids = batch.token_ids[span]
        np.testing.assert_allclose(logprobs(model, ids), found[span][1:], rtol=0, atol=1e-5)
    assert np.abs(logprobs(base, ids) - found[span][1:]).max() > 1e-3
    assert (told["format"], told["policy_version"]) == ("hf", 2)
    assert told["checkpoint"]["name"] == "step-000002"
    assert told["student"]["base"] == {"name": "base", "sha256": folder_sha256(tmp_path / "base")}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "export.json"} <= names
    assert set(told["files"]) == names - {"export.json"}


async def test_the_adapter_is_what_peft_stores(tmp_path: Path) -> None:
    run, student = await hf_run(tmp_path)
    export_run(run, tmp_path / "out", "adapter")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert config["target_modules"] == ["down_proj", "q_proj"]
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 2
    # By hand: base + alpha / r * B A.
    model = loaded(tmp_path / "base", student)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            key = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{key}.lora_A.weight" in tensors:
                first, second = tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"]
                weight += torch.from_numpy(2.0 * second @ first)
    batch = hf_batch(5)
    for span in sequences(batch):
        found = logprobs(model, batch.token_ids[span])
        expected = student.logprobs(batch)[span][1:]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


async def test_peft_itself_loads_the_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    run, student = await hf_run(tmp_path)
    export_run(run, tmp_path / "out", "adapter")
    base = loaded(tmp_path / "base", student)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    batch = hf_batch(5)
    for span in sequences(batch):
        ids = batch.token_ids[span]
        expected = student.logprobs(batch)[span][1:]
        np.testing.assert_allclose(logprobs(model, ids), expected, rtol=0, atol=1e-5)


async def test_nothing_is_told_of_machine_or_user(tmp_path: Path) -> None:
    run, _ = await hf_run(tmp_path)
    for form in ("hf", "adapter"):
        export_run(run, tmp_path / form, form)  # type: ignore[arg-type]
        for path in (tmp_path / form).iterdir():
            data = path.read_bytes()
            if path.suffix == ".safetensors":
                data = data[
                    8 : 8 + int.from_bytes(data[:8], "little")
                ]  # any text may be in numbers
            for secret in (str(tmp_path), socket.gethostname(), "/home/", "/root"):
                assert secret.encode() not in data, (path.name, secret)
    assert getpass.getuser() not in (tmp_path / "hf" / "export.json").read_text()


async def test_equal_runs_give_equal_folders(tmp_path: Path) -> None:
    run, _ = await hf_run(tmp_path)
    for name in ("a", "b"):
        export_run(run, tmp_path / name)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"
    )
    assert first == second


async def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    run, _ = await hf_run(tmp_path)
    (tmp_path / "out").mkdir()
    export_run(run, tmp_path / "out")  # empty: nothing to lose
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(ConfigError, match="holds something already"):
        export_run(run, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


async def test_students_without_an_adapter_have_none_to_export(tmp_path: Path) -> None:
    run, _ = await hf_run(tmp_path, lora=None)
    with pytest.raises(ConfigError, match="was trained without LoRA; use --format hf"):
        export_run(run, tmp_path / "out", "adapter")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            lambda root: flipped(root / "run/checkpoints/step-000002/adapter.safetensors"),
            ChecksumError,
            "adapter.safetensors: SHA-256",
        ),
        (
            lambda root: flipped(root / "base/model.safetensors"),
            CheckpointError,
            "has changed since the run was started",
        ),
        (lambda root: flipped(root / "run/student/base.json"), ChecksumError, "base.json"),
    ],
)
async def test_what_is_damaged_is_not_exported(
    spoil: Callable[[Path], None], error: type[Exception], message: str, tmp_path: Path
) -> None:
    run, _ = await hf_run(tmp_path)
    spoil(tmp_path)
    with pytest.raises(error, match=message):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["2", "step-000002", "{run}/checkpoints/step-000002"])
async def test_a_checkpoint_is_named_by_its_step_its_name_or_its_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2").mkdir()  # a folder that happens to have that name
    run, _ = await hf_run(tmp_path)
    told = export_run(run, tmp_path / "out", checkpoint=name.format(run=run))
    assert told["checkpoint"]["name"] == "step-000002"


async def test_a_checkpoint_that_the_run_does_not_have_is_refused(tmp_path: Path) -> None:
    run, _ = await hf_run(tmp_path)
    with pytest.raises(ConfigError, match=r"^--checkpoint 3: there is no such.*has step-000002"):
        export_run(run, tmp_path / "out", checkpoint="3")
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    foreign = tmp_path / "other" / "checkpoints" / "step-000002"
    shutil.copytree(run / "checkpoints" / "step-000002", foreign)
    with pytest.raises(ConfigError, match="found a checkpoint of another run, expected one of"):
        export_run(run, tmp_path / "out", checkpoint=str(foreign))
