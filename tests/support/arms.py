"""What a finished run of an arm has come to, in round numbers."""

from __future__ import annotations

from miniverl_dist.lab.arms import Measured

MEASURED = Measured(
    pass_rate_start=0.3,
    reward_start=0.4,
    pass_rate=0.5,
    reward=0.6,
    num_eval_episodes=208,
    sampled_groups=192,
    sampled_episodes=1536,
    zero_variance="keep",
    zero_variance_groups=48,
    refilled_groups=0,
    sampled_tokens=40_000,
    optimizer_steps=96,
    teacher_scored_tokens=0,
    start_sha256="a",
)
