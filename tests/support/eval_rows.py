"""Rows of eval.json as JSON, made of passes."""

from __future__ import annotations

from typing import Any


def row(tag: str, *passed: int, policy: str = "student") -> dict[str, Any]:
    """How many of its two episodes each task has passed."""
    tasks = [
        {
            "task_id": f"t{i}",
            "tail_calls": 1,
            "num_episodes": 2,
            "num_passed": n,
            "reward_sum": n / 2,
        }
        for i, n in enumerate(passed)
    ]
    count, rate = 2 * len(passed), sum(passed) / (2 * len(passed))
    return {
        "policy": policy,
        "tag": tag,
        "policy_version": 0,
        "tail_calls": 1,
        "num_tasks": len(passed),
        "num_episodes": count,
        "num_faults": 0,
        "pass_rate": rate,
        "pass_low": rate / 2,
        "pass_high": (1 + rate) / 2,
        "official_per_turn_rate": None,
        "state_only_rate": None,
        "reward_mean": rate / 2,
        "reward_parts": {},
        "calls_per_episode": 1.5,
        "tokens_per_episode": 9.0,
        "terminations": {"final_answer": count},
        "tasks": tasks,
    }
