"""The toy student's update: against a naive one, all or nothing, and resumed bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from miniverl_dist.backends import toy
from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.errors import (
    BatchError,
    TokenizerMismatchError,
    UpdateError,
)
from miniverl_dist.schemas.batch import SftBatch, TrainBatch
from miniverl_dist.schemas.weights import weights_checksum
from tests.support.toy import (
    VOCABULARY_IDS,
    random_batch,
    sft_batch,
    state_of,
    tiny_backend,
    tiny_config,
)

SMOOTH = OptimConfig(lr=0.5, eps=1.0, weight_decay=0.01)
"""A large eps makes a step nearly proportional to the gradient, so that weights of two
computations can be compared; with a small one rounding decides the sign of tiny gradients."""


def full_logprobs(model: ToyModel, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """[T - 1] nats of tokens 1 .. T - 1 of one sequence, the whole softmax at once."""
    logits = torch.nn.functional.linear(model.hidden(ids[None])[0, :-1], model.head) / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]


class NaiveStudent:
    """The same update from the formulas: one sequence at a time, no padding, torch's AdamW."""

    def __init__(self, loss: LossConfig, optim: OptimConfig) -> None:
        self.model = ToyModel(tiny_config(), VOCABULARY_IDS)
        self.reference = ToyModel(tiny_config(), VOCABULARY_IDS)
        self.loss = loss
        self.optim = optim
        weights = [w.requires_grad_() for w in self.model.weights.values()]
        matrices = [w for w in weights if w.dim() > 1]
        norms = [w for w in weights if w.dim() == 1]
        self.weights = weights
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": optim.weight_decay},
                {"params": norms, "weight_decay": 0.0},
            ],
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
        )

    def update(self, batch: TrainBatch) -> list[float]:
        spans = list(zip(batch.sequence_starts, batch.sequence_starts[1:], strict=False))
        rows = torch.from_numpy(self.model.vocabulary.rows(batch.token_ids))
        with torch.no_grad():
            proximal = [full_logprobs(self.model, rows[a:b], batch.temperature) for a, b in spans]
            reference = [
                full_logprobs(self.reference, rows[a:b], batch.temperature) for a, b in spans
            ]
        losses = []
        for minibatch in range(batch.num_minibatches):
            total = torch.zeros(())
            for index in np.flatnonzero(batch.minibatch_ids == minibatch):
                a, b = spans[index]
                mask = torch.from_numpy(batch.loss_mask[a + 1 : b])
                policy = full_logprobs(self.model, rows[a:b], batch.temperature)
                per_token = self._token_losses(
                    policy[mask],
                    proximal[index][mask],
                    torch.from_numpy(batch.rollout_logprobs[a + 1 : b]).float()[mask],
                    torch.from_numpy(batch.advantages[a + 1 : b]).float()[mask],
                    reference[index][mask],
                )
                if self.loss.reduction == "token_mean":
                    total = total + per_token.sum() / batch.num_loss_tokens[minibatch]
                else:
                    total = total + per_token.mean() / batch.num_sequences[minibatch]
            self.optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(self.weights, self.optim.grad_clip)
            self.optimizer.step()
            losses.append(float(total.detach()))
        return losses

    def _token_losses(
        self,
        policy: torch.Tensor,
        proximal: torch.Tensor,
        rollout: torch.Tensor,
        advantage: torch.Tensor,
        reference: torch.Tensor,
    ) -> torch.Tensor:
        ratio = (policy - proximal).exp()
        clipped = ratio.clamp(1 - self.loss.clip_low, 1 + self.loss.clip_high)
        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
        assert self.loss.dual_clip is not None
        floor = torch.maximum(surrogate, self.loss.dual_clip * advantage)
        surrogate = torch.where(advantage < 0, floor, surrogate)
        gap = reference - policy
        kl = self.loss.kl_coef * ratio * (gap.exp() - gap - 1)
        assert self.loss.mismatch_cap is not None
        return (proximal - rollout).exp().clamp(max=self.loss.mismatch_cap) * (kl - surrogate)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("reduction", ["token_mean", "trajectory_mean"])
