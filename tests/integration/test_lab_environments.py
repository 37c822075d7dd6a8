"""The lab's recipes: each loads, names tasks that exist, and trains in miniature."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from actors import launch
from actors.tasks import environments, make_environment, resolve_tasks
from actors.validation import validate_path
from miniverl_dist.config.load import load_config
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.errors import ConfigError, TaskNotFoundError
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.reporting.run_data import parse_trajectory
from miniverl_dist.schemas.messages import ToolCall, ToolSchema
from rollout_server.tool_calls import parse_qwen_xml, writer

pytestmark = pytest.mark.tokenizers

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {
    "lab_calculator": "calculator",
    "lab_json": "json_navigation",
    "lab_sqlite": "sqlite_query",
}
WRITE = writer("qwen_xml")
SMALLER = (
    "student.model.num_layers=1",
    "student.model.hidden_size=32",
    "student.model.num_heads=2",
    "student.model.ffn_size=64",
    "student.model.batch_slots=16",
    "student.warmup.num_steps=12",
    "student.warmup.traces_per_task=2",
    "teacher.model.num_layers=1",
    "teacher.model.hidden_size=32",
    "teacher.model.num_heads=2",
    "teacher.model.ffn_size=64",
    "teacher.model.batch_slots=16",
    "teacher.fit.num_steps=6",
    "teacher.fit.traces_per_task=2",
    "rollout.max_new_tokens=48",
    "loop.num_steps=1",
    "loop.num_groups=2",
    "loop.group_size=2",
    "loop.num_minibatches=1",
    "evaluation.before=false",
    "evaluation.episodes_per_task=1",
    'evaluation.baselines=["null","oracle"]',
)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_valid_and_names_tasks_that_exist(name: str) -> None:
    path = ROOT / "configs" / f"{name}.yaml"
    assert f"recipe {name}, objective grpo_opd" in validate_path(path)
    config = load_config(path).config
    assert config.environment.kind == RECIPES[name]
    environment = make_environment(config, WRITE)
    train, held_out = resolve_tasks(config, environment.tasks())
    assert len(train) >= 8
    assert set(held_out) <= set(environment.tasks())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_from_end_to_end(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    loaded = load_config(ROOT / "configs" / f"{name}.yaml", list(SMALLER))
    summary = launch.train(loaded, run_dir=run, progress=SilentProgress())
    assert (summary.step, summary.is_finished) == (1, True)
    assert "1 step" in validate_path(run)
    rows = {(r["policy"], r["tag"]): r for r in json.loads((run / "eval.json").read_text())["rows"]}
    assert rows["null", "before"]["pass_rate"] == 0
    assert rows["null", "before"]["reward_mean"] == 0
    assert rows["oracle", "before"]["pass_rate"] == 1
    assert rows["oracle", "before"]["reward_mean"] == 1
    assert {("student", "warm"), ("student", "after")} <= set(rows)
    assert {row["official_per_turn_rate"] for row in rows.values()} == {None}
    lines = (run / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    found = [parse_trajectory(line, "line") for line in lines]
    assert len(found) == 4
    assert {t.environment for t in found} == {RECIPES[name]}
    assert all(set(t.reward_parts) == {"passed", "progress", "valid_calls"} for t in found)
    assert all(t.passed == (t.reward == 1) for t in found)
    assert f'"generator": "{RECIPES[name]}"' in (run / "manifest.json").read_text()


@pytest.mark.parametrize("name", RECIPES)
def test_split_recipes_work_on_generated_tasks(name: str) -> None:
    sections = ["environment.difficulty=mixed", "environment.num_tasks=30"]
    tasks = ["tasks={kind: split, split: stratified, num_eval: 6}"]
    config = load_config(ROOT / "configs" / f"{name}.yaml", sections + tasks).config
    infos = make_environment(config, WRITE).tasks()
    train, held_out = resolve_tasks(config, infos)
    assert (len(train), len(held_out)) == (24, 6)
    assert sorted(infos[i].classes[0] for i in held_out) == sorted(["easy", "medium", "hard"] * 2)


def test_a_task_that_was_not_drawn_is_named() -> None:
    path = ROOT / "configs" / "lab_calculator.yaml"
    config = load_config(path, ["environment.num_tasks=3"]).config
    infos: dict[str, TaskInfo] = dict(make_environment(config, WRITE).tasks())
    with pytest.raises(
        TaskNotFoundError, match=r"no task 'calculator_easy_003', .* and 4 more among the 3 of"
    ):
        resolve_tasks(config, infos)


@pytest.mark.parametrize(
    "kind",
    [
        "miniverl_dist.environments.calculator.calculator",
        "miniverl_dist.environments.calculator:calculator",
        "os.system",
        "Calculator",
    ],
)
def test_a_recipe_names_no_class(kind: str) -> None:
    """Refused when the recipe is read, and by the registry if it came that far."""
    with pytest.raises(ConfigError) as caught:
        load_config(ROOT / "configs" / "lab_calculator.yaml", [f"environment.kind={kind}"])
    known = ("bfcl", "calculator", "json_navigation", "sqlite_query")
    assert f"environment.kind: found '{kind}'" in str(caught.value)
    assert all(repr(name) in str(caught.value) for name in known)
    registry = environments(WRITE)
    assert registry.names() == known
    with pytest.raises(ConfigError, match=r"known: bfcl, calculator, json_navigation, sqlite"):
        registry.create(kind)


@pytest.mark.parametrize("name", RECIPES)
def test_every_expert_call_survives_the_wire_format(name: str) -> None:
    sections = ["environment.difficulty=mixed", "environment.num_tasks=60"]
    config = load_config(ROOT / "configs" / f"{name}.yaml", sections).config
    environment = make_environment(config, WRITE)
    for task_id, info in environment.tasks().items():
        session = environment.start(task_id, prefix_calls=0)
        (calls,) = session.expert_tail()
        assert len(calls) == info.num_calls
        assert read_back(WRITE(calls), session.call_schemas()) == calls
        session.close()


def read_back(text: str, schemas: Mapping[str, ToolSchema]) -> list[ToolCall | None]:
    return [parsed.call for parsed in parse_qwen_xml(text, schemas).calls]


@pytest.mark.parametrize(
    ("name", "task_id"),
    [
        ("lab_calculator", "calculator_medium_002"),
        ("lab_json", "json_navigation_hard_000"),
        ("lab_sqlite", "sqlite_query_medium_000"),
    ],
)
def test_the_episodes_in_the_document_are_what_happens(name: str, task_id: str) -> None:
    sections = ["environment.difficulty=mixed", "environment.num_tasks=60"]
    config = load_config(ROOT / "configs" / f"{name}.yaml", sections).config
    environment = make_environment(config, written)
    num_calls = environment.tasks()[task_id].num_calls
    session = environment.start(task_id, prefix_calls=num_calls)
    lines = [f"{message.role}: {message.content}" for message in session.opening()]
    session.close()
    assert "\n".join(lines) in (ROOT / "docs" / "environments.md").read_text()


def written(calls: Sequence[ToolCall]) -> str:
    (call,) = calls
    arguments = ", ".join(f"{key}={json.dumps(value)}" for key, value in call.arguments.items())
    return f"{call.name}({arguments})"
