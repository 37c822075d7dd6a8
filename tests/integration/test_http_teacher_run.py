"""A whole run with its teacher behind HTTP: the same weights as with the teacher in process."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from actors import launch
from miniverl_dist.config.load import load_config
from miniverl_dist.errors import GenerateApiError
from miniverl_dist.observability.progress import SilentProgress
from tests.support.toy_server import ONE_SHAPE_SERVER, toy_server

pytestmark = [pytest.mark.bfcl, pytest.mark.tokenizers, pytest.mark.timeout(600)]
CONFIG = Path(__file__).resolve().parents[1] / "fixtures" / "tiny_bfcl.yaml"
OVERRIDES = ("loop.num_steps=2", "evaluation.before=false", "evaluation.after=false")


def weights(run: Path) -> str:
    path = run / "checkpoints" / "step-000002" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_teacher_over_http_gives_the_same_weights(tmp_path: Path) -> None:
    direct, over_http = tmp_path / "direct", tmp_path / "http"
    launch.train(load_config(CONFIG, OVERRIDES), run_dir=direct, progress=SilentProgress())
    with toy_server(direct / "teacher") as url:
        config = load_config(
            CONFIG,
            [
                *OVERRIDES,
                "teacher.model=null",
                "teacher.fit=null",
                f"teacher.url={url}",
                f"teacher.vocabulary={direct / 'teacher-vocabulary.json'}",
            ],
        )
        launch.train(config, run_dir=over_http, progress=SilentProgress())
    metrics = [json.loads(line) for line in (over_http / "metrics.jsonl").read_text().splitlines()]
    assert [line["teacher_scored_fraction"] for line in metrics] == [1.0, 1.0]
    assert weights(over_http) == weights(direct)


def test_scoring_episodes_while_they_run_gives_the_same_weights(tmp_path: Path) -> None:
    fitted, whole, by_turns = tmp_path / "fitted", tmp_path / "whole", tmp_path / "by-turns"
    # Turns long enough, and enough of them, that some are scored before their episode ends.
    overrides = [
        *OVERRIDES,
        "curriculum.initial_tail_calls=2",
        "rollout.max_new_tokens=60",
        "student.warmup.num_steps=60",
    ]
    one_step = [*overrides, "loop.num_steps=1"]
    launch.train(load_config(CONFIG, one_step), run_dir=fitted, progress=SilentProgress())
    with toy_server(fitted / "teacher", ONE_SHAPE_SERVER) as url:
        for run, prefix_scoring in ((whole, "false"), (by_turns, "true")):
            config = load_config(
                CONFIG,
                [
                    *overrides,
                    "teacher.model=null",
                    "teacher.fit=null",
                    f"teacher.url={url}",
                    f"teacher.vocabulary={fitted / 'teacher-vocabulary.json'}",
                    f"teacher.prefix_scoring={prefix_scoring}",
                ],
            )
            launch.train(config, run_dir=run, progress=SilentProgress())
    events = [json.loads(line) for line in (by_turns / "events.jsonl").read_text().splitlines()]
    (told,) = (event for event in events if event["event"] == "prefixes_scored")
    assert told["taken_tokens"] > 0
    assert weights(by_turns) == weights(whole)


def test_a_teacher_that_is_not_there_fails_before_training(tmp_path: Path) -> None:
    """The first question to the server is asked before anything is sampled."""
    config = load_config(
        CONFIG,
        [
            *OVERRIDES,
            "teacher.model=null",
            "teacher.fit=null",
            "teacher.url=http://127.0.0.1:9",
            "teacher.max_retries=0",
        ],
    )
    with pytest.raises(GenerateApiError, match=r"127\.0\.0\.1:9"):
        launch.train(config, run_dir=tmp_path / "run", progress=SilentProgress())
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "run_failed" in events
    assert "group_finished" not in events
