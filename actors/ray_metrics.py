"""A run's step records as metrics of Ray, which every node offers to Prometheus.

Ray puts ``ray_`` in front of the names. Every metric carries the run's name as the tag ``run``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, SupportsFloat

from miniverl_dist.observability.metrics import MetricValue

SECONDS_BOUNDARIES: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Buckets from a toy's step to one of the reference run."""


class Shown(NamedTuple):
    """How one field of a step record is shown."""

    name: str
    description: str


GAUGES: Final[Mapping[str, Shown]] = {
    # Field of the newest record, as it is.
    "step": Shown("miniverl_step", "trained batches so far"),
    "policy_version": Shown("miniverl_policy_version", "committed optimizer steps"),
    "policy_lag_mean": Shown(
        "miniverl_policy_lag_mean", "publishes between sampling and use, mean of the batch"
    ),
    "policy_lag_max": Shown(
        "miniverl_policy_lag_max", "publishes between sampling and use, largest of the batch"
    ),
    "num_groups_waiting": Shown(
        "miniverl_groups_waiting", "finished groups in the queue behind the batch"
    ),
    "reward_mean": Shown("miniverl_reward_mean", "mean reward of the batch"),
    "pass_rate": Shown("miniverl_pass_rate", "fraction of the batch that the verifier passed"),
    "reverse_kl_mean": Shown(
        "miniverl_reverse_kl_nats", "student minus teacher log-probability per scored token"
    ),
    "entropy_mean": Shown("miniverl_entropy_nats", "entropy of the policy on trained tokens"),
    "grad_norm": Shown("miniverl_grad_norm", "gradient norm before clipping"),
    "seconds_step": Shown("miniverl_last_step_seconds", "time of the newest step"),
}
COUNTERS: Final[Mapping[str, Shown]] = {
    # Field added up over the records.
    "rollout_tokens": Shown("miniverl_rollout_tokens", "tokens sampled"),
    "num_loss_tokens": Shown("miniverl_loss_tokens", "tokens trained on"),
    "num_harness_faults": Shown("miniverl_harness_faults", "episodes lost to harness faults"),
    "teacher_dropped": Shown("miniverl_teacher_dropped", "trajectories without a score"),
}
PHASES: Final[Mapping[str, str]] = {
    "seconds_take": "take",
    "seconds_rollout": "rollout",
    "seconds_teacher": "teacher",
    "seconds_build": "build",
    "seconds_update": "update",
    "seconds_publish": "publish",
    "seconds_commit": "commit",
}
"""Record field to the value of the tag ``phase``; rollout and teacher are sums over episodes."""


class RayMetrics:
    """A sink for step records. Make it in a process that is connected to Ray, one for each run."""

    def __init__(self, run_name: str) -> None:
        from ray.util import metrics

        self._run = {"run": run_name}
        keys, by_phase = ("run",), ("run", "phase")
        self._gauges: dict[str, Any] = {
            field: metrics.Gauge(shown.name, shown.description, tag_keys=keys)
            for field, shown in GAUGES.items()
        }
        self._counters: dict[str, Any] = {
            field: metrics.Counter(shown.name, shown.description, tag_keys=keys)
            for field, shown in COUNTERS.items()
        }
        self._steps: Any = metrics.Counter("miniverl_steps", "trained batches", tag_keys=keys)
        # Ray rebuilds a histogram's sum from the middles of its buckets: good for quantiles only.
        # Exact times are in the counters and gauges.
        self._step_seconds: Any = metrics.Histogram(
            "miniverl_step_seconds",
            "time of a step, its groups' arrival included",
            boundaries=list(SECONDS_BOUNDARIES),
            tag_keys=keys,
        )
        self._phase_seconds: Any = metrics.Counter(
            "miniverl_phase_seconds", "time spent in a phase", tag_keys=by_phase
        )
        self._last_phase_seconds: Any = metrics.Gauge(
            "miniverl_last_phase_seconds", "time of the newest step's phases", tag_keys=by_phase
        )

    def __call__(self, record: Mapping[str, MetricValue]) -> None:
        """Take a step record, as metrics.jsonl has it.

        A field that is missing leaves its metric as it was. One that is not a number makes its
        gauge NaN, which Prometheus sees as a gap: the former value would look healthy. Counters
        leave it out.
        """
        found = {
            name: float(value)
            for name, value in record.items()
            if isinstance(value, SupportsFloat) and math.isfinite(value)
        }
        for field, gauge in self._gauges.items():
            if field in record:
                gauge.set(found.get(field, math.nan), tags=self._run)
        for field, counter in self._counters.items():
            _add(counter, found.get(field, 0.0), self._run)
        if "seconds_step" in found:
            self._step_seconds.observe(found["seconds_step"], tags=self._run)
        for field, phase in PHASES.items():
            if field in found:
                tags = self._run | {"phase": phase}
                _add(self._phase_seconds, found[field], tags)
                self._last_phase_seconds.set(found[field], tags=tags)
        self._steps.inc(1, tags=self._run)  # last: who sees the new count sees the step's numbers


def _add(counter: Any, value: float, tags: dict[str, str]) -> None:  # noqa: ANN401 - Ray's class
    if value > 0:  # Ray refuses to count nothing
        counter.inc(value, tags=tags)
