from __future__ import annotations

import sys
from pathlib import Path

import pytest

from actors import launch
from actors.plan import make_plan
from actors.preflight import require_engine, require_local_packages, require_teacher_files
from miniverl_dist.config.load import load_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.recipe import SGLangEngineConfig
from miniverl_dist.errors import ConfigError, MissingDependencyError, TaskNotFoundError
from miniverl_dist.observability.progress import SilentProgress

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("package", "command"),
    [("torch", ".[local]"), ("bfcl_eval", "scripts/install_bfcl.sh")],
)
def test_a_missing_package_is_named_before_anything_is_written(
    package: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    config = load_config(ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml")
    with pytest.raises(MissingDependencyError, match=package) as caught:
        launch.train(config, run_dir=tmp_path / "run", progress=SilentProgress())
    assert command in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_bfcl_is_needed_only_where_it_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    require_local_packages(load_config(ROOT / "configs" / "lab_calculator.yaml").config)


def test_nothing_is_said_where_everything_is_there() -> None:
    require_local_packages(load_config(ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml").config)


@pytest.mark.parametrize("runtime", ["single_actor", "cluster"])
def test_ray_is_needed_only_where_actors_run(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    fixture = ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml"
    require_local_packages(load_config(fixture).config)
    with pytest.raises(MissingDependencyError, match=r"needs ray.*.\[ray\]"):
        require_local_packages(load_config(fixture, [f"runtime={runtime}"]).config)


def http_run(*overrides: str) -> RunConfig:
    http = ["teacher.model=null", "teacher.fit=null", "teacher.url=http://127.0.0.1:9"]
    return load_config(ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml", [*http, *overrides]).config


def test_a_task_that_is_not_there_is_named_before_anything_is_written(tmp_path: Path) -> None:
    fixture = ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml"
    loaded = load_config(fixture, ["tasks.train=[multi_turn_base_11, nowhere]"])
    with pytest.raises(TaskNotFoundError, match="there is no task 'nowhere'"):
        launch.train(loaded, run_dir=tmp_path / "run", progress=SilentProgress())
    assert not (tmp_path / "run").exists()
    with pytest.raises(TaskNotFoundError, match="there is no task 'nowhere'"):
        make_plan(loaded.config)


class TestTeacherFiles:
    def test_headers_are_read_before_anything_is_written(self, tmp_path: Path) -> None:
        file = tmp_path / "headers"
        config = http_run(f"teacher.headers_file={file}")
        with pytest.raises(ConfigError, match=r"^teacher\.headers_file: .*No such file"):
            require_teacher_files(config)
        file.write_text("only-the-word\n")
        with pytest.raises(ConfigError, match=r"no colon; .* `Authorization: Bearer TOKEN`"):
            require_teacher_files(config)
        file.write_text("Authorization: Bearer only-the-word\n")
        require_teacher_files(config)

    def test_a_start_reads_them(self, tmp_path: Path) -> None:
        headers = f"teacher.headers_file={tmp_path / 'none'}"
        fixture = ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml"
        http = ["teacher.model=null", "teacher.fit=null", "teacher.url=http://127.0.0.1:9"]
        with pytest.raises(ConfigError, match=r"teacher\.headers_file"):
            launch.train(
                load_config(fixture, [*http, headers]),
                run_dir=tmp_path / "run",
                progress=SilentProgress(),
            )
        assert not (tmp_path / "run").exists()

    def test_the_ids_of_a_toy_have_to_be_there(self, tmp_path: Path) -> None:
        config = http_run(f"teacher.vocabulary={tmp_path / 'v.json'}")
        with pytest.raises(ConfigError, match=r"teacher\.vocabulary: there is no file"):
            require_teacher_files(config)

    def test_a_model_of_the_runs_own_has_to_be_there(self, tmp_path: Path) -> None:
        own = f"teacher.model={{kind: hf, path: {tmp_path}}}"
        config = http_run("teacher.url=null", own)
        with pytest.raises(ConfigError, match=r"teacher\.model\.path: .*no config\.json"):
            require_teacher_files(config)
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match=r"teacher\.model\.path: .* holds no weights"):
            require_teacher_files(config)

    def test_what_lies_on_another_machine_is_not_looked_for(self, tmp_path: Path) -> None:
        gone = f"teacher.headers_file={tmp_path / 'none'}"
        require_teacher_files(http_run(gone, "runtime=single_actor", "cluster.address=auto"))
        # Nor what a run does not ask for.
        require_teacher_files(http_run(gone, "objective=grpo", "opd=null"))

    def test_texts_for_a_model_on_another_machine_are_written_here(self) -> None:
        elsewhere = ["runtime=cluster", "cluster.address=auto", "teacher.text_start=<bos>"]
        raw = ["teacher.rendering=raw", "teacher.model={kind: hf, path: there}", "teacher.url=null"]
        with pytest.raises(ConfigError, match=r"^teacher\.text_start: .* no special token '<bos>'"):
            require_teacher_files(http_run(*elsewhere, *raw))


def test_a_teacher_that_only_scores_is_not_evaluated(tmp_path: Path) -> None:
    scorer = ["teacher.model={kind: hf, path: nowhere}", "teacher.fit=null"]
    config = load_config(ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml", scorer)
    with pytest.raises(ConfigError, match="policy teacher: an hf teacher is asked for scores"):
        launch.evaluate(
            config,
            policies=("null", "teacher"),
            checkpoint=None,
            tail_calls=None,
            output=tmp_path / "out",
            progress=SilentProgress(),
        )
    assert not (tmp_path / "out").exists()


def test_a_model_without_rows_for_the_tokenizer_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    fixture = ROOT / "tests" / "fixtures" / "tiny_megatron.yaml"
    config = load_config(fixture, ["student.model.vocabulary=full"])
    with pytest.raises(ConfigError, match=r"vocabulary rows, tokenizer .* has 248077 ids"):
        launch.train(config, run_dir=tmp_path / "run", progress=SilentProgress())
    assert not (tmp_path / "run").exists()


def test_routing_replay_without_experts_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    fixture = ROOT / "tests" / "fixtures" / "tiny_megatron.yaml"
    config = load_config(fixture, ["rollout.routing_replay=on"])
    with pytest.raises(ConfigError, match=r"tiny_qwen3\.json describes a qwen3 decoder, which has"):
        launch.train(config, run_dir=tmp_path / "run", progress=SilentProgress())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("python", "told"),
    [
        (None, "sglang is not installed in this environment"),
        (Path("/nowhere/bin/python"), "/nowhere/bin/python is no interpreter"),
    ],
)
def test_an_engine_that_is_not_installed_is_named(python: Path | None, told: str) -> None:
    engine = SGLangEngineConfig(kind="sglang", python=python)
    with pytest.raises(MissingDependencyError, match=told):
        require_engine(engine)


def test_an_interpreter_that_is_there_is_enough() -> None:
    require_engine(SGLangEngineConfig(kind="sglang", python=Path(sys.executable)))
    require_engine(None)


LAB = ROOT / "configs" / "lab_calculator.yaml"
STORED = ["objective=sft", "opd=null", "demonstrations.trajectories=/nowhere"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["teacher.rendering=raw", "teacher.text_start=<bos>"],
            r"^teacher\.text_start: tokenizer 'deepseek-v4' has no special token '<bos>'",
        ),
        (["student.tokenizer=/nowhere"], r"^student\.tokenizer: .*'/nowhere' is neither one of"),
        (
            ["teacher.rendering=raw", "teacher.tokenizer=/nowhere", "evaluation.baselines=[]"],
            r"^teacher\.tokenizer: .*'/nowhere' is neither one of",
        ),
        (["evaluation.tail_calls=99"], r"T = 99, but no evaluation task has more than 2 calls"),
        (["student.warm_start=/nowhere"], r"^student\.warm_start: /nowhere is no run"),
        (STORED, r"^demonstrations\.trajectories: cannot read /nowhere"),
        (
            ["rollout.max_context_tokens=60"],
            r"scripted episode of calculator_easy_000 .*, the context of .* has 60",
        ),
        (
            ["teacher.model.max_context_tokens=60"],
            r"^teacher\.model\.max_context_tokens is 60, but a trace of calculator_easy_000 takes",
        ),
        (
            ["runtime=cluster", "cluster.student.cpus_per_rank=0"],
            r"^cluster\.student: its actors ask for neither CPUs nor GPUs",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_a_plan_and_before_anything_is_written(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    config = load_config(LAB, overrides)
    with pytest.raises(ConfigError, match=message):
        make_plan(config.config)
    with pytest.raises(ConfigError, match=message):
        launch.train(config, run_dir=tmp_path / "run", progress=SilentProgress())
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_is_fitted_to_be_evaluated_is_looked_at_too() -> None:
    raw = ["teacher.rendering=raw", "teacher.text_start=<bos>"]
    config = load_config(LAB, ["objective=grpo", "opd=null", *raw]).config
    with pytest.raises(ConfigError, match=r"^teacher\.text_start"):
        require_teacher_files(config)


@pytest.mark.parametrize(
    ("overrides", "policy", "tail_calls", "message"),
    [
        ([], "null", 99, "T = 99, but no evaluation task has more than 2 calls"),
        (["student.tokenizer=/nowhere"], "null", None, r"^student\.tokenizer"),
        (
            ["teacher.rendering=raw", "teacher.text_start=<bos>"],
            "teacher",
            None,
            r"^teacher\.text_start",
        ),
    ],
)
def test_an_evaluation_that_cannot_be_played_leaves_no_folder(
    overrides: list[str], policy: str, tail_calls: int | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        launch.evaluate(
            load_config(LAB, overrides),
            policies=(policy,),
            checkpoint=None,
            tail_calls=tail_calls,
            output=tmp_path / "out",
            progress=SilentProgress(),
        )
    assert not (tmp_path / "out").exists()
