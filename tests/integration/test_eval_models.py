"""Policies that are model folders, and checkpoints measured as others would use them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from actors import launch
from actors.eval_jobs import EvaluationRequest, deployed_lines, exported, row_tag_of
from miniverl_dist.config.load import load_run_config
from miniverl_dist.errors import CheckpointError, ConfigError
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.schemas.evaluation import EvaluationReport
from tests.support.hf_run import hf_run, qwen_folder, run_of, tokenizer_folder

pytestmark = [pytest.mark.bfcl, pytest.mark.tokenizers, pytest.mark.timeout(300)]
NAME = "step-000002"


def evaluate(run_dir: Path, request: EvaluationRequest) -> EvaluationReport:
    return launch.evaluate_request(
        load_run_config(run_dir), request, output=run_dir, progress=SilentProgress()
    )


def texts(run_dir: Path, tag: str) -> list[Any]:
    """What a model said in each episode, in the order of seeds."""
    lines = map(json.loads, (run_dir / "eval_trajectories.jsonl").read_text().splitlines())
    told = [line["trajectory"] for line in lines if line["tag"] == tag and line["policy"] != "null"]
    return sorted((t["seed"], t["token_ids"]) for t in told)


def logprobs(run_dir: Path, tag: str) -> list[float]:
    """Of all sampled tokens, in the order of seeds."""
    lines = map(json.loads, (run_dir / "eval_trajectories.jsonl").read_text().splitlines())
    told = [line["trajectory"] for line in lines if line["tag"] == tag]
    told.sort(key=lambda trajectory: trajectory["seed"])
    return [value for t in told for value in t["rollout_logprobs"] if value is not None]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with an hf student and one checkpoint."""
    return asyncio.run(hf_run(tmp_path))[0]


@pytest.fixture
def checkpoint(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / NAME


def test_a_deployed_checkpoint_plays_as_the_run_plays_it(run_dir: Path, checkpoint: Path) -> None:
    deployed = EvaluationRequest(("null", "student"), NAME, checkpoint, deploy="hf")
    evaluate(run_dir, EvaluationRequest(("student",), NAME, checkpoint))
    report = evaluate(run_dir, deployed)
    assert [(row.policy, row.tag, row.policy_version) for row in report.rows] == [
        ("student", NAME, 2),
        ("student", "initial", 0),
        ("student", f"{NAME}-deployed-hf", 2),
        ("null", NAME, None),
    ]
    # The same ids, seeds and weights on another engine of the same kind: the same tokens.
    assert texts(run_dir, f"{NAME}-deployed-hf") == texts(run_dir, NAME)
    trained = pytest.approx(logprobs(run_dir, NAME), abs=1e-5)
    assert logprobs(run_dir, f"{NAME}-deployed-hf") == trained
    assert logprobs(run_dir, "initial") != trained
    base, after, delta = deployed_lines(report, deployed)
    assert base.startswith("base     (initial): pass 0.000 [")
    assert after.startswith(f"trained  ({NAME}-deployed-hf): pass 0.000 [")
    assert delta.startswith("delta    +0.000 [")
    described = (run_dir / "exports" / NAME / "export.json").stat().st_mtime_ns
    assert evaluate(run_dir, deployed) == report
    assert (run_dir / "exports" / NAME / "export.json").stat().st_mtime_ns == described


def test_a_folder_is_a_policy(run_dir: Path, checkpoint: Path, tmp_path: Path) -> None:
    folder = exported(checkpoint, tmp_path / "somewhere")
    [row] = evaluate(run_dir, EvaluationRequest((f"hf:{folder}",), "initial")).rows
    assert re.fullmatch(r"hf:somewhere@[0-9a-f]{8}", row.policy)
    evaluate(run_dir, EvaluationRequest(("student",), NAME, checkpoint))
    assert texts(run_dir, "initial") == texts(run_dir, NAME)


def test_a_base_model_without_a_chat_format_is_refused(run_dir: Path, tmp_path: Path) -> None:
    folder = qwen_folder(tmp_path / "gemma")
    tokenizer_folder(folder, added=())
    with pytest.raises(ConfigError, match=r"no control token .*--calls text.*`rendering: raw`"):
        evaluate(run_dir, EvaluationRequest((f"hf:{folder}",), "initial"))


def test_a_model_of_another_tokenizer_is_refused(run_dir: Path, tmp_path: Path) -> None:
    folder = qwen_folder(tmp_path / "small", vocab_size=100)
    with pytest.raises(ConfigError, match=r"has \d+ ids, but small/config.json gives"):
        evaluate(run_dir, EvaluationRequest((f"hf:{folder}",), "initial"))


def test_a_checkpoint_of_another_architecture_is_refused(run_dir: Path, tmp_path: Path) -> None:
    two = tmp_path / "two"
    two.mkdir()
    model = {"kind": "hf", "path": str(tmp_path / "base"), "device": "cpu"}
    other, _ = asyncio.run(run_of(two, model | {"max_context_tokens": 150}))
    foreign = other / "checkpoints" / NAME
    tag = row_tag_of(foreign, load_run_config(run_dir))
    assert tag.startswith(f"{NAME}@")
    with pytest.raises(CheckpointError, match="the checkpoint has lora None, expected"):
        evaluate(run_dir, EvaluationRequest(("student",), tag, foreign))
    assert not (run_dir / "eval.json").exists()


def test_what_cannot_be_deployed_is_refused_before_anything_is_written(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--deploy needs a checkpoint"):
        evaluate(run_dir, EvaluationRequest(("student",), "initial", deploy="hf"))
    assert not (run_dir / "exports").exists()
