from __future__ import annotations

import asyncio

import numpy as np
import pytest

from miniverl_dist.errors import EngineError, EngineLostError, PublishError
from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest, MetaInfo
from miniverl_dist.ports import WeightSnapshot
from rollout_server.engines.restarted import RestartedEngine

WEIGHTS = WeightSnapshot(3, {"w": np.ones(2)}, "sum")
REQUEST = GenerateRequest(input_ids=(1,))
REPLY = GenerateReply(MetaInfo("r", None, 1, 0))


class Mortal:
    """Answers while its server stands; starts that are to fail, fail."""

    name = "mortal"

    def __init__(self, *bad_starts: bool) -> None:
        self.is_up = True
        self.weight_version = -1
        self.restarts: list[WeightSnapshot] = []
        self._bad_starts = list(bad_starts)

    async def start(self) -> None:
        self.is_up = True

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        await asyncio.sleep(0)
        if self.weight_version < 0:
            raise EngineError("it holds no weights yet")
        if not self.is_up:
            raise EngineLostError("its server has ended")
        if request.rid == "bad":
            raise EngineError("no answer")
        return REPLY

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        self.weight_version = snapshot.policy_version
        return snapshot.checksum

    async def restart(self, snapshot: WeightSnapshot) -> str:
        self.restarts.append(snapshot)
        await asyncio.sleep(0.01)
        if self._bad_starts and self._bad_starts.pop(0):
            raise PublishError("no memory")
        self.is_up = True
        return await self.load_weights(snapshot)

    async def close(self) -> None:
        self.is_up = False


class Budget:
    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self) -> bool:
        self.left -= 1
        return self.left >= 0


def restarted(
    engine: Mortal, *, budget: int = 2, told: list[tuple[str, str]] | None = None
) -> RestartedEngine:
    notes = [] if told is None else told
    return RestartedEngine(
        engine, Budget(budget).spend, lambda name, why: notes.append((name, why))
    )


async def test_a_request_is_asked_again_under_the_weights_that_were_served() -> None:
    told: list[tuple[str, str]] = []
    mortal = Mortal()
    engine = restarted(mortal, told=told)
    await engine.load_weights(WEIGHTS)
    mortal.is_up = False
    assert await engine.generate(REQUEST) is REPLY
    assert mortal.restarts == [WEIGHTS]
    assert engine.weight_version == 3
    assert told == [("mortal", "its server has ended"), ("mortal", "")]


async def test_all_requests_of_one_loss_spend_one_restart() -> None:
    mortal = Mortal()
    engine = restarted(mortal, budget=1)
    await engine.load_weights(WEIGHTS)
    mortal.is_up = False
    assert await asyncio.gather(*(engine.generate(REQUEST) for _ in range(5))) == [REPLY] * 5
    assert len(mortal.restarts) == 1


async def test_what_comes_during_a_restart_waits_for_it() -> None:
    mortal = Mortal()
    engine = restarted(mortal, budget=1)
    await engine.load_weights(WEIGHTS)
    mortal.is_up = False
    first = asyncio.create_task(engine.generate(REQUEST))
    await asyncio.sleep(0.005)
    assert mortal.restarts
    mortal.weight_version = -1
    assert await engine.generate(REQUEST) is REPLY
    assert await first is REPLY


async def test_a_start_that_fails_is_tried_again_within_the_budget() -> None:
    mortal = Mortal(True, False)
    engine = restarted(mortal, budget=2)
    await engine.load_weights(WEIGHTS)
    mortal.is_up = False
    assert await engine.generate(REQUEST) is REPLY
    assert len(mortal.restarts) == 2


async def test_beyond_the_budget_the_engine_is_lost() -> None:
    mortal = Mortal(True, True)
    engine = restarted(mortal, budget=2)
    await engine.load_weights(WEIGHTS)
    mortal.is_up = False
    with pytest.raises(EngineLostError, match="its server has ended"):
        await engine.generate(REQUEST)
    assert len(mortal.restarts) == 2


async def test_without_weights_there_is_nothing_to_start_with() -> None:
    mortal = Mortal()
    mortal.is_up, mortal.weight_version = False, 0
    with pytest.raises(EngineLostError):
        await restarted(mortal).generate(REQUEST)
    assert mortal.restarts == []


async def test_another_error_is_no_loss() -> None:
    mortal = Mortal()
    mortal.weight_version = 0
    with pytest.raises(EngineError, match="no answer"):
        await restarted(mortal).generate(GenerateRequest(input_ids=(1,), rid="bad"))
    assert mortal.restarts == []
