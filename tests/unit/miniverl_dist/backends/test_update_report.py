"""The metrics of an update, out of those of its optimizer steps."""

from __future__ import annotations

import pytest

from miniverl_dist.backends.update_report import PER_STEP, REPORTED, update_report


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


def test_what_a_loss_does_not_have_is_zero() -> None:
    report = update_report([{"num_tokens": 2, "loss": 1.0}])
    assert report.keys() == {*REPORTED, *PER_STEP, "num_loss_tokens"}
    assert report["dual_clip_fraction"] == report["kl_loss"] == 0.0
