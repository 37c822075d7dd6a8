"""Two steps of BFCL GRPO+OPD: a Megatron student, a real SGLang engine, a real SGLang teacher."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors import launch
from actors.single import SingleActor
from miniverl_dist.config.load import load_config
from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.tokens.load import load_tokenizer
from rollout_server.engines.base import Engine
from rollout_server.engines.sglang import SGLangEngine
from tests.support.hf_models import tiny_architecture, write_hf_model
from tests.support.processes import are_gone
from tests.support.requirements import require_megatron
from tests.support.sglang_engine import OVERLAY, sglang_python
from tests.support.sglang_server import sglang_server

require_megatron()
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
RECIPE = Path(__file__).parents[1] / "fixtures" / "tiny_sglang.yaml"


@pytest.fixture(scope="module")
def teacher_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that reads DeepSeek's ids."""
    folder = tmp_path_factory.mktemp("teacher")
    vocab_size = load_tokenizer("deepseek-v4").vocab_size
    model = write_hf_model(tiny_architecture("qwen3", vocab_size), folder / "model", seed=7)
    options = {"skip-tokenizer-init": True}
    with sglang_server(model, folder / "server.log", "tiny-teacher", **options) as url:
        yield url


class Killed:
    """An engine whose server is killed while its n-th request is at work."""

    def __init__(self, engine: SGLangEngine, nth: int) -> None:
        self._engine, self._left = engine, nth

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self._left -= 1
        if self._left != 0:
            return await self._engine.generate(request)
        asked = asyncio.create_task(self._engine.generate(request))
        while not self._engine.num_running:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.001)
        pid = self._engine.server.pid
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)
        return await asked


class KillsItsEngine(SingleActor):
    def _restarted(self, engine: Engine) -> Engine:
        assert isinstance(engine, SGLangEngine)
        return super()._restarted(Killed(engine, nth=20))  # type: ignore[arg-type]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def config(teacher_url: str, *more: str) -> Any:
    overrides = [
        f"teacher.url={teacher_url}",
        f"rollout.engine.python={sglang_python()}",
        f"rollout.engine.extra_env.PYTHONPATH={OVERLAY}",
        *more,
    ]
    return load_config(RECIPE, overrides)


def check_steps(run: Path) -> None:
    """Every token's logprob of the engine is the trainer's, after each publish."""
    metrics = lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2]
    assert [line["policy_version"] for line in metrics] == [2, 4]  # two minibatches each
    for line in metrics:
        assert math.log(line["mismatch_max_ratio"]) < 1e-3
        assert line["teacher_scored_fraction"] == 1.0
        assert line["grad_norm"] > 0
    trajectories = [line["trajectory"] for line in lines(run / "trajectories.jsonl")]
    versions = {v for t in trajectories for s in t["spans"] for v in s["weight_versions"] or ()}
    assert versions == {0, 2}


def test_a_run_whose_engine_is_killed_ends_as_if_nothing_were(
    teacher_url: str, tmp_path: Path
) -> None:
    summary = launch.train(
        config(teacher_url),
        run_dir=tmp_path / "run",
        progress=SilentProgress(),
        make_actor=KillsItsEngine,
    )
    assert summary.is_finished
    check_steps(tmp_path / "run")
    events = [line["event"] for line in lines(tmp_path / "run" / "events.jsonl")]
    assert (events.count("engine_lost"), events.count("engine_restarted")) == (1, 1)


def test_at_temperature_07_with_weights_over_a_group(teacher_url: str, tmp_path: Path) -> None:
    tempered = config(
        teacher_url,
        "rollout.temperature=0.7",
        "opd.allow_untempered_teacher=true",
        "rollout.engine.load_weights_by=distributed",
    )
    launch.train(tempered, run_dir=tmp_path / "run", progress=SilentProgress())
    check_steps(tmp_path / "run")


def test_the_experts_that_the_engine_chose_are_replayed(teacher_url: str, tmp_path: Path) -> None:
    moe = config(
        teacher_url,
        "student.model.config=configs/models/tiny_qwen3_moe.json",
        "rollout.routing_replay=on",
    )
    launch.train(moe, run_dir=tmp_path / "run", progress=SilentProgress())
    check_steps(tmp_path / "run")
    for line in lines(tmp_path / "run" / "trajectories.jsonl"):
        trajectory = Trajectory.model_validate_json(json.dumps(line["trajectory"]))
        assert trajectory.routed_experts is not None
        # The last token is never fed to the model.
        assert len(trajectory.token_ids) - len(trajectory.routed_experts) >= 1
        sampled = [span for span in trajectory.spans if span.sampled]
        assert len(trajectory.routed_experts) >= sampled[-1].end - 1


def test_on_a_cluster_the_actor_brings_its_server(teacher_url: str, tmp_path: Path) -> None:
    clustered = config(
        teacher_url,
        "runtime=cluster",
        "cluster.num_cpus=4",
        "cluster.rollout.num_actors=1",
    )
    launch.train(clustered, run_dir=tmp_path / "run", progress=SilentProgress())
    check_steps(tmp_path / "run")
    engine = tmp_path / "run" / "engines" / "engine-0"
    assert (engine / "server.log").exists()
    # The actor was killed by Ray, which knows nothing of the server's children.
    assert are_gone(*serving_from(engine))


def serving_from(folder: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found = subprocess.run(
        ["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]
