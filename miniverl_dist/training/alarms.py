"""What no healthy step shows: told at once, and nobody has to find it in the curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def alarms(metrics: Mapping[str, float | int]) -> Iterator[str]:
    """What a person should know of a step, one sentence each.

    Args:
        metrics: The step's record; fields that were not measured are absent.
    """
    if metrics.get("calls_per_trajectory") == 0:
        yield "no trajectory of this step made a call"
    if metrics.get("num_target_rows") == 0:
        yield (
            "no position of this step was compared with its target, so the divergence taught "
            "nothing: selection kept no token, or student and teacher share none"
        )
