"""Evaluations as jobs of their own: rows never mix configs, and nothing is measured twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors import launch
from actors.cli import app
from actors.eval_jobs import EvaluationRequest
from actors.inspection import run_view
from actors.watch import look
from miniverl_dist.config.load import LoadedConfig, load_config
from miniverl_dist.errors import ChecksumError, ConfigError, ResumeError
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.reporting.run_data import load_run_data

pytestmark = [pytest.mark.bfcl, pytest.mark.tokenizers, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml"
SMALL = ("loop.num_steps=1", "evaluation.before=false", "evaluation.after=false")


def recipe(*overrides: str) -> LoadedConfig:
    return load_config(CONFIG, [*SMALL, *overrides])


def evaluate(
    config: LoadedConfig,
    output: Path,
    *policies: str,
    checkpoint: Path | None = None,
    tail_calls: int | None = None,
) -> list[str]:
    report = launch.evaluate(
        config,
        policies=policies,
        checkpoint=checkpoint,
        tail_calls=tail_calls,
        output=output,
        progress=SilentProgress(),
    )
    return [f"{row.policy} {row.tag} {row.pass_rate:.0f}" for row in report.rows]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs") / "run"
    launch.train(recipe(), run_dir=folder, progress=SilentProgress())
    return folder


def test_oracle_and_null_need_no_teacher_and_bound_the_scale(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    assert evaluate(recipe(), folder, "oracle", "null") == ["oracle initial 1", "null initial 0"]
    assert not (folder / "teacher").exists()


class Looking(SilentProgress):
    """Looks at the folder while it is being written; ends the evaluation where it is told to."""

    def __init__(self, folder: Path, end: type[BaseException] | None = None) -> None:
        self._folder, self._end = folder, end
        self.seen: list[tuple[str, str, bool]] = []

    def message(self, text: str) -> None:
        """A row is there."""
        if "pass" not in text:
            return
        status = look(self._folder).status
        self.seen.append((status, load_run_data(self._folder).status, look(self._folder).is_over))
        if self._end is not None:
            raise self._end


def test_a_folder_of_an_evaluation_says_how_it_goes(tmp_path: Path) -> None:
    folder, request = tmp_path / "job", EvaluationRequest(("oracle", "null"), "initial")
    progress = Looking(folder)
    launch.evaluate_request(recipe(), request, output=folder, progress=progress)
    assert progress.seen == [("running", "running", False)] * 2
    data = load_run_data(folder)
    assert (data.status, data.notes, data.metrics) == ("finished", [], [])
    assert data.num_played == sum(row.num_episodes for row in data.evaluation.rows)  # type: ignore[union-attr]
    text = run_view(folder).text
    assert f"evaluation, finished, {data.num_played} episodes played" in text
    assert "missing" not in text
    assert "Checkpoints" not in text
    assert (look(folder).status, look(folder).num_played) == ("finished", data.num_played)


@pytest.mark.parametrize(("end", "status"), [(KeyboardInterrupt, "stopped"), (OSError, "failed")])
def test_an_evaluation_that_ends_early_says_so(
    tmp_path: Path, end: type[BaseException], status: str
) -> None:
    folder, request = tmp_path / "job", EvaluationRequest(("null",), "initial")
    with pytest.raises(end):
        launch.evaluate_request(recipe(), request, output=folder, progress=Looking(folder, end))
    assert load_run_data(folder).status == look(folder).status == status
    launch.evaluate_request(recipe(), request, output=folder, progress=SilentProgress())
    assert load_run_data(folder).status == look(folder).status == "finished"


def test_an_evaluation_in_a_run_leaves_its_status_alone(run: Path) -> None:
    before = (run / "manifest.json").read_bytes()
    evaluate(recipe(), run, "null")
    assert (run / "manifest.json").read_bytes() == before
    assert not look(run).is_evaluation


def test_rows_of_another_config_are_refused(run: Path) -> None:
    before = (run / "eval.json").read_bytes()
    with pytest.raises(ConfigError, match="choose another --output"):
        evaluate(recipe("seed=7"), run, "oracle")
    assert (run / "eval.json").read_bytes() == before


def test_a_checkpoint_of_another_run_is_named_as_such(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    config = recipe("optim.lr=5e-2")
    launch.train(config, run_dir=other, progress=SilentProgress())
    tags = evaluate(recipe(), run, "student", checkpoint=run / "checkpoints" / "step-000001")
    foreign = other / "checkpoints" / "step-000001"
    both = evaluate(recipe(), run, "student", checkpoint=foreign)
    assert [tag.split()[1] for tag in both if "step-000001" in tag] == [
        "step-000001",
        f"step-000001@{config.digest[:8]}",
    ]
    assert len(both) == len(tags) + 1
    assert evaluate(recipe(), run, "student", checkpoint=foreign) == both


def test_a_run_is_measured_under_other_settings_in_a_folder_of_its_own(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    options = ["-o", "evaluation.temperature=0", "-o", "evaluation.tail_calls=2", "--json"]
    called = CliRunner().invoke(app, ["eval", str(run), "--policy", "student", *options])
    assert called.exit_code == 0, called.stderr
    result = json.loads(called.stdout.splitlines()[-1])["result"]
    assert result["temperature"] == 0
    assert [(row["tail_calls"], row["policy_version"]) for row in result["rows"]] == [(2, 2)]
    # Another horizon could declare other ids: the run's own vocabulary is the checkpoint's.
    assert "declaring the student's vocabulary" not in called.stdout
    folder = tmp_path / "runs" / "tiny_bfcl-eval"
    own = (folder / "student-vocabulary.json").read_bytes()
    assert own == before["student-vocabulary.json"]
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_a_horizon_that_no_task_has_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="T = 99"):
        evaluate(recipe(), run, "null", tail_calls=99)


def test_records_without_a_commit_are_not_thrown_away(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints")
    before = (copy / "metrics.jsonl").read_bytes()
    with pytest.raises(ResumeError, match="no checkpoint left"):
        launch.resume(copy, progress=SilentProgress())
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_a_damaged_teacher_is_found(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    weights = copy / "teacher" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(ChecksumError, match=r"teacher/model\.safetensors"):
        launch.resume(copy, progress=SilentProgress())


def test_a_prompt_that_does_not_fit_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes \d+ tokens or more, the context"):
        launch.train(
            recipe("environment.prompt=full"), run_dir=tmp_path / "run", progress=SilentProgress()
        )
