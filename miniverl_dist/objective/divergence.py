"""Estimators of a KL divergence from the log-probabilities of sampled tokens alone.

Shape: N tokens, drawn from the policy. Both estimate KL(policy || reference) per token; what may be
done with them differs: see each one's note on its gradient.
"""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Nats. Log-ratios are cut here before ``exp`` so that no float32 overflows; e^20 is far beyond
every clip range."""


def k1(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[N] nats: unbiased, of either sign, with a large variance.

    Only a value: it may lower an advantage. As a loss its expected gradient is zero, since the
    policy's score has mean zero whatever the reference says.
    """
    return policy_logprobs - reference_logprobs


def k3(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[N] nats, never negative: ``r - 1 - log r`` with ``r = reference / policy``.

    An unbiased value. Its own gradient is that of the *forward* KL(reference || policy): as a loss
    it needs the importance weight policy / sampler in front, differentiated too.

    The log-ratio is cut at ``MAX_LOG_RATIO`` as a whole. Cutting only the exponential would leave
    the linear term alone and turn the gradient around.

    Source:
        J. Schulman, "Approximating KL divergence" (2020).
    """
    log_ratio = (reference_logprobs - policy_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio
