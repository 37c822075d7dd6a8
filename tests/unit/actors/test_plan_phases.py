"""Phases follow what the loop does under each objective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.plan_phases import Phase, cached_row_bytes, most_turns, phases
from actors.recipe_checks import training_tasks
from miniverl_dist.config.load import load_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.lab.cache_files import EntryRecord

TOY = {"kind": "toy", "num_layers": 1, "hidden_size": 32, "num_heads": 2, "ffn_size": 64}
RUN: dict[str, Any] = {
    "name": "planned",
    "environment": {"kind": "calculator", "num_tasks": 2},
    "tasks": {"kind": "ids", "train": ["calculator_easy_000"], "eval": ["calculator_easy_000"]},
    "student": {"model": TOY | {"max_context_tokens": 300, "batch_slots": 4}},
    "teacher": {
        "model": TOY | {"max_context_tokens": 500, "batch_slots": 4},
        "fit": {"num_steps": 1},
    },
    "rollout": {"max_new_tokens": 24, "max_context_tokens": 400, "max_turns": 16},
    "loop": {"num_steps": 1, "num_groups": 2, "group_size": 3},
}
AFTER = ["update", "publish", "commit"]
TOLD = {"demonstrations": {}}
WHOLE = {"distill": {"top_k": 8}}
SAMPLED = {"opd": {"coef": 0.3}}


def recipe(tmp_path: Path, **changes: Any) -> RunConfig:
    (tmp_path / "run.yaml").write_text(json.dumps(RUN | changes))
    return load_config(tmp_path / "run.yaml").config


def planned(config: RunConfig) -> dict[str, Phase]:
    return {phase.name: phase for phase in phases(config, training_tasks(config), None)}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"objective": "grpo"}, ["rollout", "batch", "proximal logprobs"]),
        ({"objective": "opd"} | SAMPLED, ["rollout", "score", "batch", "proximal logprobs"]),
        ({"objective": "opd"} | WHOLE, ["rollout", "targets", "batch", "proximal logprobs"]),
        (
            {"objective": "grpo_opd", "loss": {"kl_coef": 0.1}} | WHOLE,
            ["rollout", "targets", "batch", "proximal logprobs", "reference logprobs"],
        ),
        ({"objective": "sft", "teacher": None} | TOLD, ["episodes", "batch"]),
        ({"objective": "offline_kd"} | TOLD | WHOLE, ["episodes", "targets", "batch"]),
    ],
)
def test_phases_are_those_of_the_loop(
    changes: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    assert list(planned(recipe(tmp_path, **changes))) == [*names, *AFTER]


def test_lengths_are_bounded_by_the_students_context(tmp_path: Path) -> None:
    found = planned(recipe(tmp_path, objective="opd", **SAMPLED))
    assert found["rollout"].max_tokens == found["update"].max_tokens == 2 * 3 * 300
    assert found["score"].max_tokens == 2 * 3 * 500


class TestTargets:
    def what(self, tmp_path: Path, **changes: Any) -> str:
        return planned(recipe(tmp_path, **{"objective": "opd"} | WHOLE | changes))["targets"].what

    def test_rows_and_bytes_of_a_swap(self, tmp_path: Path) -> None:
        """Four turns of 24 tokens in each of six episodes, 19 numbers of 4 bytes a row."""
        said = self.what(tmp_path, memory={"strategy": "swap"})
        rows = 6 * 4 * 24
        assert f"its 8 likeliest tokens at no more than {rows:,} rows" in said
        assert f"{rows * 76 / 1024:.3g} KiB of teacher cache" in said
        assert "stays in memory" not in said

    def test_rows_of_stored_episodes(self, tmp_path: Path) -> None:
        said = self.what(tmp_path, objective="offline_kd", **TOLD)
        assert said.startswith("memory.strategy swap: ")
        assert f"{6 * 300:,} rows" in said

    def test_a_teacher_that_stays_keeps_no_cache(self, tmp_path: Path) -> None:
        said = self.what(tmp_path, memory={"strategy": "resident"})
        assert "stays in memory" in said
        assert "cache" not in said

    def test_a_choice_by_size_names_both(self, tmp_path: Path) -> None:
        said = self.what(tmp_path)
        assert said.startswith("memory.strategy auto, if both fit: the teacher stays")
        assert "; else the teacher is loaded" in said

    @pytest.mark.parametrize("k", [1, 32])
    def test_a_row_takes_what_the_cache_writes(self, k: int) -> None:
        entry = EntryRecord(
            trajectory_id="t",
            content_key="0" * 64,
            policy_version=0,
            num_candidates=5,
            num_rows=5,
            width=k,
            sha256="0" * 64,
        )
        assert 5 * cached_row_bytes(k) == entry.num_bytes


class TestTurns:
    @pytest.mark.parametrize(
        ("num_calls", "extra", "curriculum", "expected"),
        [
            (1, 0, {}, 4),
            (5, 0, {}, 10),
            (5, 2, {}, 12),
            (5, 0, {"max_tail_calls": 3}, 6),
            (2, 0, {"max_tail_calls": 3}, 4),
            (40, 0, {}, 16),
            (40, 3, {}, 19),
        ],
    )
    def test_calls_bound_them(
        self,
        num_calls: int,
        extra: int,
        curriculum: dict[str, int],
        expected: int,
        tmp_path: Path,
    ) -> None:
        config = recipe(tmp_path, objective="grpo", curriculum=curriculum)
        short = TaskInfo(task_id="s", num_calls=1, num_turns=1, classes=())
        task = short.model_copy(update={"num_calls": num_calls, "extra_turns": extra})
        assert most_turns(config, [short, task]) == expected

    def test_without_the_tasks_the_recipe_bounds_them(self, tmp_path: Path) -> None:
        assert most_turns(recipe(tmp_path, objective="grpo"), None) == 16
        tail = {"max_tail_calls": 3}
        assert most_turns(recipe(tmp_path, objective="grpo", curriculum=tail), None) == 6

    def test_a_plan_says_so(self, tmp_path: Path) -> None:
        what = planned(recipe(tmp_path, objective="grpo"))["rollout"].what
        assert what == "2 groups x 3 episodes, at most 4 turns x 24 new tokens"