def test_two_minibatched_updates_equal_the_naive_ones(temperature: float, reduction: str) -> None:
    loss = LossConfig.model_validate(
        {"reduction": reduction, "kl_coef": 0.3, "clip_low": 0.02, "clip_high": 0.03}
    )
    backend, naive = tiny_backend(loss=loss, optim=SMOOTH), NaiveStudent(loss, SMOOTH)
    for seed in (1, 2):
        batch = random_batch(seed, num_minibatches=3, temperature=temperature)
        result = backend.update(batch)
        assert result.metrics["loss"] == pytest.approx(np.mean(naive.update(batch)), rel=1e-4)
    assert result.metrics["clip_high_fraction"] > 0  # else the clipping would go untested
    for name, array in backend.model.arrays().items():
        expected = naive.model.weights[name].detach().numpy()
        np.testing.assert_allclose(array, expected, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("max_padded_tokens", [1, 70, 10**6])
@pytest.mark.parametrize("kind", ["ppo", "gspo_token", "cispo"])
def test_microbatches_and_order_change_neither_loss_nor_step(
    kind: str, max_padded_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = LossConfig.model_validate({"kind": kind, "reduction": "trajectory_mean"})
    first = tiny_backend(loss=loss, optim=SMOOTH)
    expected = first.update(random_batch(3, num_minibatches=2))
    monkeypatch.setattr(toy, "MAX_PADDED_TOKENS", max_padded_tokens)
    second = tiny_backend(loss=loss, optim=SMOOTH)
    found = second.update(reordered(random_batch(3, num_minibatches=2), [4, 1, 5, 0, 3, 2]))
    for name, value in expected.metrics.items():
        if name != "seconds_update":
            assert found.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for name, array in first.model.arrays().items():
        np.testing.assert_allclose(second.model.arrays()[name], array, atol=1e-5, err_msg=name)


def reordered(batch: TrainBatch, order: list[int]) -> TrainBatch:
    starts = batch.sequence_starts
    tokens = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in order])
    return replace(
        batch,
        token_ids=batch.token_ids[tokens],
        sequence_starts=np.concatenate([[0], np.cumsum(np.diff(starts)[order])]),
        loss_mask=batch.loss_mask[tokens],
        advantages=batch.advantages[tokens],
        rollout_logprobs=batch.rollout_logprobs[tokens],
        group_ids=tuple(batch.group_ids[s] for s in order),
        minibatch_ids=batch.minibatch_ids[order],
    )


def test_metrics_of_a_first_step_are_what_they_must_be() -> None:
    backend = tiny_backend(loss=LossConfig(kl_coef=0.5), optim=OptimConfig(lr=0.25))
    batch = random_batch(4)
    logprobs = backend.logprobs(batch)
    result = backend.update(batch)
    mask, metrics = batch.loss_mask, result.metrics
    weight = np.minimum(np.exp(logprobs[mask] - batch.rollout_logprobs[mask]), 2)
    assert metrics["ratio_max"] == 1.0
    assert metrics["clip_low_fraction"] == metrics["clip_high_fraction"] == 0
    assert metrics["kl_loss"] == 0
    assert metrics["policy_loss"] == pytest.approx(-(weight * batch.advantages[mask]).mean())
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"])
    gap = np.abs(logprobs[mask] - batch.rollout_logprobs[mask]).mean()
    assert metrics["mismatch_mean_abs"] == pytest.approx(gap, rel=1e-5)
    delta = logprobs[mask] - batch.rollout_logprobs[mask]
    assert metrics["mismatch_max_ratio"] == pytest.approx(np.exp(np.abs(delta).max()), rel=1e-5)
    assert metrics["mismatch_kl"] == pytest.approx((np.expm1(delta) - delta).mean(), rel=1e-5)
    assert metrics["mismatch_capped_fraction"] == pytest.approx((weight == 2).mean())
    assert 0 < metrics["entropy_mean"] < np.log(len(VOCABULARY_IDS))
    assert metrics["num_loss_tokens"] == mask.sum()
    assert metrics["lr"] == 0.25
    assert metrics["grad_norm"] > 0
    assert metrics["seconds_update"] > 0


def test_logprobs_cover_every_token_but_the_first() -> None:
    backend, batch = tiny_backend(), random_batch(5, temperature=0.6)
    found = backend.logprobs(batch)
    rows = torch.from_numpy(backend.model.vocabulary.rows(batch.token_ids))
    for a, b in zip(batch.sequence_starts, batch.sequence_starts[1:], strict=False):
        assert np.isnan(found[a])
        with torch.no_grad():
            expected = full_logprobs(backend.model, rows[a:b], 0.6)
        np.testing.assert_allclose(found[a + 1 : b], expected.numpy(), atol=1e-5)


