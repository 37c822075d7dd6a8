"""A whole run with its teacher behind HTTP: the same weights as with the teacher in process."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actors import launch
from miniverl_dist.config.load import load_config
from miniverl_dist.errors import GenerateApiError
from miniverl_dist.observability.progress import SilentProgress

pytestmark = [pytest.mark.bfcl, pytest.mark.tokenizers, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml"
OVERRIDES = ("loop.num_steps=2", "evaluation.before=false", "evaluation.after=false")


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The teacher server as a process of its own; yields its URL."""
    server = subprocess.Popen(
        [sys.executable, "-m", "teacher_server", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["url"]
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0


def weights(run: Path) -> str:
    path = run / "checkpoints" / "step-000002" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_teacher_over_http_gives_the_same_weights(tmp_path: Path) -> None:
    direct, over_http = tmp_path / "direct", tmp_path / "http"
    launch.train(load_config(CONFIG, OVERRIDES), run_dir=direct, progress=SilentProgress())
    with serving(direct / "teacher") as url:
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
