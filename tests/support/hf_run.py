"""Run directories with an hf student, made without playing an episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from actors.builds import build_student, prepare_student
from actors.student_side import student_tokenizer
from miniverl_dist.backends.base import StudentBackend
from miniverl_dist.backends.hf import HFBackend
from miniverl_dist.backends.rank_address import RankAddress
from miniverl_dist.config.load import load_config
from miniverl_dist.observability.run_dir import CHECKPOINTS, RunDirectory
from miniverl_dist.schemas.run_state import RunState
from miniverl_dist.training.checkpoint import commit
from tests.reference.tiny_tokenizer import QWEN_LIKE, byte_level_spec
from tests.support.hf_student import hf_batch

RECIPE = """\
name: exported
objective: grpo
environment: {kind: bfcl, prompt: compact}
tasks: {kind: ids, train: [multi_turn_base_1], eval: [multi_turn_base_1]}
student: {tokenizer: TOKENIZER, model: MODEL}
rollout: {max_new_tokens: 8, max_context_tokens: 150}
loop: {num_steps: 2, num_groups: 1, group_size: 2}
"""


def tokenizer_folder(folder: Path, added: Any = QWEN_LIKE) -> Path:
    """A byte-level tokenizer of some 280 ids with ChatML's control tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = byte_level_spec(["Hello"], added)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    return folder


def qwen_folder(folder: Path, vocab_size: int = 300, *, max_position_embeddings: int = 200) -> Path:
    """A random model for that tokenizer, with rows to spare."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


async def hf_run(root: Path, **model: Any) -> tuple[Path, HFBackend]:
    """A run with one checkpoint, and the student that it holds."""
    described = {
        "kind": "hf",
        "path": str(qwen_folder(root / "base")),
        "device": "cpu",
        "max_context_tokens": 150,
        "lora": {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"]},
    }
    run_dir, student = await run_of(root, described | model)
    assert isinstance(student, HFBackend)
    return run_dir, student


async def run_of(root: Path, described: dict[str, Any]) -> tuple[Path, StudentBackend]:
    """The same for any student of the tiny tokenizer."""
    text = RECIPE.replace("TOKENIZER", json.dumps(str(tokenizer_folder(root / "tokenizer"))))
    (root / "run.yaml").write_text(text.replace("MODEL", json.dumps(described)))
    loaded = load_config(root / "run.yaml")
    run_dir = root / "run"
    with RunDirectory.create(run_dir) as run:
        loaded.save(run)
        run.write_json("manifest.json", {"config_digest": loaded.digest})
    own = student_tokenizer(loaded.config, run_dir)
    prepare_student(loaded.config, own, run_dir)
    student = build_student(loaded.config, own, run_dir, RankAddress())
    for seed in (1, 2):
        student.update(hf_batch(seed))

    async def save(directory: Path) -> None:
        student.save(directory)

    state = RunState(
        step=2,
        policy_version=2,
        num_publishes=2,
        next_ticket=2,
        curriculum={},
        counters={},
        file_positions={},
        config_digest=loaded.digest,
        seed=0,
        warmup_done=True,
    )
    await commit(run_dir / CHECKPOINTS, "step-000002", state, save)
    return run_dir, student
