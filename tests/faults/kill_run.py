"""Runs or resumes a recipe, and kills its own process at a named point.

    python -m tests.faults.kill_run train CONFIG RUN [POINT [OVERRIDE ...]]
    python -m tests.faults.kill_run resume RUN

The points are reached through the ports, where a real crash would cut: no hook is in the product.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from actors import launch
from actors.single import Parts, SingleActor
from miniverl_dist.config.load import load_config
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.ports import RolloutSource

POINTS = ("rollout", "scored", "update", "commit", "evaluation")
ACCUMULATING_POINTS = ("accumulate", "accumulated")
"""Of a recipe with `loop.accumulate`: within its second step, and behind its optimizer step."""
_WHEN = {
    "rollout": 9,
    "scored": 8,
    "update": 2,
    "commit": 2,
    "evaluation": 3,
    "accumulate": 3,
    "accumulated": 2,
}
"""Which call is the last one: each lies behind the first trained step."""
_STUDENT_CALLS = {
    "update": "update",
    "commit": "save",
    "accumulate": "accumulate",
    "accumulated": "commit_accumulated",
}


def die() -> None:
    """What a power cut does."""
    os.kill(os.getpid(), signal.SIGKILL)


class Through:
    """Passes everything on to a port, and dies behind the n-th call of one method."""

    def __init__(self, inner: Any, method: str, calls_left: int, *, before: bool = False) -> None:
        self._inner, self._method, self._left, self._before = inner, method, calls_left, before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._counted(found) if name == self._method else found

    def _counted(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def counted(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            is_last = self._left == 0  # others may count on while this one is awaited
            if is_last and self._before:
                die()
            result = await call(*args, **kwargs)
            if is_last:
                die()
            return result

        return counted


def doomed(actor: type[SingleActor], at: str) -> type[SingleActor]:
    """The same actor; it dies at a point."""

    class Doomed(actor):  # type: ignore[misc, valid-type]
        @asynccontextmanager
        async def open(self, **options: Any) -> AsyncIterator[Parts]:
            async with super().open(**options) as parts:
                yield doom(parts, at)

    return Doomed


def doom(parts: Parts, point: str) -> Parts:
    ports, left = parts.ports, _WHEN[point]
    if point == "rollout":
        ports = dataclasses.replace(
            ports, rollouts=Through(ports.rollouts, "rollout", left, before=True)
        )
    elif point == "scored":
        ports = dataclasses.replace(ports, teacher=Through(ports.teacher, "score", left))
    elif point in _STUDENT_CALLS:
        students = Through(ports.students, _STUDENT_CALLS[point], left)
        ports = dataclasses.replace(ports, students=students)
    else:
        student = parts.evaluator.policies["student"]

        async def doomed_student() -> RolloutSource:
            # Evaluations before and after the warm-up go through; the one at step 2 does not.
            doomed_student.count += 1  # type: ignore[attr-defined]
            source = await student()
            is_due = doomed_student.count == left  # type: ignore[attr-defined]
            return Through(source, "rollout", 2) if is_due else source

        doomed_student.count = 0  # type: ignore[attr-defined]
        parts.evaluator.policies = dict(parts.evaluator.policies) | {"student": doomed_student}
    return Parts(ports, parts.evaluator)


def main() -> None:
    if sys.argv[1] == "resume":
        launch.resume(Path(sys.argv[2]), progress=SilentProgress())
        return
    config = load_config(Path(sys.argv[2]), sys.argv[5:])
    maker = launch.actor_of(config)
    if len(sys.argv) > 4:
        maker = doomed(maker, sys.argv[4])
    launch.train(config, run_dir=Path(sys.argv[3]), progress=SilentProgress(), make_actor=maker)


if __name__ == "__main__":
    main()
