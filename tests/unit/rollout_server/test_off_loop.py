from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from miniverl_dist.environments.base import Observation, Outcome
from miniverl_dist.schemas.messages import Message, ParsedCall
from miniverl_dist.schemas.trajectory import Termination
from rollout_server.off_loop import OffLoop
from tests.fake_stage import ScriptedEnvironment, ScriptedSession, call, play, wire


class TestOffLoop:
    async def test_work_runs_in_a_thread_and_the_loop_goes_on(self) -> None:
        freed = threading.Event()
        off_loop = OffLoop(1)
        work = asyncio.create_task(off_loop.run(lambda: (freed.wait(10), threading.get_ident())))
        await asyncio.sleep(0.01)
        assert not work.done()
        freed.set()  # only a loop that goes on gets here
        was_freed, thread = await work
        assert was_freed
        assert thread != threading.get_ident()

    async def test_without_threads_it_runs_on_the_loop(self) -> None:
        assert await OffLoop(0).run(threading.get_ident) == threading.get_ident()

    async def test_an_error_comes_through(self) -> None:
        with pytest.raises(ZeroDivisionError):
            await OffLoop(1).run(lambda: 1 // 0)

    async def test_who_is_cancelled_waits_for_the_thread(self) -> None:
        begun, freed, ended = threading.Event(), threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            freed.wait(10)
            ended.set()

        task = asyncio.create_task(OffLoop(1).run(work))
        assert await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        freed.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    async def test_work_that_has_not_begun_is_dropped(self) -> None:
        freed, calls = threading.Event(), list[str]()
        off_loop = OffLoop(1)
        first = asyncio.create_task(off_loop.run(lambda: freed.wait(10)))
        second = asyncio.create_task(off_loop.run(lambda: calls.append("second")))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        freed.set()
        assert await first
        await off_loop.run(lambda: None)
        assert calls == []


class NotingSession(ScriptedSession):
    """Notes the threads that it is called in."""

    threads: set[int]

    def opening(self) -> list[Message]:
        self.threads.add(threading.get_ident())
        return super().opening()

    def step(self, calls: Sequence[ParsedCall]) -> list[Observation]:
        self.threads.add(threading.get_ident())
        return super().step(calls)

    def finish(self) -> Outcome:
        self.threads.add(threading.get_ident())
        return super().finish()


class NotingEnvironment(ScriptedEnvironment):
    """Opens sessions that share one set of threads."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def start(self, task_id: str, *, prefix_calls: int) -> ScriptedSession:
        self.threads.add(threading.get_ident())
        session = super().start(task_id, prefix_calls=prefix_calls)
        session.__class__ = NotingSession
        session.threads = self.threads  # type: ignore[attr-defined]
        return session


async def test_an_episode_keeps_its_environment_off_the_loop() -> None:
    environment = NotingEnvironment()
    told = await play(wire(call(x=2)), "done", environment=environment)
    assert told.termination is Termination.FINAL_ANSWER
    assert environment.threads
    assert threading.get_ident() not in environment.threads
