"""What a step reports of a policy loss: only what some part of its loss has measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from miniverl_dist.backends.policy_step import Scored, StepArrays, denominators_of, policy_term
from miniverl_dist.config.recipe import LossConfig
from tests.support.toy import random_batch

BOUNDS = {"policy_loss", "clip_low_tokens", "clip_high_tokens", "dual_clip_tokens"}
CAPPED = "mismatch_capped_tokens"
DISTANCES = {"ratio_max", "mismatch_abs_sum", "mismatch_ratio_max", "mismatch_kl_sum"}


def told(config: LossConfig, *, has_policy_term: bool) -> set[str]:
    """Names of the metrics of one microbatch."""
    batch = replace(random_batch(1), has_policy_term=has_policy_term)
    places = np.flatnonzero(batch.loss_mask)
    logprobs = torch.full((len(places),), -1.0, requires_grad=True)
    sequences = np.searchsorted(batch.sequence_starts, places, side="right") - 1
    scored = Scored(places, torch.from_numpy(sequences), logprobs, torch.ones(len(places)))
    reference = batch.rollout_logprobs if config.kl_coef > 0 else None
    arrays = StepArrays(batch.token_ids, batch.rollout_logprobs, reference, batch.advantages)
    return set(policy_term(scored, arrays, batch, config, denominators_of(batch, 0))[1])


@pytest.mark.parametrize(
    ("kl_coef", "has_policy_term", "absent"),
    [
        (0.0, True, set()),
        (0.1, True, set()),
        (0.0, False, BOUNDS | {CAPPED}),
        (0.1, False, BOUNDS),  # the mismatch weight is the KL's as well
    ],
)
def test_what_bounds_nothing_is_absent(
    kl_coef: float, has_policy_term: bool, absent: set[str]
) -> None:
    names = told(LossConfig(kl_coef=kl_coef), has_policy_term=has_policy_term)
    assert (BOUNDS | {CAPPED}) - names == absent
    assert names >= DISTANCES | {"entropy_sum"}  # how far two policies are apart is no bound
    assert ("kl_loss" in names) == (kl_coef > 0)
