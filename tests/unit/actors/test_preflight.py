from __future__ import annotations

import sys
from pathlib import Path

import pytest

from actors import launch
from actors.preflight import require_engine, require_local_packages
from miniverl_dist.config.load import load_config
from miniverl_dist.config.recipe import SGLangEngineConfig
from miniverl_dist.errors import ConfigError, MissingDependencyError
from miniverl_dist.observability.progress import SilentProgress

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("package", "command"),
    [("torch", "miniverl-dist[local]"), ("bfcl_eval", "scripts/install_bfcl.sh")],
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


def test_nothing_is_said_where_everything_is_there() -> None:
    require_local_packages(load_config(ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml").config)


@pytest.mark.parametrize("runtime", ["single_actor", "cluster"])
def test_ray_is_needed_only_where_actors_run(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    fixture = ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml"
    require_local_packages(load_config(fixture).config)
    with pytest.raises(MissingDependencyError, match=r"needs ray.*miniverl-dist\[ray\]"):
        require_local_packages(load_config(fixture, [f"runtime={runtime}"]).config)


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
