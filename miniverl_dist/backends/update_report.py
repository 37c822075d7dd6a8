"""What an update reports, the same fields for every backend."""

from __future__ import annotations

from collections.abc import Sequence

from miniverl_dist.objective.policy_loss import Metrics, merge_metrics, summarize

REPORTED = (
    "clip_low_fraction",
    "clip_high_fraction",
    "dual_clip_fraction",
    "ratio_max",
    "entropy_mean",
    "reference_kl_mean",
    "mismatch_mean_abs",
    "mismatch_max_ratio",
    "mismatch_kl",
    "mismatch_capped_fraction",
)
PER_STEP = ("loss", "policy_loss", "kl_loss", "grad_norm")
_PER_ROW = {
    "teacher_entropy_mean": "teacher_entropy_sum",
    "teacher_tail_mass_mean": "teacher_tail_mass_sum",
}

KIND_SUM, KIND_ROWS = "kind_sum:", "kind_rows:"
"""Before a kind of span: the sum of its rows' divergences, and their number."""


def update_report(steps: Sequence[Metrics]) -> dict[str, float]:
    """Metrics of an update: losses and norms per optimizer step, the rest per trained token.

    What no part of the loss measured (a dual clip, a mismatch cap, a reference; all of the policy's
    in a batch that nobody sampled) is absent: a 0 would say that it was looked at.

    Args:
        steps: merged metrics of each optimizer step, ``grad_norm`` among them; at least one.
    """
    merged = merge_metrics(*steps)
    summary = summarize(merged)
    report = {name: summary[name] for name in REPORTED if name in summary}
    report |= {name: summary[name] / len(steps) for name in PER_STEP if name in summary}
    report |= {"num_loss_tokens": float(merged["num_tokens"])}
    return report | _row_report(merged, len(steps))


def _row_report(merged: Metrics, num_steps: int) -> dict[str, float]:
    """What comparing whole distributions gave; nothing where no row was compared."""
    num_rows = float(merged.get("num_rows", 0.0))
    if not num_rows:
        return {}
    report = {
        "divergence_mean": float(merged["divergence_sum"]) / num_rows,
        "distill_loss": float(merged["distill_loss"]) / num_steps,
    }
    for name, sums in _PER_ROW.items():
        if sums in merged:
            report[name] = float(merged[sums]) / num_rows
    for name, value in merged.items():
        if name.startswith(KIND_SUM):
            kind = name.removeprefix(KIND_SUM)
            report[f"loss_by_span_type:{kind}"] = float(value) / float(merged[KIND_ROWS + kind])
    return report
