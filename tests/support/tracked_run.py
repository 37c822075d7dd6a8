"""A run with trackers that fails in the middle, and goes on: ``python -m … FOLDER TRACKERS``.

In a process of its own, since some of the libraries read their settings when they are imported.
Step 2 is committed, step 3 recorded, step 4 fails; resumed, step 3 is done again.
"""

from __future__ import annotations

import dataclasses
import platform
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors import launch
from actors.single import Parts, SingleActor
from miniverl_dist.config.load import load_config
from miniverl_dist.errors import EnvironmentFaultError, MiniverlError
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.trajectory import Trajectory

RECIPE = Path(__file__).resolve().parents[1] / "fixtures" / "tiny_lab.yaml"
NUM_GROUPS = 2
IDENTITY = {"HOSTNAME": "host-5d1c9e", "USER": "user-5d1c9e", "LOGNAME": "user-5d1c9e"}


class Failing(SingleActor):
    """Its rollouts fail for good in the fourth step."""

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[Parts]:
        async with super().open(**options) as parts:
            inner = parts.ports.rollouts

            class Rollouts:
                async def rollout(self, assignment: Assignment, member: int) -> Trajectory:
                    if assignment.ticket >= 3 * NUM_GROUPS:
                        raise EnvironmentFaultError("pulled the plug")
                    return await inner.rollout(assignment, member)

            yield dataclasses.replace(
                parts, ports=dataclasses.replace(parts.ports, rollouts=Rollouts())
            )


def main(folder: Path, trackers: str) -> None:
    loaded = load_config(
        RECIPE,
        [
            "loop.num_steps=5",
            "evaluation.every_n_steps=null",
            "evaluation.before=false",
            "evaluation.after=false",
            f"tracking={trackers}",
        ],
    )
    with pytest.raises(MiniverlError, match="pulled the plug"):
        launch.train(loaded, run_dir=folder, progress=SilentProgress(), make_actor=Failing)
    launch.resume(folder, progress=SilentProgress())


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        for module, function in ((socket, "gethostname"), (socket, "getfqdn"), (platform, "node")):
            patch.setattr(module, function, lambda *_: IDENTITY["HOSTNAME"])
        main(Path(sys.argv[1]), sys.argv[2])
