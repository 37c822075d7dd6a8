from __future__ import annotations

from miniverl_dist.observability.events import Event
from miniverl_dist.reporting.losses import LossCounts


def counted(*events: dict[str, object]) -> dict[str, dict[int, int]]:
    losses = LossCounts()
    for event in events:
        losses.add(event)
    return {kind: dict(counts) for kind, counts in losses.by_kind.items()}


def test_an_event_counts_at_the_step_that_was_under_way() -> None:
    refused = {"event": Event.TEACHER_REFUSED.value, "reason": "too_long"}
    assert counted(
        {"event": "run_started"},
        refused,
        {"event": "step_finished", "step": 1},
        refused,
        refused,
        {"event": "harness_fault", "termination": "deadline"},
        {"event": "step_finished", "step": 2},
        {"event": "resumed", "step": 1},
        {"event": "engine_lost", "engine": "a", "reason": "b"},
    ) == {
        "teacher refused: too_long": {1: 1, 2: 2},
        "harness fault: deadline": {2: 1},
        "engine lost": {2: 1},
    }


def test_an_event_that_names_its_step_counts_there() -> None:
    assert counted({"event": "alarm", "step": 7, "what": "x"}) == {"alarm": {7: 1}}


def test_free_reasons_cannot_make_kinds_without_end() -> None:
    found = counted(*({"event": "group_dropped", "reason": f"why {i}"} for i in range(100)))
    assert len(found) == 13
    assert found["other"] == {1: 88}
    [kind] = counted({"event": "group_dropped", "reason": "long\n" * 100})
    assert len(kind) < 60
    assert "\n" not in kind
