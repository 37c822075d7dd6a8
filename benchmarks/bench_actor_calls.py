"""How many calls between processes an episode costs on a cluster: one, whatever its length.

    python -m benchmarks.bench_actor_calls

Runs the small recipe of the tests on a Ray cluster of this machine and counts every actor call the
driver makes, by method. Beside it stands what one call per turn or per token would have been.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import ray.actor

from actors import launch
from miniverl_dist.config.load import load_config
from miniverl_dist.observability.progress import SilentProgress

RECIPE = Path(__file__).parents[1] / "tests" / "fixtures" / "tiny_bfcl.yaml"
OVERRIDES = (
    "runtime=cluster",
    "cluster.num_cpus=4",
    "cluster.rollout.num_actors=2",
    "evaluation.before=false",
    "evaluation.after=false",
    "evaluation.every_n_steps=null",
    "evaluation.baselines=[]",
)


def counted_run(folder: Path) -> Counter[str]:
    """Train, and count the actor calls of this process by method."""
    calls: Counter[str] = Counter()
    original = ray.actor.ActorMethod._remote

    def counting(self: Any, args: Any = None, *more: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        name = self._method_name
        calls[f"{name} ({args[0]})" if name == "play" else name] += 1
        return original(self, args, *more, **kwargs)

    ray.actor.ActorMethod._remote = counting
    try:
        launch.train(load_config(RECIPE, OVERRIDES), run_dir=folder, progress=SilentProgress())
    finally:
        ray.actor.ActorMethod._remote = original
    return calls


def main() -> None:
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp) / "run"
        calls = counted_run(folder)
        lines = (folder / "trajectories.jsonl").read_bytes().splitlines()
    trajectories = [json.loads(line)["trajectory"] for line in lines]
    turns = sum(sum(span["sampled"] for span in t["spans"]) for t in trajectories)
    tokens = sum(sum(t["loss_mask"]) for t in trajectories)
    print(f"{len(trajectories)} trajectories, {turns} sampled turns, {tokens} sampled tokens")
    for name, count in calls.most_common():
        print(f"{name:24} {count:5} calls")
    per_trajectory = calls["play (training)"] / len(trajectories)
    print(f"episode calls per trajectory  {per_trajectory:.2f}  (at most 1)")
    print(f"all calls per trajectory      {calls.total() / len(trajectories):.2f}")
    print(f"per turn it would be          {turns / len(trajectories):.2f}")
    print(f"per token                     {tokens / len(trajectories):.2f}")
    assert per_trajectory <= 1


if __name__ == "__main__":
    main()
