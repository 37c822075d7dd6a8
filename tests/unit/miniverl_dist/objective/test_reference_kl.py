"""KL to the reference: expected gradients, enumerated over a softmax of four tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from miniverl_dist.config.recipe import LossConfig
from miniverl_dist.objective.divergence import k1, k3
from miniverl_dist.objective.policy_loss import policy_loss, reference_kl_penalty
from miniverl_dist.objective.reduction import Denominators

KINDS = ("ppo", "gspo_token", "cispo")


@dataclass(frozen=True)
class Softmaxes:
    """Logits of the policy and of those it is compared with, [V = 4]."""

    policy: Tensor
    proximal: Tensor
    rollout: Tensor
    reference: Tensor

    @classmethod
    def draw(cls, seed: int, *, on_policy: bool) -> Softmaxes:
        generator = torch.Generator().manual_seed(seed)
        policy, proximal, rollout, reference = torch.randn(
            4, 4, generator=generator, dtype=torch.float64
        )
        if on_policy:
            proximal = rollout = policy
        return cls(policy.requires_grad_(), proximal.detach(), rollout.detach(), reference)

    def true_gradient(self, *, forward: bool = False) -> Tensor:
        """Gradient of KL(policy || reference), or of KL(reference || policy), by the logits."""
        policy = self.policy.log_softmax(0)
        reference = self.reference.log_softmax(0)
        kl = (
            (reference.exp() * (reference - policy)).sum()
            if forward
            else (policy.exp() * (policy - reference)).sum()
        )
        return torch.autograd.grad(kl, self.policy)[0]

    def expected_gradient(self, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean over sampled tokens, drawn from the rollout policy, of a loss's gradient.

        ``loss_of`` takes the [V] policy log-probabilities and gives one loss per sampled token.
        """
        losses = loss_of(self.policy.log_softmax(0))
        mean = (self.rollout.softmax(0) * losses).sum()
        return torch.autograd.grad(mean, self.policy)[0]

    def policy_losses(self, policy: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
        """[V] the product's loss of each token as a batch of its own."""

        def one(token: int) -> Tensor:
            at = slice(token, token + 1)
            return policy_loss(
                policy[at],
                proximal_logprobs=self.proximal.log_softmax(0)[at],
                rollout_logprobs=self.rollout.log_softmax(0)[at],
                advantages=advantages[at],
                mask=torch.ones(1, dtype=torch.bool),
                sequence_ids=torch.zeros(1, dtype=torch.int64),
                config=config,
                denominators=Denominators(num_loss_tokens=1, num_sequences=1),
                reference_logprobs=self.reference.log_softmax(0)[at],
            )[0]

        return torch.stack([one(token) for token in range(len(policy))])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_policy", [True, False])
def test_peer_18_weighted_k3_has_the_gradient_of_the_kl(
    seed: int, kind: str, on_policy: bool
) -> None:
    softmaxes = Softmaxes.draw(seed, on_policy=on_policy)
    config = LossConfig(kind=kind, kl_coef=0.5, mismatch_cap=1e9)
    expected = softmaxes.expected_gradient(
        lambda policy: softmaxes.policy_losses(policy, torch.zeros(4), config)
    )
    _close(expected, 0.5 * softmaxes.true_gradient())


@pytest.mark.parametrize("seed", range(5))
def test_peer_18_k3_without_its_weight_follows_the_other_kl(seed: int) -> None:
    softmaxes = Softmaxes.draw(seed, on_policy=True)
    reference = softmaxes.reference.log_softmax(0)
    found = softmaxes.expected_gradient(lambda policy: k3(policy, reference))

    _close(found, softmaxes.true_gradient(forward=True))
    assert (found - softmaxes.true_gradient()).abs().max() > 0.01


@pytest.mark.parametrize("seed", range(5))
def test_peer_18_k1_as_a_loss_does_nothing(seed: int) -> None:
    softmaxes = Softmaxes.draw(seed, on_policy=True)
    reference = softmaxes.reference.log_softmax(0)
    found = softmaxes.expected_gradient(lambda policy: k1(policy, reference))

    _close(found, torch.zeros(4))
    assert softmaxes.true_gradient().abs().max() > 0.01


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_peer_18_k1_in_the_reward_has_the_gradient_of_the_kl(seed: int, kind: str) -> None:
    softmaxes = Softmaxes.draw(seed, on_policy=True)
    config = LossConfig(kind=kind, kl_coef=0.5, kl_estimator="k1_in_reward")
    advantages = reference_kl_penalty(
        torch.zeros(4, dtype=torch.float64),
        proximal_logprobs=softmaxes.proximal.log_softmax(0),
        reference_logprobs=softmaxes.reference.log_softmax(0),
        mask=torch.ones(4, dtype=torch.bool),
        kl_coef=0.5,
    )
    found = softmaxes.expected_gradient(
        lambda policy: softmaxes.policy_losses(policy, advantages, config)
    )
    _close(found, 0.5 * softmaxes.true_gradient())


def test_reference_kl_penalty_leaves_tokens_off_the_mask_alone() -> None:
    nan = float("nan")
    found = reference_kl_penalty(
        torch.tensor([1.0, 0.0, 2.0]),
        proximal_logprobs=torch.tensor([-1.0, nan, -2.0], dtype=torch.float64),
        reference_logprobs=torch.tensor([-1.5, nan, -1.0], dtype=torch.float64),
        mask=torch.tensor([True, False, True]),
        kl_coef=0.1,
    )
    torch.testing.assert_close(found, torch.tensor([0.95, 0.0, 2.1]))


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-9, atol=1e-11)
