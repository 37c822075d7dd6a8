from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from miniverl_dist.errors import EngineError, PublishError
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import weights_checksum
from miniverl_dist.training.weight_sync import DirectWeightStore


def snapshot(version: int) -> WeightSnapshot:
    tensors = {"w": np.full(3, float(version))}
    return WeightSnapshot(version, tensors, weights_checksum(tensors))


@dataclass
class FakeEngine:
    """A weight receiver with one fault at a time."""

    name: str
    weight_version: int = -1
    checksum: str | None = None
    """What it confirms; None: the truth."""
    shift: int = 0
    """How far its version is off."""
    error: Exception | None = None
    pause: asyncio.Event | None = None
    loads: list[int] = field(default_factory=list)

    async def load_weights(self, given: WeightSnapshot) -> str:
        self.loads.append(given.policy_version)
        if self.pause is not None:
            await self.pause.wait()
        if self.error is not None:
            raise self.error
        self.weight_version = given.policy_version + self.shift
        return self.checksum or weights_checksum(given.tensors)


def store(*engines: FakeEngine, told: list[tuple[str, str]] | None = None) -> DirectWeightStore:
    notes = [] if told is None else told
    return DirectWeightStore(
        snapshot,
        engines,
        deadline_s=0.03,
        on_quarantine=lambda engine, reason: notes.append((engine, reason)),
    )


async def test_every_engine_confirms() -> None:
    engines = FakeEngine("a"), FakeEngine("b")
    receipt = await store(*engines).publish(3)
    assert (receipt.policy_version, receipt.checksum) == (3, snapshot(3).checksum)
    assert (receipt.engines, receipt.quarantined) == (("a", "b"), ())
    assert [engine.weight_version for engine in engines] == [3, 3]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (FakeEngine("bad", checksum="00" * 32), "checksum 000000000000, expected "),
        (FakeEngine("bad", shift=-1), "version 2, expected 3"),
        (FakeEngine("bad", shift=1), "version 4, expected 3"),
        (FakeEngine("bad", error=PublishError("shapes do not fit")), "shapes do not fit"),
        (FakeEngine("bad", error=EngineError("it died")), "it died"),
        (FakeEngine("bad", pause=asyncio.Event()), "no confirmation within 0.03 s"),
    ],
    ids=["checksum", "older", "newer", "refuses", "dies", "hangs"],
)
async def test_an_engine_that_does_not_confirm_leaves_the_rotation(
    broken: FakeEngine, reason: str
) -> None:
    told: list[tuple[str, str]] = []
    good = FakeEngine("good")
    weights = store(broken, good, told=told)
    receipt = await weights.publish(3)
    assert (receipt.engines, receipt.quarantined) == (("good",), ("bad",))
    assert [engine for engine, _ in told] == ["bad"]
    assert told[0][1].startswith(reason)
    again = await weights.publish(4)
    assert (again.engines, again.quarantined) == (("good",), ())
    assert (broken.loads, good.loads) == ([3], [3, 4])


async def test_no_engine_left_is_an_error_that_names_every_reason() -> None:
    weights = store(FakeEngine("a", shift=1), FakeEngine("b", error=EngineError("it died")))
    with pytest.raises(
        PublishError, match="no engine confirmed policy version 3: version 4, expected 3; it died"
    ):
        await weights.publish(3)


async def test_peer_31_engines_load_at_the_same_time() -> None:
    # Each waits for the other to have begun; in turns, this would hang until the deadline.
    both = asyncio.Barrier(2)

    class Meeting(FakeEngine):
        async def load_weights(self, given: WeightSnapshot) -> str:
            await both.wait()
            return await super().load_weights(given)

    receipt = await store(Meeting("a"), Meeting("b")).publish(1)
    assert receipt.engines == ("a", "b")
