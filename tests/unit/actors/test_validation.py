from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from actors.validation import validate_path
from miniverl_dist.errors import (
    CheckpointError,
    ChecksumError,
    ConfigError,
    RecordError,
    TaskNotFoundError,
)
from miniverl_dist.schemas.run_state import CheckpointManifest
from tests.support.sample_run import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def test_what_is_right_is_counted(run: Path) -> None:
    assert validate_path(run).split(", ")[1:] == [
        "3 steps",
        "4 events",
        "6 trajectories",
        "1 evaluation trajectory",
        "4 evaluation rows",
        "0 journalled steps",
        "1 checkpoint",
    ]
    assert validate_path(run.parent / "sample.yaml").startswith("recipe sample, objective grpo")
    assert validate_path(run / "trajectories.jsonl") == "6 trajectories"
    assert validate_path(run / "eval.json") == "4 evaluation rows"
    folder = run / "checkpoints" / "step-000003"
    assert validate_path(folder) == "checkpoint of step 3, 1 file with right checksums"
    assert validate_path(folder / "checkpoint.json") == validate_path(folder)
    assert validate_path(run / "config.resolved.yaml").startswith("recipe sample")


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


def test_the_same_problem_is_found_in_the_file_and_in_its_run(run: Path) -> None:
    path = run / "trajectories.jsonl"
    edit(path, lambda text: text[:-30])
    for place in (path, run):
        with pytest.raises(RecordError, match=r"trajectories.jsonl, line 6: the line is cut off"):
            validate_path(place)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("metrics.jsonl", "pass_rate", "pas_rate", r"line 1: metric pas_rate not declared"),
        ("events.jsonl", "run_started", "run_begun", r"line 1: event 'run_begun' is not declared"),
        ("eval_trajectories.jsonl", "f" * 64, 'f", "seed2": "', r"line 1: seed2: unknown key"),
        (
            "eval.json",
            '"policy"',
            '"polity"',
            r"eval.json: rows\[0\].policy: missing.*polity: unknown key; did you",
        ),
        (
            "trajectories.jsonl",
            "null,null,-0.5",
            "null,0.0,-0.5",
            r"line 1: .*token 5 has .*rollout logprob",
        ),
        (
            "config.resolved.yaml",
            "seed: 3",
            "seed: 4",
            r"found digest .*, expected .*manifest.json",
        ),
        ("manifest.json", "{", "[", r"manifest.json: not valid JSON"),
    ],
)
def test_each_kind_of_damage_is_one_clear_error(
    run: Path, name: str, old: str, new: str, message: str
) -> None:
    assert old in (run / name).read_text()
    edit(run / name, lambda text: text.replace(old, new, 1))
    with pytest.raises((RecordError, ConfigError), match=message):
        validate_path(run)


class TestCheckpoints:
    def test_a_wrong_checksum(self, run: Path) -> None:
        (run / "checkpoints" / "step-000003" / "student.bin").write_bytes(b"weightz")
        with pytest.raises(ChecksumError, match=r"student.bin: SHA-256 .*, expected"):
            validate_path(run)

    def test_a_missing_file(self, run: Path) -> None:
        (run / "checkpoints" / "step-000003" / "student.bin").unlink()
        with pytest.raises(CheckpointError, match=r"missing files \['student.bin'\]"):
            validate_path(run / "checkpoints" / "step-000003")

    def test_a_record_that_was_shortened_since(self, run: Path) -> None:
        edit(run / "metrics.jsonl", lambda text: text.splitlines(keepends=True)[0])
        with pytest.raises(RecordError, match=r"metrics.jsonl: .* has been shortened"):
            validate_path(run)

    def test_a_commit_of_another_config(self, run: Path) -> None:
        marker = run / "checkpoints" / "step-000003" / "checkpoint.json"
        manifest = CheckpointManifest.model_validate_json(marker.read_text())
        state = manifest.state.model_copy(update={"config_digest": "0" * 64})
        sealed = CheckpointManifest(
            format_version=manifest.format_version,
            name=manifest.name,
            state=state,
            files=manifest.files,
        )
        marker.write_bytes(sealed.to_bytes())
        with pytest.raises(RecordError, match="made under config 000000000000, the run has"):
            validate_path(run)


@pytest.mark.parametrize("name", ["missing", "notes.txt", "folder"])
def test_what_cannot_be_validated(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=name):
        validate_path(tmp_path / name)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([0, 1, 1, 2], "line 3: found step 2, expected 3: a line is there twice"),
        ([0, 2], "line 2: found step 3, expected 2: a line is missing"),
        ([1, 2], "line 1: found step 2, expected 1: a line is missing"),
        ([0, 2, 1], "line 2: found step 3, expected 2"),
    ],
)
def test_steps_run_on_by_one(run: Path, lines: list[int], message: str) -> None:
    path = run / "metrics.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[index] for index in lines))
    for place in (path, run):
        with pytest.raises(RecordError, match=f"metrics.jsonl, {message}"):
            validate_path(place)


class TestTasksOfARecipe:
    def recipe(self, folder: Path, environment: str, ids: str) -> Path:
        path = folder / "own.yaml"
        path.write_text(
            f"name: own\nobjective: grpo\nenvironment: {environment}\nstudent: {{}}\n"
            f"tasks: {{kind: ids, train: [{ids}], eval: [{ids}]}}\n"
            "loop: {num_steps: 1, num_groups: 1, group_size: 2}\n"
        )
        return path

    @pytest.mark.parametrize(
        ("environment", "ids", "named"),
        [
            (
                "{kind: calculator, num_tasks: 3, difficulty: easy}",
                "calculator_easy_002, calculator_easy_003, x",
                "no task 'calculator_easy_003', 'x' among the 3 of calculator, which are named "
                "'calculator_easy_000', ",
            ),
            ("{kind: bfcl}", "multi_turn_base_900", "no task 'multi_turn_base_900' among the 200"),
        ],
    )
    def test_unknown_ones_are_named(
        self, environment: str, ids: str, named: str, tmp_path: Path
    ) -> None:
        with pytest.raises(TaskNotFoundError, match=named):
            validate_path(self.recipe(tmp_path, environment, ids))
