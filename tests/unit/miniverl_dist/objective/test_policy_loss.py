"""Policy loss against its oracle, its invariances, and the bugs that peers had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from miniverl_dist.config.recipe import LossConfig
from miniverl_dist.errors import BatchError
from miniverl_dist.objective.divergence import k3
from miniverl_dist.objective.policy_loss import (
    Metrics,
    merge_metrics,
    policy_loss,
    summarize,
)
from miniverl_dist.objective.reduction import Denominators, tokens_per_sequence
from miniverl_dist.observability.metrics import METRICS
from tests.reference.policy_loss import OracleToken, slow_policy_loss

KINDS = ("ppo", "gspo_token", "cispo")
ON_MASK = ("policy", "proximal", "rollout", "advantages", "reference")


@dataclass(frozen=True)
class Case:
    """Tokens of a few sequences, some of them off the mask."""

    policy: Tensor
    proximal: Tensor
    rollout: Tensor
    advantages: Tensor
    reference: Tensor
    mask: Tensor
    sequence_ids: Tensor
    config: LossConfig

    @property
    def denominators(self) -> Denominators:
        lengths = tokens_per_sequence(self.mask, self.sequence_ids)
        return Denominators(
            num_loss_tokens=float(lengths.sum()),
            num_sequences=float((lengths > 0).sum()),
            sequence_lengths=lengths,
        )

    def select(self, chosen: Tensor) -> Case:
        arrays = {name: getattr(self, name)[chosen] for name in (*ON_MASK, "mask", "sequence_ids")}
        return replace(self, **arrays)

    def loss(self, denominators: Denominators | None = None) -> tuple[Tensor, Tensor, Metrics]:
        """Loss, gradient by the policy's log-probabilities, metrics."""
        leaf = self.policy.clone().requires_grad_()
        loss, metrics = policy_loss(
            leaf,
            proximal_logprobs=self.proximal,
            rollout_logprobs=self.rollout,
            advantages=self.advantages,
            mask=self.mask,
            sequence_ids=self.sequence_ids,
            config=self.config,
            denominators=denominators or self.denominators,
            reference_logprobs=self.reference,
        )
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient, metrics


@st.composite
def configs(draw: st.DrawFn, kinds: Sequence[str] = KINDS) -> LossConfig:
    return LossConfig(
        kind=draw(st.sampled_from(kinds)),
        clip_low=draw(st.floats(0.01, 1.0)),
        clip_high=draw(st.floats(0.01, 1.5)),
        dual_clip=draw(st.none() | st.floats(2.51, 5)),
        mismatch_cap=draw(st.none() | st.floats(0.5, 3)),
        reduction=draw(st.sampled_from(("token_mean", "trajectory_mean"))),
        kl_coef=draw(st.sampled_from((0.0, 0.02, 1.0))),
        kl_estimator=draw(st.sampled_from(("k3", "k1_in_reward"))),
    )


@st.composite
def cases(draw: st.DrawFn, kinds: Sequence[str] = KINDS) -> Case:
    size = draw(st.integers(1, 12))
    policy = _floats(draw, size, -4, 0)
    proximal = policy + _floats(draw, size, -1.5, 1.5)
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    mask[draw(st.integers(0, size - 1))] = True
    return Case(
        policy=policy,
        proximal=proximal,
        rollout=proximal + _floats(draw, size, -1.5, 1.5),
        advantages=_floats(draw, size, -3, 3),
        reference=policy + _floats(draw, size, -1.5, 1.5),
        mask=mask,
        sequence_ids=torch.tensor(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))),
        config=draw(configs(kinds)),
    )


def _floats(draw: st.DrawFn, size: int, low: float, high: float) -> Tensor:
    """Rounded: among the smallest floats, products cannot tell a ratio from its bound."""
    numbers = st.floats(low, high).map(lambda value: round(value, 6))
    return torch.tensor(draw(st.lists(numbers, min_size=size, max_size=size)), dtype=torch.float64)


def _tokens(case: Case) -> list[OracleToken]:
    rows = zip(
        case.sequence_ids.tolist(),
        *(getattr(case, name).tolist() for name in ON_MASK),
        case.mask.tolist(),
        strict=True,
    )
    return [OracleToken(*row[:-1]) for row in rows if row[-1]]


def _close(found: Tensor | float, expected: Tensor | float | list[float]) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=1e-9,
        atol=1e-11,
    )


