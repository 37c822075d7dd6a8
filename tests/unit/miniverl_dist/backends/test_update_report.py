"""The metrics of an update, out of those of its optimizer steps."""

from __future__ import annotations

import pytest

from miniverl_dist.backends.update_report import update_report


def test_losses_are_means_of_steps_and_counts_are_shares_of_tokens() -> None:
    first = {
        "num_tokens": 10,
        "loss": 1.0,
        "policy_loss": 0.75,
        "grad_norm": 4.0,
        "clip_low_tokens": 3,
        "entropy_sum": 20.0,
        "ratio_max": 1.5,
        "mismatch_ratio_max": 2.0,
        "mismatch_kl_sum": 1.0,
    }
    second = {
        "num_tokens": 30,
        "loss": 3.0,
        "policy_loss": 0.25,
        "grad_norm": 2.0,
        "clip_low_tokens": 1,
        "entropy_sum": 40.0,
        "ratio_max": 1.25,
        "mismatch_ratio_max": 7.0,
        "mismatch_kl_sum": 3.0,
    }
    report = update_report([first, second])
    assert report["loss"] == 2.0
    assert report["policy_loss"] == 0.5
    assert report["grad_norm"] == 3.0
    assert report["clip_low_fraction"] == pytest.approx(0.1)
    assert report["entropy_mean"] == pytest.approx(1.5)
    assert report["ratio_max"] == 1.5
    assert report["mismatch_max_ratio"] == 7.0
    assert report["mismatch_kl"] == pytest.approx(0.1)
    assert report["num_loss_tokens"] == 40.0


def test_what_nothing_measured_is_absent() -> None:
    report = update_report([{"num_tokens": 2, "loss": 1.0, "grad_norm": 0.5}])
    assert report == {"num_loss_tokens": 2.0, "loss": 1.0, "grad_norm": 0.5}


def test_what_was_measured_as_zero_is_zero() -> None:
    report = update_report([{"num_tokens": 2, "loss": 1.0, "kl_loss": 0.0, "clip_low_tokens": 0}])
    assert report["kl_loss"] == report["clip_low_fraction"] == 0.0
    assert "dual_clip_fraction" not in report


def test_rows_are_means_over_the_rows_that_were_compared() -> None:
    step = {
        "num_tokens": 20,
        "loss": 2.0,
        "num_rows": 4.0,
        "divergence_sum": 2.0,
        "distill_loss": 0.5,
        "teacher_entropy_sum": 6.0,
        "teacher_tail_mass_sum": 1.0,
    }
    report = update_report([step, step])
    assert report["divergence_mean"] == 0.5
    assert report["teacher_entropy_mean"] == 1.5
    assert report["teacher_tail_mass_mean"] == 0.25
    assert report["distill_loss"] == 0.5
    assert "teacher_tail_mass_mean" not in update_report([{"num_tokens": 2, "loss": 1.0}])
