"""Calls of Ray actors with our errors: what was raised there is raised here, a death is typed."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from miniverl_dist.errors import MiniverlError


async def remote(call: Awaitable[Any], who: str, lost: type[MiniverlError]) -> Any:  # noqa: ANN401
    """The result of an actor's method.

    Args:
        call: The ``ObjectRef``.
        who: The actor, for messages.
        lost: Raised when the actor, its worker or its node is gone.

    Raises:
        MiniverlError: what the method raised; ``lost`` where that is no error of ours, since a
            defect leaves the actor in a state that nobody knows.
    """
    try:
        return await call
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MiniverlError):
            raise cause from None
        raise lost(f"{who} failed: {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        if error.actor_init_failed:
            raise lost(f"{who} could not be built: {_lines(error)[-1]}") from error
        raise lost(f"{who} is gone: {_lines(error)[0]}") from error
    except GetTimeoutError as error:
        raise lost(f"{who} is gone: {_lines(error)[0]}") from error
    except RayError as error:  # worker crashed, node died, object lost: all end this actor's work
        raise lost(f"{who}: {type(error).__name__}: {_lines(error)[0]}") from error


def _lines(error: Exception) -> list[str]:
    """What Ray says; of a constructor's traceback the last line holds the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines or [type(error).__name__]
