"""What an hf student can be: refused folders, recomputed layers, roles and their traces."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    PhiConfig,
)

from miniverl_dist.backends.hf import HFBackend
from miniverl_dist.backends.hf_adapters import LoraAdapters
from miniverl_dist.backends.hf_model import device_of, load_module
from miniverl_dist.config.recipe import LossConfig
from miniverl_dist.config.roles import HFStudentConfig
from miniverl_dist.errors import CheckpointError, ConfigError, MissingDependencyError
from tests.support.hf_student import (
    FAMILIES,
    NUM_IDS,
    SMOOTH,
    TOKENIZER,
    hf_batch,
    hf_sft_batch,
    hf_student,
    lora,
    student_config,
    student_folder,
    student_state,
)

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def at(folder: Path, **changes: Any) -> HFStudentConfig:
    return HFStudentConfig.model_validate({"kind": "hf", "path": folder, "device": "cpu"} | changes)


def stored(config: Any, folder: Path) -> Path:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_folder_with_missing_weights_is_refused(tmp_path: Path) -> None:
    """transformers would draw them at random and only warn."""
    folder = shutil.copytree(student_folder("llama", tied=False), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack 'model.layers.1.mlp.up_proj.weight' \(1 tensors"):
        load_module(at(folder))


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(student_folder("llama", tied=False), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        load_module(at(folder))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(student_folder(), tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="no causal LM that transformers can load from"):
        load_module(at(folder))


def test_logits_that_are_no_projection_are_refused(tmp_path: Path) -> None:
    capped = Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.01)
    with pytest.raises(ConfigError, match=r"gemma2 model .* are not its output projection"):
        load_module(at(stored(capped, tmp_path / "capped")))
    biased = PhiConfig(**SMALL)
    with pytest.raises(ConfigError, match=r"phi model .* a bias in its output projection"):
        load_module(at(stored(biased, tmp_path / "biased")))


def test_loading_draws_no_numbers_of_others() -> None:
    before = torch.random.get_rng_state()
    hf_student()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_tokenizer_with_more_ids_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 100 vocabulary rows, the tokenizer has 101 ids"):
        HFBackend(
            student_config(),
            101,
            TOKENIZER,
            loss=LossConfig(),
            optim=SMOOTH,
            num_steps=1,
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_is_refused_without_one() -> None:
    assert device_of(at(Path("m"), device="auto")) == torch.device("cpu")
    with pytest.raises(ConfigError, match="asks for device cuda, which needs a GPU"):
        device_of(at(Path("m"), device="cuda"))
    quantized = at(Path("m"), device="auto", quantization="nf4", lora=lora())
    with pytest.raises(ConfigError, match="asks for nf4, which needs a GPU"):
        device_of(quantized)


def test_quantisation_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    quantized = at(Path("m"), device="cuda", quantization="int8", lora=lora())
    with pytest.raises(MissingDependencyError, match="int8 needs bitsandbytes: pip install"):
        device_of(quantized)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "nf4"}, "rounds weights that a step could not move: add `lora`"),
        ({"quantization": "int8", "lora": lora(), "device": "cpu"}, "CUDA kernels"),
    ],
)
def test_contradictions_are_refused_by_the_config(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HFStudentConfig.model_validate(
            {"kind": "hf", "path": Path("m"), "device": "cuda"} | changes
        )


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "query"), "a qwen3 model has no linear layer 'query'; it has down_proj, gate"),
        (("q_proj", "lm_head"), "names the output projection"),
    ],
)
def test_adapters_of_other_layers_are_refused(targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hf_student(lora=lora(target_modules=targets))


# --- roles ---


def adapters(backend: HFBackend) -> LoraAdapters:
    assert backend.student.adapters is not None
    return backend.student.adapters


def test_switching_roles_leaves_no_trace(tmp_path: Path) -> None:
    backend, batch = hf_student(lora=lora(), loss=LossConfig(kl_coef=0.1)), hf_batch(1)
    backend.update(batch)
    before, own = student_state(backend, tmp_path / "before"), backend.logprobs(batch)
    flags = {n: p.requires_grad for n, p in backend.student.model.module.named_parameters()}
    roles = adapters(backend)
    rows = torch.from_numpy(batch.token_ids[None, :9])

    def hidden() -> torch.Tensor:
        return backend.student.model.hidden(rows).detach()

    with roles.acting_as("reference"):
        assert roles.acting == "reference"
        reference = hidden()
        with roles.acting_as(None):
            assert torch.equal(hidden(), reference)  # B of the reference is 0 still
        with roles.acting_as("actor"):
            assert not torch.equal(hidden(), reference)
        assert torch.equal(hidden(), reference)
    with pytest.raises(ZeroDivisionError), roles.acting_as("reference"), roles.acting_as(None):
        1 / 0  # noqa: B018
    assert roles.acting == "actor"
    found = {n: p.requires_grad for n, p in backend.student.model.module.named_parameters()}
    assert found == flags
    np.testing.assert_array_equal(backend.logprobs(batch), own)
    assert student_state(backend, tmp_path / "after") == before


def test_roles_are_played_by_weights_of_their_own() -> None:
    """Reference, actor and no adapter at all give three answers, and copies stay apart."""
    backend, batch = hf_student(lora=lora(), loss=LossConfig(kl_coef=0.1)), hf_batch(1)
    roles, steps = adapters(backend), backend._steps
    parts = backend._cut(batch.sequence_starts, np.arange(len(batch.group_ids)))

    def said(role: str) -> Any:
        rows = backend.vocabulary.rows(batch.token_ids)
        return steps.logprobs(rows, parts, batch.loss_mask, 1.0, role)[batch.loss_mask]

    folder = said("actor")
    backend.sft_update(hf_sft_batch(2), 0.05)
    backend.finish_warmup()
    frozen = said("actor")
    np.testing.assert_array_equal(said("reference"), frozen)
    for name, factor in roles.factors("reference").items():
        assert factor.data_ptr() != roles.factors("actor")[name].data_ptr()
        assert not factor.requires_grad
    backend.update(batch)
    np.testing.assert_array_equal(said("reference"), frozen)
    assert np.abs(said("actor") - frozen).max() > 1e-3
    assert np.abs(frozen - folder).max() > 1e-3


def test_roles_that_do_not_exist_are_refused() -> None:
    roles = adapters(hf_student(lora=lora()))
    with pytest.raises(ConfigError, match="no adapter for role 'teacher'; there are actor"):
        roles.factors("teacher")
    with (
        pytest.raises(ConfigError, match="no adapter for role 'reference'"),
        roles.acting_as("reference"),
    ):
        pytest.fail("acts without an adapter")
    module = load_module(student_config())
    with pytest.raises(ConfigError, match="each needs an adapter of its own"):
        LoraAdapters(module, lora(), ("actor", "actor"), 0)


def test_an_adapter_of_another_form_is_refused() -> None:
    roles = adapters(hf_student(lora=lora()))
    values = {n: f.detach().clone() for n, f in roles.factors("actor").items()}
    before = {n: f.detach().clone() for n, f in roles.factors("actor").items()}
    name = min(values)
    for spoilt in (
        {n: v + 1 for n, v in values.items() if n != name},
        {n: (v + 1)[:1] if n == name else v + 1 for n, v in values.items()},
        {n: (v + 1).double() if n == name else v + 1 for n, v in values.items()},
    ):
        with pytest.raises(CheckpointError, match=re.escape(repr(name))):
            roles.load("actor", spoilt)
    for name, factor in roles.factors("actor").items():
        assert torch.equal(factor, before[name])


# --- gradient checkpointing ---


class Saved:
    """Bytes that autograd keeps for the backward pass."""

    def __init__(self) -> None:
        self.peak = self.bytes = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.nbytes
        self.peak = max(self.peak, self.bytes)
        return tensor


def kept_bytes(backend: HFBackend) -> int:
    saved = Saved()
    rows = torch.arange(90).remainder(NUM_IDS)[None].repeat(2, 1)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        backend.student.model.hidden(rows)
    return saved.peak


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_recomputed_layers_change_memory_alone(family: str, kind: str) -> None:
    changes: dict[str, Any] = {"optim": SMOOTH, "loss": LossConfig(kl_coef=0.1)}
    if kind == "lora":
        changes["lora"] = lora(family)
    kept = hf_student(family, **changes)
    recomputed = hf_student(family, **changes, gradient_checkpointing=True)
    assert kept_bytes(recomputed) < kept_bytes(kept) / 3
    for seed in (1, 2):
        expected = kept.update(hf_batch(seed)).metrics
        found = recomputed.update(hf_batch(seed)).metrics
        for name in ("loss", "grad_norm", "kl_loss", "entropy_mean"):
            assert found[name] == pytest.approx(expected[name], rel=1e-6), name
    for name, weight in kept.student.trained.items():
        other = recomputed.student.trained[name]
        torch.testing.assert_close(other, weight, rtol=0, atol=1e-6)


def test_recomputed_layers_drop_the_same_again() -> None:
    changes: dict[str, Any] = {"lora": lora(dropout=0.4), "optim": SMOOTH}
    states = []
    for recompute in (False, True):
        backend = hf_student(**changes, gradient_checkpointing=recompute)
        for seed in (1, 2):
            backend.update(hf_batch(seed))
        states.append(backend.snapshot().tensors)
    for name, weight in states[0].items():
        np.testing.assert_allclose(states[1][name], weight, rtol=0, atol=1e-6)