def test_versions_count_optimizer_steps_and_updates_count_batches() -> None:
    backend = tiny_backend()
    first = backend.update(random_batch(6, num_minibatches=3))
    second = backend.update(random_batch(7))
    assert (first.num_optimizer_steps, first.policy_version) == (3, 3)
    assert (second.num_optimizer_steps, second.policy_version) == (1, 4)
    assert backend.num_updates == 2


def test_the_learning_rate_follows_the_schedule() -> None:
    optim = OptimConfig(lr=0.1, warmup_steps=1, schedule="linear")
    backend = tiny_backend(optim=optim, num_steps=3)
    rates = [backend.update(random_batch(s, num_minibatches=2)).metrics["lr"] for s in range(3)]
    assert rates == pytest.approx([0.1, 0.1, 0.05])


def test_a_minibatch_without_a_token_to_train_on_is_no_optimizer_step() -> None:
    batch = random_batch(8, num_minibatches=3)
    of_token = np.repeat(batch.minibatch_ids, np.diff(batch.sequence_starts))
    mask = batch.loss_mask & (of_token != 1)
    emptied = replace(
        batch,
        loss_mask=mask,
        advantages=np.where(mask, batch.advantages, 0),
        rollout_logprobs=np.where(mask, batch.rollout_logprobs, np.nan),
        num_loss_tokens=(batch.num_loss_tokens[0], 0, batch.num_loss_tokens[2]),
    )
    assert tiny_backend().update(emptied).num_optimizer_steps == 2


def test_a_batch_without_a_token_to_train_on_is_refused() -> None:
    batch = random_batch(9)
    nothing = np.zeros_like(batch.loss_mask)
    empty = replace(
        batch,
        loss_mask=nothing,
        advantages=np.zeros(len(nothing)),
        rollout_logprobs=np.full(len(nothing), np.nan),
    )
    with pytest.raises(BatchError, match="none of the batch's 6 sequences"):
        tiny_backend().update(empty)


def spoilt(batch: TrainBatch, minibatch: int) -> TrainBatch:
    """An advantage that float32 cannot hold, in one minibatch only."""
    of_token = np.repeat(batch.minibatch_ids, np.diff(batch.sequence_starts))
    where = np.flatnonzero(batch.loss_mask & (of_token == minibatch))[0]
    advantages = batch.advantages.copy()
    advantages[where] = 1e300
    return replace(batch, advantages=advantages)


def test_a_loss_that_is_not_finite_undoes_the_steps_before_it(tmp_path: Path) -> None:
    backend = tiny_backend()
    backend.update(random_batch(10))
    before = state_of(backend, tmp_path / "before")
    with pytest.raises(UpdateError, match=r"loss is -?inf"):
        backend.update(spoilt(random_batch(11, num_minibatches=3), 2))
    assert state_of(backend, tmp_path / "after") == before
    # And the failed try left nothing behind that a later update would meet, such as gradients.
    undisturbed = tiny_backend()
    for seed in (10, 12):
        undisturbed.update(random_batch(seed))
    backend.update(random_batch(12))
    assert state_of(backend, tmp_path / "b") == state_of(undisturbed, tmp_path / "u")


def test_any_other_error_half_way_undoes_the_update_too(tmp_path: Path) -> None:
    backend = tiny_backend()
    before = state_of(backend, tmp_path / "before")
    batch = random_batch(13, num_minibatches=2)
    with pytest.raises(BatchError, match="num_loss_tokens is 0"):
        backend.update(replace(batch, num_loss_tokens=(batch.num_loss_tokens[0], 0)))
    assert state_of(backend, tmp_path / "after") == before


def test_foreign_ids_and_long_sequences_change_nothing(tmp_path: Path) -> None:
    backend = tiny_backend()
    before = state_of(backend, tmp_path / "before")
    batch = random_batch(14)
    with pytest.raises(TokenizerMismatchError, match="at position 0 is not among the 53 ids"):
        backend.update(replace(batch, token_ids=batch.token_ids + 1))
    with pytest.raises(BatchError, match="151 tokens exceeds max_context_tokens 150"):
        backend.update(random_batch(15, lengths=(20, 151)))
    assert state_of(backend, tmp_path / "after") == before


def test_the_reference_is_the_policy_at_the_end_of_the_warmup() -> None:
    loss = LossConfig(kl_coef=0.2)
    backend = tiny_backend(loss=loss)
    for seed in (31, 32):
        backend.sft_update(sft_batch(seed), 5e-3)
    assert backend.update(random_batch(33)).metrics["kl_loss"] > 1e-4
    fresh = tiny_backend(loss=loss)
    for seed in (31, 32):
        fresh.sft_update(sft_batch(seed), 5e-3)
    fresh.finish_warmup()
    assert fresh.update(random_batch(33)).metrics["kl_loss"] == 0


