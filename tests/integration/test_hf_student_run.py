"""A run with a transformers student; tasks, tokenizers, environment and alignment are real."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from typer.testing import CliRunner

from actors.cli import app
from miniverl_dist.tokens.load import load_tokenizer
from tests.support.cli import call

pytestmark = [pytest.mark.bfcl, pytest.mark.tokenizers]

RECIPE = """\
name: hf_tiny
objective: grpo_opd
environment: {kind: bfcl, prompt: compact, max_observation_chars: 80}
tasks: {kind: ids, train: [multi_turn_base_1], eval: [multi_turn_base_1]}
student:
  model:
    kind: hf
    path: PATH
    device: cpu
    max_context_tokens: 256
    max_microbatch_tokens: 512
    gradient_checkpointing: true
    lora: {rank: 4, alpha: 8.0, target_modules: [q_proj, v_proj, down_proj]}
  warmup: {num_steps: 2, batch_size: 2, learning_rate: 1.0e-2, traces_per_task: 2}
teacher:
  tokenizer: deepseek-v4
  model:
    {kind: toy, num_layers: 1, hidden_size: 32, num_heads: 2, ffn_size: 64,
     max_context_tokens: 384, batch_slots: 4}
  fit: {num_steps: 2, batch_size: 2, traces_per_task: 2}
rollout: {max_new_tokens: 6, max_context_tokens: 256, episode_deadline_s: null, num_workers: 1}
opd: {coef: 0.3}
loss: {kl_coef: 0.02, chunk_size: 64}
loop: {num_steps: 2, num_groups: 1, group_size: 2}
evaluation: {before: false, after: false, baselines: []}
checkpoint: {every_n_steps: 1}
"""


def tiny_qwen(folder: Path) -> Path:
    """Two narrow layers under the whole vocabulary of the real tokenizer."""
    config = Qwen3Config(
        vocab_size=load_tokenizer("qwen3.6").vocab_size + 3,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    model = tiny_qwen(folder / "tiny-qwen3")
    (folder / "hf_tiny.yaml").write_text(RECIPE.replace("PATH", str(model)))
    call("train", folder / "hf_tiny.yaml", "--run-dir", folder / "run", "--json")
    return folder / "run"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_steps_are_real(run: Path) -> None:
    steps = lines(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["policy_version"] == step["step"]
        assert step["grad_norm"] > 0
        assert step["num_loss_tokens"] > 0
        # Engine and trainer compute the same distribution, padding rows left out in both.
        assert step["mismatch_mean_abs"] < 1e-4
        assert step["entropy_mean"] > 1
    # The first step of the run is the reference; the second has left it.
    assert steps[0]["reference_kl_mean"] == 0
    assert steps[1]["reference_kl_mean"] > 0
    assert "ok" in call("validate", run)


def test_the_manifest_tells_the_roles_apart(run: Path) -> None:
    roles = json.loads((run / "manifest.json").read_text())["roles"]
    found = {name: (role["backbone"], role["adapter"]) for name, role in roles.items()}
    assert found == {
        "student": ("student tiny-qwen3", "actor"),
        "reference": ("student tiny-qwen3", "reference"),
        "teacher": ("teacher toy", None),
    }
    assert roles["student"]["restricted_softmax"] is None


def test_a_checkpoint_holds_adapters_only(run: Path) -> None:
    folder = run / "checkpoints" / "step-000002"
    base = run.parent / "tiny-qwen3" / "model.safetensors"
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sum(sizes.values()) < base.stat().st_size / 20
    assert {"adapter.safetensors", "reference.safetensors", "optimizer.safetensors"} <= set(sizes)


def test_a_folder_that_has_changed_is_refused(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    base = run.parent / "tiny-qwen3" / "model.safetensors"
    data = base.read_bytes()
    base.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        result = CliRunner().invoke(app, ["eval", str(copied), "--policy", "student"])
    finally:
        base.write_bytes(data)
    assert result.exit_code == 2
    assert "has changed since the run was started" in result.stderr


def test_a_finished_run_evaluates_its_adapter(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    found = json.loads(call("eval", copied, "--policy", "student", "--json").splitlines()[-1])[
        "result"
    ]
    assert found["rows"][-1]["policy_version"] == 2


def test_the_exported_student_loads_anywhere(run: Path, tmp_path: Path) -> None:
    told = json.loads(call("export", run, "--output", tmp_path / "out", "--json"))["result"]
    assert (told["format"], told["policy_version"]) == ("hf", 2)
    assert told["tokenizer"]["name"] == "qwen3.6"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    turn_end = load_tokenizer("qwen3.6").special_id("<|im_end|>")
    assert turn_end in exported.generation_config.eos_token_id  # `generate` stops there
    base = AutoModelForCausalLM.from_pretrained(run.parent / "tiny-qwen3")
    before = dict(base.named_parameters())
    changed = {n for n, w in exported.named_parameters() if not torch.equal(w, before[n])}
    assert changed == {
        f"model.layers.{layer}.{part}.weight"
        for layer in (0, 1)
        for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    }
    assert "adapter: " in call("export", run, "--output", tmp_path / "a", "--format", "adapter")
    assert (tmp_path / "a" / "adapter_model.safetensors").stat().st_size < 20_000
