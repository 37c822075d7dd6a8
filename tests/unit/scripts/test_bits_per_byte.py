"""Bits per byte against plain transformers, on a random model and real episodes."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.student_side import student_side
from miniverl_dist.config.load import load_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import ConfigError
from miniverl_dist.schemas.trajectory import ASSISTANT_KINDS
from miniverl_dist.tokens.load import load_tokenizer
from rollout_server.traces import Trace
from scripts.bits_per_byte import held_out, measure
from tests.reference.tiny_tokenizer import marked_spec
from tests.support.hf_run import qwen_folder, tokenizer_folder

RECIPE = """\
name: tiny
objective: grpo_opd
environment: {kind: calculator, difficulty: easy, num_tasks: 6, prompt: compact}
tasks: {kind: split, split: tail, num_eval: 2}
student:
  tokenizer: ROOT/student
  model: {kind: hf, path: ROOT/base, device: cpu, max_context_tokens: 600}
teacher:
  tokenizer: ROOT/teacher
  rendering: raw
  text_start: <bos>
  mode: privileged_context
  model: {kind: hf, path: ROOT/base}
rollout: {max_context_tokens: 600, max_new_tokens: 150}
opd: {coef: 0.3}
loop: {num_steps: 1, num_groups: 1, group_size: 2}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    root = tmp_path_factory.mktemp("bits")
    tokenizer_folder(root / "student")
    (root / "teacher").mkdir()
    (root / "teacher" / "tokenizer.json").write_text(json.dumps(marked_spec()))
    folder = qwen_folder(root / "base", 400)
    described = json.loads((folder / "config.json").read_text())
    # The weights know no positions; a recipe's episodes are longer than this model's 200.
    (folder / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 2000}))
    (root / "tiny.yaml").write_text(RECIPE.replace("ROOT", str(root)))
    return load_config(root / "tiny.yaml").config


def texts(config: RunConfig) -> list[Trace]:
    side = student_side(config, load_tokenizer(config.student.tokenizer))
    return asyncio.run(held_out(side))


def folder_of(config: RunConfig) -> Path:
    path: Path = config.student.model.path  # type: ignore[union-attr]
    return path


def expected_bits(config: RunConfig) -> tuple[float, int]:
    """One token after the other, from whole-text logits; bytes from the messages' own texts."""
    plain: Any = AutoModelForCausalLM.from_pretrained(folder_of(config)).eval()
    total, num_bytes = 0.0, 0
    for trace in texts(config):
        trajectory = trace.trajectory
        ids = torch.tensor(trajectory.token_ids)
        with torch.no_grad():
            logprobs = torch.log_softmax(plain(input_ids=ids[None]).logits[0].double(), -1)
        for span in trajectory.spans:
            if span.kind in ASSISTANT_KINDS:
                # Every written turn of an oracle ends with its turn end, which has no bytes.
                for place in range(span.start, span.end - 1):
                    total -= float(logprobs[place - 1, ids[place]])
        num_bytes += sum(len(m.content) for m in trajectory.messages if m.role == "assistant")
    return total / math.log(2) / num_bytes, num_bytes


def test_the_student_against_plain_transformers(config: RunConfig) -> None:
    bits, num_bytes = expected_bits(config)
    found = measure(config, {"base": folder_of(config)})
    row = found["models"]["base"]
    assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert row["num_bytes"] == num_bytes
    assert found["num_texts"] == 4  # two tasks, at two horizons
    assert found["tasks"] == ["calculator_easy_004", "calculator_easy_005"]


def test_both_read_the_same_bytes_and_the_same_texts(config: RunConfig) -> None:
    found = measure(config, {"base": folder_of(config)}, with_teacher=True)
    rows = found["models"]
    assert set(rows) == {"base", "teacher", "teacher, shown the solution"}
    assert len({row["num_bytes"] for row in rows.values()}) == 1
    # The solution stands before what is scored, so a model with any memory scores otherwise.
    shown = rows["teacher, shown the solution"]
    assert shown["bits_per_byte"] != rows["teacher"]["bits_per_byte"]
    assert found["texts_sha256"] == measure(config, {})["texts_sha256"]


def test_a_teacher_that_is_elsewhere_cannot_be_measured(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"no `teacher\.model` of kind hf"):
        measure(config.model_copy(update={"teacher": None}), {}, with_teacher=True)