@settings(deadline=None, max_examples=300)
@given(cases())
def test_loss_gradient_and_metrics_equal_the_oracle(case: Case) -> None:
    expected = slow_policy_loss(
        _tokens(case),
        case.config,
        case.denominators.num_loss_tokens,
        case.denominators.num_sequences,
    )
    loss, gradient, metrics = case.loss()

    _close(loss, expected.loss)
    _close(gradient[case.mask], expected.gradients)
    assert not gradient[~case.mask].any()
    assert metrics["clip_low_tokens"] == expected.clip_low
    assert metrics["clip_high_tokens"] == expected.clip_high
    assert metrics.get("dual_clip_tokens", 0) == expected.dual_clip
    assert metrics.get("mismatch_capped_tokens", 0) == expected.capped
    assert metrics["num_tokens"] == case.mask.sum()
    _close(metrics["mismatch_abs_sum"], expected.mismatch_abs)
    _close(metrics["mismatch_kl_sum"], expected.mismatch_kl)
    _close(metrics["mismatch_ratio_max"], expected.mismatch_ratio)
    _close(metrics["reference_kl_sum"], expected.reference_kl)
    _close(metrics["ratio_max"], expected.ratio_max)
    _close(metrics["policy_loss"] + metrics.get("kl_loss", 0.0), loss)


@settings(deadline=None, max_examples=100)
@given(cases(), st.sampled_from((float("nan"), float("inf"), -float("inf"), 1e30)))
def test_nothing_off_the_mask_reaches_loss_gradient_or_metrics(case: Case, foreign: float) -> None:
    spoilt = replace(
        case,
        **{name: getattr(case, name).masked_fill(~case.mask, foreign) for name in ON_MASK},
    )
    clean_loss, clean_gradient, clean_metrics = case.loss()
    loss, gradient, metrics = spoilt.loss()

    assert torch.equal(loss, clean_loss)
    assert torch.equal(gradient, clean_gradient)
    assert metrics == clean_metrics


@settings(deadline=None, max_examples=100)
@given(cases(("ppo", "cispo")), st.data())
def test_any_split_into_calls_adds_up(case: Case, data: st.DataObject) -> None:
    calls = torch.tensor(
        data.draw(st.lists(st.integers(0, 2), min_size=len(case.mask), max_size=len(case.mask)))
    )
    _check_split(case, calls)


@settings(deadline=None, max_examples=100)
@given(cases(), st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_any_split_by_sequences_adds_up(case: Case, call_of_sequence: list[int]) -> None:
    _check_split(case, torch.tensor(call_of_sequence)[case.sequence_ids])


def _check_split(case: Case, calls: Tensor) -> None:
    loss, gradient, metrics = case.loss()
    parts = [case.select(calls == call).loss(case.denominators) for call in range(3)]

    _close(sum(part[0] for part in parts), loss)
    for call, part in enumerate(parts):
        _close(part[1], gradient[calls == call])
    merged = merge_metrics(*(part[2] for part in parts))
    assert merged.keys() == metrics.keys()
    for name, value in metrics.items():
        _close(merged[name], value)


@settings(deadline=None, max_examples=100)
@given(cases(), st.integers(0, 1000))
def test_packing_order_changes_nothing(case: Case, seed: int) -> None:
    order = torch.randperm(len(case.mask), generator=torch.Generator().manual_seed(seed))
    permuted = case.select(order)
    permuted = replace(permuted, sequence_ids=3 - permuted.sequence_ids)
    loss, gradient, _ = case.loss()
    other_loss, other_gradient, _ = permuted.loss()

    _close(other_loss, loss)
    _close(other_gradient, gradient[order])


def test_gradient_is_the_derivative_of_the_loss() -> None:
    torch.manual_seed(0)
    case = _random_case(LossConfig(kl_coef=0.5, clip_low=0.3, clip_high=0.3), size=20)

    def loss_of(policy: Tensor) -> Tensor:
        return policy_loss(
            policy,
            proximal_logprobs=case.proximal,
            rollout_logprobs=case.rollout,
            advantages=case.advantages,
            mask=case.mask,
            sequence_ids=case.sequence_ids,
            config=case.config,
            denominators=case.denominators,
            reference_logprobs=case.reference,
        )[0]

    assert torch.autograd.gradcheck(loss_of, (case.policy.clone().requires_grad_(),))


def _random_case(config: LossConfig, size: int = 12) -> Case:
    policy = -3 * torch.rand(size, dtype=torch.float64)

    def near(spread: float = 0.5) -> Tensor:
        return policy + spread * torch.randn(size, dtype=torch.float64)

    return Case(
        policy=policy,
        proximal=near(),
        rollout=near(),
        advantages=torch.randn(size, dtype=torch.float64),
        reference=near(),
        mask=torch.rand(size) < 0.7,
        sequence_ids=torch.arange(size) % 3,
        config=config,
    )


@settings(deadline=None, max_examples=200)
@given(cases(), st.floats(0.1, 1000))
def test_peer_11_no_clip_turns_the_gradient_around(case: Case, stretch: float) -> None:
    config = case.config.model_copy(update={"kl_coef": 0.0})
    far = replace(
        case, config=config, proximal=case.policy + stretch * (case.proximal - case.policy)
    )
    _, gradient, _ = far.loss()

    assert torch.isfinite(gradient).all()
    # Descent raises the log-probability exactly where the advantage is positive, or not at all.
    assert (gradient * far.advantages <= 0).all()


@pytest.mark.parametrize("log_ratio", [-500.0, -30.0, -1.0, 1.0, 30.0, 500.0])
def test_peer_11_no_clip_turns_the_reference_kl_around(log_ratio: float) -> None:
    policy = torch.tensor([-600.0], dtype=torch.float32, requires_grad=True)
    value = k3(policy, policy.detach() + log_ratio)
    (gradient,) = torch.autograd.grad(value.sum(), policy)

    assert torch.isfinite(value).all()
    assert value > 0
    # Where the reference is likelier, descent may only raise the policy, and the other way round.
    assert gradient * log_ratio <= 0


def test_peer_39_stale_tokens_are_bounded() -> None:
    """Rollouts many versions old: no token weighs more than cap * bound * |advantage|."""
    advantages = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    gap = torch.linspace(-60, 60, 8, dtype=torch.float64)
    ppo, cispo = LossConfig(kind="ppo"), LossConfig(kind="cispo")
    assert ppo.dual_clip is not None
    assert ppo.mismatch_cap is not None
    for config, bound in ((ppo, ppo.dual_clip), (cispo, 1 + cispo.clip_high)):
        for policy, proximal, rollout in ((gap, 0 * gap, -gap), (gap, -gap, 0 * gap)):
            _, gradient, _ = Case(
                policy=policy,
                proximal=proximal,
                rollout=rollout,
                advantages=advantages,
                reference=policy,
                mask=torch.ones(8, dtype=torch.bool),
                sequence_ids=torch.zeros(8, dtype=torch.int64),
                config=config,
            ).loss(Denominators(num_loss_tokens=1, num_sequences=1))
            assert gradient.abs().max() <= ppo.mismatch_cap * bound


def test_numpy_precision_of_the_batch_does_not_widen_the_loss() -> None:
    case = _random_case(LossConfig(kl_coef=0.1))
    loss, gradient, _ = replace(case, policy=case.policy.to(torch.float32)).loss()
    assert loss.dtype == gradient.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["token_mean", "trajectory_mean"])
