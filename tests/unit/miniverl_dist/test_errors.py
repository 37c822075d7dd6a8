from __future__ import annotations

import asyncio
import copy
import pickle

import pytest

from miniverl_dist import errors
from miniverl_dist.errors import (
    MiniverlError,
    RequestRejectedError,
    TeacherError,
    UpdateError,
    first_error,
)

MESSAGE = "found 3 ranks, expected 4: see events.jsonl (näher: 日本)"


def classes() -> list[type[MiniverlError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [value for value in found if issubclass(value, MiniverlError)]


def test_all_errors_are_looked_at() -> None:
    assert len(classes()) > 25
    assert all(kind.__module__ == "miniverl_dist.errors" for kind in classes())


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_its_message(kind: type[MiniverlError]) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(kind(MESSAGE), protocol))
        assert type(again) is kind
        assert str(again) == MESSAGE
    assert str(copy.copy(kind(MESSAGE))) == MESSAGE


def test_a_status_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(RequestRejectedError("no", status=422)))
    assert (str(again), again.status) == ("no", 422)


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_every_error_says_what_it_is(kind: type[MiniverlError]) -> None:
    assert kind.__doc__
    assert kind.__name__.endswith("Error")


async def test_peer_26_the_first_error_of_a_task_group_wins() -> None:
    async def first() -> None:
        raise UpdateError("the cause")

    async def inner() -> None:
        async with asyncio.TaskGroup() as crew:
            crew.create_task(first())

    async def second() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise TeacherError("a consequence")

    async def outer() -> None:
        async with asyncio.TaskGroup() as crew:
            crew.create_task(second())
            crew.create_task(inner())

    with pytest.raises(BaseExceptionGroup) as caught:
        await outer()
    assert str(first_error(caught.value)) == "the cause"
