"""Episodes played in actors and scored there as they run: the same weights as by one call each."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from actors import launch
from miniverl_dist.config.load import load_config
from miniverl_dist.observability.progress import SilentProgress
from tests.support.requirements import require_ray
from tests.support.toy_server import ONE_SHAPE_SERVER, toy_server

require_ray()

RECIPE = Path(__file__).parents[1] / "fixtures" / "tiny_bfcl.yaml"
OVERRIDES = (
    "loop.num_steps=1",
    "evaluation.before=false",
    "evaluation.after=false",
    "curriculum.initial_tail_calls=2",
    "rollout.max_new_tokens=60",
    "student.warmup.num_steps=60",
)
CLUSTER = (
    "runtime=cluster",
    "teacher.prefix_scoring=true",
    "cluster.student.cpus_per_rank=0.5",
    "cluster.rollout.cpus_per_actor=0.5",
    "cluster.rollout.num_actors=2",
)


def weights(run: Path) -> str:
    path = run / "checkpoints" / "step-000001" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.usefixtures("shared_cluster")
def test_scores_made_beside_the_episodes_reach_the_teacher(tmp_path: Path) -> None:
    alone, pooled = tmp_path / "alone", tmp_path / "pooled"
    launch.train(load_config(RECIPE, OVERRIDES), run_dir=alone, progress=SilentProgress())
    with toy_server(alone / "teacher", ONE_SHAPE_SERVER) as url:
        over_http = [
            *OVERRIDES,
            "teacher.model=null",
            "teacher.fit=null",
            f"teacher.url={url}",
            f"teacher.vocabulary={alone / 'teacher-vocabulary.json'}",
        ]
        whole = load_config(RECIPE, over_http)
        launch.train(whole, run_dir=tmp_path / "whole", progress=SilentProgress())
        config = load_config(RECIPE, [*over_http, *CLUSTER])
        launch.train(config, run_dir=pooled, progress=SilentProgress())
    events = [json.loads(line) for line in (pooled / "events.jsonl").read_text().splitlines()]
    (told,) = (event for event in events if event["event"] == "prefixes_scored")
    assert told["taken_tokens"] > 0
    assert weights(pooled) == weights(tmp_path / "whole")