def test_an_empty_call_gives_zero_and_still_runs_backward(kind: str, reduction: str) -> None:
    case = _random_case(LossConfig(kind=kind, reduction=reduction, kl_coef=0.1))
    empty = case.select(torch.zeros(len(case.mask), dtype=torch.bool))
    loss, gradient, metrics = empty.loss(case.denominators)
    assert loss == 0
    assert gradient.shape == (0,)
    assert metrics["num_tokens"] == 0
    assert summarize(metrics)["clip_low_fraction"] == 0


def test_a_call_without_a_loss_token_gives_zero() -> None:
    case = _random_case(LossConfig())
    loss, gradient, metrics = replace(case, mask=torch.zeros_like(case.mask)).loss(
        case.denominators
    )
    assert loss == 0
    assert not gradient.any()
    assert metrics["ratio_max"] == 0


def test_a_kl_loss_without_a_reference_is_refused() -> None:
    case = _random_case(LossConfig(kl_coef=0.1))
    with pytest.raises(BatchError, match="reference_logprobs is None"):
        policy_loss(
            case.policy,
            proximal_logprobs=case.proximal,
            rollout_logprobs=case.rollout,
            advantages=case.advantages,
            mask=case.mask,
            sequence_ids=case.sequence_ids,
            config=case.config,
            denominators=case.denominators,
        )


@pytest.mark.parametrize("name", [*ON_MASK, "sequence_ids"])
def test_arrays_of_another_length_are_refused(name: str) -> None:
    case = _random_case(LossConfig())
    denominators = case.denominators
    with pytest.raises(BatchError, match=f"{name} has shape"):
        replace(case, **{name: getattr(case, name)[:1]}).loss(denominators)


def test_summary_divides_sums_by_the_tokens_and_uses_declared_names() -> None:
    report = summarize(
        {
            "num_tokens": torch.tensor(4),
            "clip_low_tokens": torch.tensor(1),
            "clip_high_tokens": torch.tensor(2),
            "dual_clip_tokens": 3.0,
            "mismatch_capped_tokens": 4.0,
            "mismatch_abs_sum": 2.0,
            "mismatch_kl_sum": 1.0,
            "mismatch_ratio_max": 3.0,
            "entropy_sum": 6.0,
            "ratio_max": torch.tensor(1.5),
            "policy_loss": torch.tensor(-0.25),
        }
    )
    assert report == {
        "clip_low_fraction": 0.25,
        "clip_high_fraction": 0.5,
        "dual_clip_fraction": 0.75,
        "mismatch_capped_fraction": 1.0,
        "mismatch_mean_abs": 0.5,
        "mismatch_kl": 0.25,
        "mismatch_max_ratio": 3.0,
        "entropy_mean": 1.5,
        "ratio_max": 1.5,
        "policy_loss": -0.25,
    }
    assert report.keys() <= METRICS.keys()
