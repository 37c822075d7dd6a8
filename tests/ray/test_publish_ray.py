"""Weights from one rank to two engines, each in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from actors.publish import RayWeightStore
from miniverl_dist.config.cluster import PublishConfig
from miniverl_dist.errors import StudentLostError
from tests.support.requirements import require_ray

require_ray()

TRANSPORTS = ("object_store", "disk", "broadcast")
NAMES = ("a", "b")
DEADLINE_S = 60.0


class Cast:
    """The actors of one test; all are ended with it."""

    def __init__(self, transport: str, directory: Path) -> None:
        self.config = PublishConfig.model_validate({"transport": transport})
        self.directory = directory
        self.handles: list[Any] = []
        self.told: list[tuple[str, str]] = []
        self.rank = self.actor("RankActor", self.config, directory)

    def actor(self, kind: str, *arguments: object) -> Any:
        import ray

        from tests.support import weight_actors

        handle = ray.remote(getattr(weight_actors, kind)).options(num_cpus=0).remote(*arguments)
        self.handles.append(handle)
        return handle

    async def end(self, handle: Any) -> None:
        """Kill an actor; behind it no call reaches it any more, as ``ray.kill`` does not wait."""
        import ray

        ray.kill(handle)
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ray.exceptions.RayActorError):
                while True:
                    await handle.__ray_ready__.remote()

    def engine(self, name: str, hangs_in: str | None = None) -> Any:
        from actors.weight_endpoints import RayEngine

        return RayEngine(self.actor("EngineActor", name, hangs_in), name)

    def store(self, *engines: Any, deadline_s: float = DEADLINE_S) -> RayWeightStore:
        from actors.weight_endpoints import RayRank

        return RayWeightStore(
            # A new one every time, as a pool makes them.
            lambda: [RayRank(self.rank, "rank 0")],
            engines,
            self.config,
            deadline_s=deadline_s,
            on_quarantine=lambda engine, reason: self.told.append((engine, reason)),
        )


@pytest.fixture(params=TRANSPORTS)
def cast(request: pytest.FixtureRequest, shared_cluster: str, tmp_path: Path) -> Iterator[Cast]:
    import ray

    del shared_cluster
    made = Cast(request.param, tmp_path)
    yield made
    for handle in made.handles:
        ray.kill(handle)


async def test_versions_lost_engines_and_a_lost_rank(cast: Cast) -> None:
    a, b = (cast.engine(name) for name in NAMES)
    weights = cast.store(a, b)
    for version in (1, 2):
        checksum = await cast.rank.hold.remote(version)
        receipt = await weights.publish(version)
        assert (receipt.policy_version, receipt.checksum) == (version, checksum)
        assert (receipt.engines, receipt.quarantined) == (NAMES, ())
        assert [await engine._handle.version.remote() for engine in (a, b)] == [version] * 2
    assert list(cast.directory.iterdir()) == []

    await cast.end(a._handle)
    checksum = await cast.rank.hold.remote(3)
    receipt = await weights.publish(3)
    assert (receipt.checksum, receipt.engines, receipt.quarantined) == (checksum, ("b",), ("a",))
    assert cast.told[0][0] == "a"
    assert "a is gone" in cast.told[0][1]

    back = cast.engine("a-1")
    await weights.admit(back)
    assert weights.rotation == ("b", "a-1")
    assert await back._handle.version.remote() == 3

    await cast.end(cast.rank)
    with pytest.raises(StudentLostError, match="rank 0 is gone"):
        await weights.publish(4)
    assert weights.rotation == ("b", "a-1")


async def test_an_engine_that_hangs_is_left_behind_within_the_deadline(cast: Cast) -> None:
    # Up and running before the clock starts.
    engines = [cast.engine("hangs", "add"), cast.engine("good")]
    for engine in engines:
        await engine._handle.version.remote()
    checksum = await cast.rank.hold.remote(1)
    receipt = await cast.store(*engines, deadline_s=20.0).publish(1)
    assert (receipt.checksum, receipt.engines) == (checksum, ("good",))
    assert "hangs" in [name for name, _ in cast.told]
    assert "did not take bucket 0" in cast.told[0][1]
