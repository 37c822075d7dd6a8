"""A trajectory of which only tokens and spans matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miniverl_dist.schemas.trajectory import (
    SamplingRecord,
    Span,
    Termination,
    Trajectory,
    mask_from_spans,
)


def bare_trajectory(
    name: str, token_ids: Sequence[int], spans: Sequence[Span], **fields: Any
) -> Trajectory:
    """One that has failed without a call.

    Args:
        name: Its id.
        token_ids: [T].
        spans: Partition the tokens; the sampled ones have the loss.
        fields: Of `Trajectory`, instead of what stands here.
    """
    mask = mask_from_spans(tuple(spans), len(token_ids))
    told: dict[str, Any] = {
        "trajectory_id": name,
        "group_id": "g",
        "task_id": "task",
        "environment": "none",
        "prefix_calls": 0,
        "tail_calls": 1,
        "tokenizer_fingerprint": "f" * 64,
        "token_ids": tuple(token_ids),
        "spans": tuple(spans),
        "loss_mask": tuple(mask),
        "rollout_logprobs": [-1.0 if is_sampled else None for is_sampled in mask],
        "messages": (),
        "tool_calls": (),
        "exec_successes": (),
        "reward": 0.0,
        "reward_parts": {},
        "passed": False,
        "verdict": {},
        "termination": Termination.FINAL_ANSWER,
        "sampling": SamplingRecord(temperature=1.0, max_new_tokens=8),
        "seed": 0,
    }
    return Trajectory(**told | fields)
