"""The curves of a report: fields that are read together, and what a healthy one looks like."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Topic(StrEnum):
    """Charts that stand under one heading."""

    OUTCOME = "Outcome"
    TEACHER = "Teacher and credit"
    UPDATE = "Update"
    TIME = "Time and memory"
    LOSSES = "Drops, refusals, faults"


@dataclass(frozen=True)
class Chart:
    """Metric fields that are read together, over the steps of a run."""

    topic: Topic
    title: str
    hint: str
    unit: str
    fields: tuple[str, ...]
    is_stacked: bool = False


PHASES: Final = (
    "seconds_take",
    "seconds_build",
    "seconds_update",
    "seconds_publish",
    "seconds_commit",
)
"""One after the other in a step; they add up to it (but for the commit, which follows it)."""

CHARTS: Final = (
    Chart(
        Topic.OUTCOME,
        "Reward and its parts",
        "Training episodes at the curriculum's current horizon; when the horizon grows, all may "
        "fall although the student learns.",
        "reward",
        ("reward_mean", "partial_mean", "first_call_mean", "exec_mean", "reward_std"),
    ),
    Chart(
        Topic.OUTCOME,
        "Curriculum and calls",
        "T, the calls left to the student, and how many it attempts. None at all is an alarm.",
        "calls",
        ("tail_calls_mean", "tail_calls_max", "calls_per_trajectory"),
    ),
    Chart(
        Topic.OUTCOME,
        "Length",
        "What the student writes. A fall to a few tokens or a climb to the cap are both ill signs.",
        "tokens per trajectory",
        ("response_tokens_mean",),
    ),
    Chart(
        Topic.TEACHER,
        "Reverse KL to the teacher",
        "Student minus teacher on the student's own tokens. Distillation lowers it; a rise while "
        "the reward rises means that the reward pulls away from the teacher.",
        "nats per scored token",
        ("reverse_kl_mean", "opd_weight_mean"),
    ),
    Chart(
        Topic.TEACHER,
        "Advantage parts",
        "Size of the two signals (group advantage, and the teacher's weight before its "
        "coefficient) and of their sum. Neither should drown the other.",
        "mean absolute value",
        ("group_advantage_abs_mean", "opd_weight_abs_mean", "advantage_abs_mean"),
    ),
    Chart(
        Topic.TEACHER,
        "Divergence to the teacher",
        "Of whole distributions, at the rows that were compared.",
        "nats, loss",
        ("divergence_mean", "distill_loss"),
    ),
    Chart(
        Topic.TEACHER,
        "Rows compared with the teacher",
        "Share of positions that were queried, and the teacher's mass outside of its stored "
        "tokens: near 1, the bucket is all that is learned from.",
        "fraction, probability",
        ("teacher_queried_position_ratio", "teacher_tail_mass_mean"),
    ),
    Chart(
        Topic.UPDATE,
        "Clip fractions",
        "Shares of tokens at a bound. Steadily above a third, the bound makes the gradient.",
        "fraction of tokens",
        (
            "clip_low_fraction",
            "clip_high_fraction",
            "dual_clip_fraction",
            "opd_clip_fraction",
            "opd_stopped_fraction",
            "mismatch_capped_fraction",
        ),
    ),
    Chart(
        Topic.UPDATE,
        "Engine mismatch",
        "Trainer against sampling engine under the same weights: should be flat and near 0.",
        "nats",
        ("mismatch_mean_abs", "mismatch_kl"),
    ),
    Chart(
        Topic.UPDATE,
        "Largest ratios",
        "Policy/proximal: far above the clip bound the batch is old. Trainer against engine: the "
        "token that the two see most differently.",
        "ratio",
        ("ratio_max", "mismatch_max_ratio"),
    ),
    Chart(
        Topic.UPDATE,
        "Policy lag",
        "Publishes between sampling and use; bounded by loop.max_policy_lag.",
        "publishes",
        ("policy_lag_mean", "policy_lag_max"),
    ),
    Chart(
        Topic.UPDATE,
        "Entropy",
        "A fall to 0 ends exploration: groups then have no variance.",
        "nats",
        ("entropy_mean", "teacher_entropy_mean"),
    ),
    Chart(
        Topic.UPDATE,
        "Loss",
        "A policy-gradient loss need not fall.",
        "loss",
        ("loss", "policy_loss", "kl_loss", "reference_kl_mean"),
    ),
    Chart(
        Topic.UPDATE,
        "Gradient norm",
        "Before clipping; should not explode.",
        "norm",
        ("grad_norm",),
    ),
    Chart(Topic.UPDATE, "Learning rate", "As scheduled.", "rate", ("lr",)),
    Chart(
        Topic.TIME,
        "Time per phase",
        "Where a step's wall-clock time goes. Large seconds_take: the trainer waits for rollouts.",
        "seconds",
        PHASES,
        is_stacked=True,
    ),
    Chart(
        Topic.TIME,
        "Work behind the wait",
        "Summed over episodes that run side by side, so it may exceed the step's own time.",
        "seconds",
        ("seconds_rollout", "seconds_teacher", "seconds_accumulate", "seconds_step"),
    ),
    Chart(
        Topic.TIME,
        "Memory",
        "Peaks so far; a steady rise of resident memory is a leak.",
        "bytes",
        ("peak_rss_bytes", "gpu_memory_allocated_bytes", "gpu_memory_peak_bytes"),
    ),
    Chart(
        Topic.LOSSES,
        "Batches",
        "What did not reach the update, reached it without a teacher, or had nothing to tell.",
        "count",
        (
            "teacher_dropped",
            "num_harness_faults",
            "num_refilled_groups",
            "num_zero_variance_groups",
        ),
    ),
)