def test_kl_in_the_reward_lowers_what_has_drifted_up() -> None:
    """k1 in the reward equals the plain loss with advantages lowered by hand."""
    loss = LossConfig(kl_coef=0.4, kl_estimator="k1_in_reward")
    backend, plain = tiny_backend(loss=loss, optim=SMOOTH), tiny_backend(optim=SMOOTH)
    drift = {n: a * np.float32(1.1) for n, a in backend.model.arrays().items()}
    batch = random_batch(34)
    reference = backend.logprobs(batch)
    for student in (backend, plain):
        student.load_weights(drift)
    gap = np.where(batch.loss_mask, backend.logprobs(batch) - reference, 0)
    assert np.abs(gap).max() > 0.1
    backend.update(batch)
    plain.update(replace(batch, advantages=batch.advantages - 0.4 * gap))
    for name, array in plain.model.arrays().items():
        np.testing.assert_allclose(backend.model.arrays()[name], array, atol=1e-6, err_msg=name)


def test_warmup_learns_and_counts_no_version() -> None:
    backend, batch = tiny_backend(), sft_batch(35)
    logprobs = backend.logprobs(random_batch(35))
    losses = [backend.sft_update(batch, 1e-2)["loss"] for _ in range(30)]
    assert losses[0] == pytest.approx(-logprobs[batch.loss_mask].mean(), rel=1e-5)
    assert losses[-1] < losses[0] / 2
    assert (backend.policy_version, backend.num_updates) == (0, 0)


def test_warmup_gradients_equal_the_naive_ones() -> None:
    backend, batch = tiny_backend(optim=SMOOTH), random_batch(36)
    naive = NaiveStudent(LossConfig(), SMOOTH)
    rows = torch.from_numpy(naive.model.vocabulary.rows(batch.token_ids))
    chosen = [
        full_logprobs(naive.model, rows[a:b], 1.0)[torch.from_numpy(batch.loss_mask[a + 1 : b])]
        for a, b in zip(batch.sequence_starts, batch.sequence_starts[1:], strict=False)
    ]
    torch.cat(chosen).mean().neg().backward()
    torch.nn.utils.clip_grad_norm_(naive.weights, 1.0)
    naive.optimizer.step()
    backend.sft_update(SftBatch(batch.token_ids, batch.sequence_starts, batch.loss_mask), SMOOTH.lr)
    for name, array in backend.model.arrays().items():
        expected = naive.model.weights[name].detach().numpy()
        np.testing.assert_allclose(array, expected, atol=2e-6, err_msg=name)


def test_the_end_of_the_warmup_forgets_its_optimizer_state() -> None:
    warmed = tiny_backend()
    warmed.sft_update(sft_batch(37), 5e-3)
    warmed.finish_warmup()
    cold = tiny_backend(seed=1)
    cold.load_weights(warmed.model.arrays())
    for backend in (warmed, cold):
        backend.update(random_batch(38))
    assert weights_checksum(warmed.model.arrays()) == weights_checksum(cold.model.arrays())


def test_a_supervised_batch_without_targets_is_refused() -> None:
    batch = sft_batch(39)
    with pytest.raises(BatchError, match="without a token to learn from"):
        tiny_backend().sft_update(replace(batch, loss_mask=np.zeros_like(batch.loss_mask)), 1e-3)


def test_a_supervised_step_with_a_broken_gradient_changes_nothing(tmp_path: Path) -> None:
    backend = tiny_backend()
    before = state_of(backend, tmp_path / "before")
    weights = backend.model.arrays()
    backend.load_weights(weights | {"final_norm": np.full(24, np.inf, dtype=np.float32)})
    with pytest.raises(UpdateError, match="loss is nan"):
        backend.sft_update(sft_batch(40), 1e-3)
    backend.load_weights(weights)
    assert state_of(backend, tmp_path / "after") == before


def test_a_snapshot_is_a_copy_under_its_version() -> None:
    backend = tiny_backend()
    backend.update(random_batch(41))
    snapshot = backend.snapshot()
    assert snapshot.policy_version == 1
    assert snapshot.checksum == weights_checksum(snapshot.tensors)
    backend.update(random_batch(42))
    assert snapshot.checksum == weights_checksum(snapshot.tensors)
    assert snapshot.checksum != backend.snapshot().checksum
    backend.load_weights(snapshot.tensors)
    assert backend.snapshot().checksum == snapshot.checksum
