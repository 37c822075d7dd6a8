"""Routing replay through a whole run: real tasks, the HF engine, a mixture of experts, updates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.requirements import require_megatron

require_megatron()

from actors.cli import app  # noqa: E402
from actors.student_side import routing_shape  # noqa: E402
from miniverl_dist.config.load import load_config, load_run_config  # noqa: E402
from miniverl_dist.errors import ConfigError  # noqa: E402
from miniverl_dist.reporting.run_data import parse_trajectory  # noqa: E402
from miniverl_dist.schemas.routing import NO_EXPERT, RoutingShape, pack_rows  # noqa: E402

pytestmark = [pytest.mark.bfcl, pytest.mark.tokenizers]

MODELS = Path(__file__).parents[2] / "configs" / "models"
RECIPE = """\
name: tiny-moe
objective: grpo
environment: {kind: bfcl, prompt: compact, max_observation_chars: 80}
tasks: {kind: ids, train: [multi_turn_base_11], eval: [multi_turn_base_11]}
student:
  model: {kind: megatron, config: %s, vocabulary: restricted, max_context_tokens: 256,
          max_microbatch_tokens: 512, recompute: full}
  warmup: {num_steps: 12, batch_size: 8, learning_rate: 5.0e-3, max_tail_calls: 1}
curriculum: {schedule: fixed, initial_tail_calls: 1, max_tail_calls: 1}
rollout: {max_new_tokens: 24, max_context_tokens: 256, episode_deadline_s: null, num_workers: 2,
          routing_replay: on}
optim: {lr: 1.0e-3}
loop: {num_steps: 2, num_groups: 2, group_size: 3}
evaluation: {before: false, after: false, baselines: []}
checkpoint: {every_n_steps: 2}
"""


def recipe(folder: Path, model: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE % (MODELS / f"tiny_{model}.json"))
    return path


def train(folder: Path, model: str) -> Path:
    path = recipe(folder, model)
    arguments = ["train", str(path), "--run-dir", str(folder / "run"), "--json"]
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.stderr
    return folder / "run"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "model", ["qwen3_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)]
)
def test_episodes_carry_the_engines_routing_into_the_update(tmp_path: Path, model: str) -> None:
    run = train(tmp_path, model)
    shape = routing_shape(load_run_config(run).config)
    assert shape is not None
    records = (run / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    found = [parse_trajectory(line, "trajectories.jsonl") for line in records]
    assert len(found) == 12
    assert any(len(trajectory.sampled_spans) > 1 for trajectory in found)
    for trajectory in found:
        rows = trajectory.routed_experts
        assert rows is not None
        # All that the engine was fed: every token before the last sampled one.
        assert rows.shape == (
            trajectory.sampled_spans[-1].end - 1,
            shape.num_layers,
            shape.experts_per_token,
        )
        assert rows.max() < shape.num_experts
        assert len(np.unique(rows)) > shape.experts_per_token
    packed = pack_rows([found[0].routed_experts], [len(found[0].token_ids)])
    assert (packed[-1] == NO_EXPERT).all()
    # Engine and trainer hold the same weights at every step, and route alike.
    for step in lines(run / "metrics.jsonl"):
        assert step["mismatch_mean_abs"] < 1e-5
        assert 1.0 <= step["mismatch_max_ratio"] < 1.001
        assert 0.0 <= step["mismatch_kl"] < 1e-6
    assert "engine_mismatch" not in {line["event"] for line in lines(run / "events.jsonl")}


def test_only_a_mixture_of_experts_can_be_replayed(tmp_path: Path) -> None:
    moe = load_config(recipe(tmp_path, "qwen3_moe")).config
    assert routing_shape(moe) == RoutingShape(num_layers=4, experts_per_token=2, num_experts=8)
    with pytest.raises(ConfigError, match=r"tiny_qwen3\.json describes a qwen3 decoder, which has"):
        routing_shape(load_config(recipe(tmp_path, "qwen3")).config)
