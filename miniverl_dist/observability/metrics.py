"""Metric fields, each declared once with its unit and meaning, and their writer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Final, NamedTuple

from miniverl_dist.errors import RecordError
from miniverl_dist.observability.run_dir import RecordFile, RunDirectory

MetricValue = float | int | None | Mapping[str, float]
"""A number; None where it was measured and is not a number (NaN, an infinity); a mapping for the
fields marked by key. What was not measured is absent."""

NOT_A_NUMBER: Final = "not a number"
"""How a reader is told of such a value."""


class Metric(NamedTuple):
    """Unit and meaning of a field."""

    unit: str
    description: str
    is_by_key: bool = False
    """The value is a mapping, for instance one number per span kind."""
    is_sum_over_episodes: bool = False
    """Added up over episodes that run side by side: may exceed the step's own seconds."""

    @property
    def unit_text(self) -> str:
        """The unit, and what must be known to compare the value with others of that unit."""
        return f"{self.unit}, summed over episodes" if self.is_sum_over_episodes else self.unit


METRICS: Final[Mapping[str, Metric]] = {
    # Where in the run
    "step": Metric("count", "trained batches so far, this one included"),
    "policy_version": Metric("count", "committed optimizer steps after this step"),
    "num_optimizer_steps": Metric("count", "optimizer steps taken on this batch"),
    # Episodes
    "reward_mean": Metric("reward", "mean reward of the batch's trajectories"),
    "reward_std": Metric("reward", "standard deviation of the rewards over the batch"),
    "pass_rate": Metric("fraction", "trajectories whose task the verifier passed"),
    "partial_mean": Metric("reward", "mean partial credit of the calls"),
    "first_call_mean": Metric("reward", "mean credit of the first call"),
    "exec_mean": Metric("fraction", "calls that ran without an error"),
    "calls_per_trajectory": Metric("count", "attempted calls per trajectory; 0 raises an alarm"),
    "num_groups": Metric("count", "groups in the batch"),
    "num_trajectories": Metric("count", "trajectories in the batch"),
    "num_loss_tokens": Metric("tokens", "sampled tokens that are trained on"),
    "num_zero_variance_groups": Metric("count", "groups whose rewards are all equal"),
    "num_groups_waiting": Metric("count", "finished groups behind the batch when it was trained"),
    "num_refilled_groups": Metric("count", "groups dropped and sampled again"),
    "num_harness_faults": Metric("count", "episodes lost to deadline, environment or engine"),
    "rollout_tokens": Metric("tokens", "tokens sampled for the batch"),
    "response_tokens_mean": Metric("tokens", "sampled tokens per trajectory"),
    # Advantage
    "advantage_abs_mean": Metric("reward", "mean |advantage| per trained token, all terms"),
    "group_advantage_abs_mean": Metric("reward", "mean |group advantage| per trained token"),
    "opd_weight_mean": Metric("nats", "mean OPD weight per scored token, clipped"),
    "opd_weight_abs_mean": Metric("nats", "mean |OPD weight| per scored token, clipped"),
    "opd_clip_fraction": Metric(
        "fraction", "scored tokens whose OPD weight was clipped (rule unit)"
    ),
    "opd_stopped_fraction": Metric("fraction", "scored tokens behind a span's stop"),
    "reverse_kl_mean": Metric("nats", "student minus teacher log-probability per scored token"),
    "teacher_scored_fraction": Metric("fraction", "trajectories with a teacher score"),
    "teacher_dropped": Metric("count", "trajectories without a teacher score"),
    "teacher_entropy_mean": Metric("nats", "mean entropy of the teacher's distribution"),
    # Whole distributions
    "num_target_rows": Metric("rows", "positions that were compared with the teacher"),
    "teacher_queried_position_ratio": Metric(
        "fraction", "compared positions among those that could have been"
    ),
    "teacher_tail_mass_mean": Metric(
        "probability", "the teacher's mass in the bucket, mean over compared rows (top-k targets)"
    ),
    "divergence_mean": Metric("nats", "mean divergence per compared position, unweighted"),
    "distill_loss": Metric("loss", "divergence part of the loss"),
    # Update
    "loss": Metric("loss", "total loss, mean over the batch's optimizer steps"),
    "policy_loss": Metric("loss", "policy-gradient part of the loss"),
    "kl_loss": Metric("loss", "part of the loss that pulls to the reference policy"),
    "reference_kl_mean": Metric("nats", "mean k3 estimate of the KL to the frozen reference"),
    "loss_by_span_type": Metric("loss", "loss per kind of span", is_by_key=True),
    "grad_norm": Metric("norm", "global gradient norm before clipping"),
    "lr": Metric("rate", "learning rate"),
    "clip_low_fraction": Metric("fraction", "tokens at the lower PPO bound"),
    "clip_high_fraction": Metric("fraction", "tokens at the upper PPO bound"),
    "dual_clip_fraction": Metric("fraction", "tokens at the dual-clip bound"),
    "ratio_max": Metric("ratio", "largest policy/proximal ratio"),
    "entropy_mean": Metric("nats", "mean entropy of the policy on trained tokens"),
    "mismatch_mean_abs": Metric("nats", "mean |proximal - rollout| log-probability"),
    "mismatch_max_ratio": Metric("ratio", "largest ratio, either way, of proximal and rollout"),
    "mismatch_kl": Metric(
        "nats", "k3 estimate of KL(engine || trainer): the floor of a self-teacher's reverse KL"
    ),
    "mismatch_capped_fraction": Metric("fraction", "tokens whose mismatch weight was capped"),
    "policy_lag_mean": Metric("publishes", "mean publishes between sampling and use"),
    "policy_lag_max": Metric("publishes", "largest number of publishes between sampling and use"),
    "projection_chunk_size": Metric("rows", "rows of the vocabulary projection held at once"),
    "num_chunk_halvings": Metric("count", "times that memory ran out and the chunk was halved"),
    # Curriculum
    "tail_calls_mean": Metric("calls", "mean T of the batch: calls left to the student"),
    "tail_calls_max": Metric("calls", "largest T of the batch"),
    "finished_tasks_fraction": Metric("fraction", "tasks whose T has reached its limit"),
    # Time and memory
    "seconds_take": Metric("seconds", "waiting for groups"),
    "seconds_accumulate": Metric(
        "seconds", "gradients of groups that were in while others were awaited; in seconds_take"
    ),
    "seconds_build": Metric("seconds", "building the batch"),
    "seconds_update": Metric("seconds", "updating the student"),
    "seconds_publish": Metric("seconds", "publishing weights"),
    "seconds_commit": Metric("seconds", "writing the checkpoint"),
    "seconds_step": Metric("seconds", "the step, waiting for its groups included, commit not"),
    "seconds_rollout": Metric(
        "seconds", "sampling, summed over episodes", is_sum_over_episodes=True
    ),
    "seconds_teacher": Metric(
        "seconds", "teacher scoring, summed over episodes", is_sum_over_episodes=True
    ),
    "peak_rss_bytes": Metric("bytes", "largest resident memory of the process so far"),
    "gpu_memory_allocated_bytes": Metric("bytes", "accelerator memory in use"),
    "gpu_memory_peak_bytes": Metric("bytes", "largest accelerator memory in use so far"),
}


