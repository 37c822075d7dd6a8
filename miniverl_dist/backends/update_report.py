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


KIND_SUM, KIND_ROWS = "kind_sum:", "kind_rows:"
"""Before a kind of span: the sum of its rows' divergences, and their number."""


def update_report(steps: Sequence[Metrics]) -> dict[str, float]:
    """Metrics of an update: losses and norms per optimizer step, the rest per trained token.

    The same fields under every loss: what a loss does not have (a dual clip, a mismatch cap, a
    reference) is 0.

    Args:
        steps: merged metrics of each optimizer step, ``grad_norm`` among them; at least one.
    """
    merged = merge_metrics(*steps)
    summary = summarize(merged)
    report = {name: summary.get(name, 0.0) for name in (*REPORTED, *PER_STEP)}
    for name in PER_STEP:
        report[name] /= len(steps)
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
    if "teacher_entropy_sum" in merged:
        report["teacher_entropy_mean"] = float(merged["teacher_entropy_sum"]) / num_rows
    for name, value in merged.items():
        if name.startswith(KIND_SUM):
            kind = name.removeprefix(KIND_SUM)
            report[f"loss_by_span_type:{kind}"] = float(value) / float(merged[KIND_ROWS + kind])
    return report