class MetricsWriter:
    """Writes one line per step to metrics.jsonl."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def write(self, record: Mapping[str, MetricValue]) -> None:
        """Append one line; ``record`` needs ``step``. Non-finite numbers are written as null.

        Raises:
            RecordError: an undeclared field, or a value of the wrong shape.
        """
        self._run.append(RecordFile.METRICS, metric_line(record))


def metric_line(record: Mapping[str, MetricValue]) -> dict[str, object]:
    """The record as JSON values, checked against the declaration."""
    unknown = sorted(set(record) - set(METRICS))
    if unknown:
        raise RecordError(
            f"metric {', '.join(unknown)} not declared in miniverl_dist.observability.metrics"
        )
    if not isinstance(record.get("step"), Integral):
        raise RecordError(f"metrics need an integer `step`, found {record.get('step')!r}")
    return {name: _json_value(name, value) for name, value in record.items()}


def step_problem(former: int, step: int) -> str | None:
    """What is wrong where ``step`` follows ``former``; 0 is before the first.

    A resumed run cuts what it does again from its file: whatever it goes through, a file holds
    each step once, from 1 on.
    """
    if step == former + 1:
        return None
    what = "a line is missing" if step > former + 1 else "a line is there twice, or out of place"
    return f"found step {step}, expected {former + 1}: {what}"


def _json_value(name: str, value: object) -> object:
    if isinstance(value, Mapping):
        if not METRICS[name].is_by_key:
            raise RecordError(f"metric {name}: expected a number, found a mapping")
        return {str(key): _number(name, item) for key, item in value.items()}
    if METRICS[name].is_by_key and value is not None:
        raise RecordError(f"metric {name}: expected a mapping, found {value!r}")
    return _number(name, value)


def _number(name: str, value: object) -> float | int | None:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if value is None:
        return None
    raise RecordError(f"metric {name}: expected a number, found {value!r}")
