"""The hf student against transformers' own logits and a plain loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miniverl_dist.backends.hf import HFBackend
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.errors import (
    BatchError,
    StudentLostError,
    TokenizerMismatchError,
    UpdateError,
)
from miniverl_dist.schemas.batch import TrainBatch
from miniverl_dist.schemas.weights import weights_checksum
from tests.reference.plain_student import PlainStudent
from tests.support.hf_student import (
    FAMILIES,
    NUM_IDS,
    SMOOTH,
    full_logprobs,
    hf_batch,
    hf_sft_batch,
    hf_student,
    lora,
    plain_student,
    sequences,
    student_state,
)
from tests.support.parts import parts_of

KINDS = ("full", "lora")
HEADS = [("qwen3", True), ("llama", False), ("gpt2", True), ("gpt2", False)]
KL = LossConfig(kl_coef=0.3, clip_low=0.02, clip_high=0.03)


def made(kind: str, family: str = "qwen3", **changes: Any) -> HFBackend:
    adapter = lora(family) if kind == "lora" else None
    return hf_student(family, **{"optim": SMOOTH, "lora": adapter} | changes)


def moved(kind: str, **changes: Any) -> HFBackend:
    """A student that is no longer its reference, nor its folder's model."""
    backend = made(kind, **changes)
    backend.update(hf_batch(99))
    return backend


def plain(backend: HFBackend, loss: LossConfig, family: str, *, tied: bool) -> PlainStudent:
    adapters = backend.student.adapters
    return PlainStudent(
        plain_student(family, tied=tied),
        NUM_IDS,
        loss,
        SMOOTH,
        None if adapters is None else adapters.factors("actor"),
        0.0 if adapters is None else adapters.scale,
        transposed=family == "gpt2",
    )


def trained(backend: HFBackend) -> dict[str, np.ndarray[Any, Any]]:
    return {n: w.detach().float().numpy().copy() for n, w in backend.student.trained.items()}


@pytest.mark.parametrize(("family", "tied"), HEADS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_whole_logits(
    family: str, tied: bool, temperature: float
) -> None:
    backend, batch = made("full", family, tied=tied), hf_batch(1, temperature=temperature)
    found = backend.logprobs(batch)
    model = plain_student(family, tied=tied)
    for span in sequences(batch):
        assert np.isnan(found[span.start])
        expected = full_logprobs(model, batch.token_ids[span], temperature).detach().numpy()
        np.testing.assert_allclose(found[span][1:], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "tied"), HEADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["token_mean", "trajectory_mean"])
def test_minibatched_updates_equal_those_of_a_plain_loop(
    family: str, tied: bool, kind: str, reduction: str
) -> None:
    loss = KL.model_copy(update={"reduction": reduction})
    backend = made(kind, family, tied=tied, loss=loss)
    naive = plain(backend, loss, family, tied=tied)
    before = trained(backend)
    for seed in (1, 2):
        batch = hf_batch(seed, num_minibatches=3, temperature=0.8)
        result = backend.update(batch)
        assert result.metrics["loss"] == pytest.approx(np.mean(naive.update(batch)), rel=1e-4)
    assert result.metrics["clip_high_fraction"] > 0  # else the clipping would go untested
    assert result.metrics["reference_kl_mean"] > 0
    after = trained(backend)
    assert set(after) == set(naive.trained)
    for name, array in after.items():
        expected = naive.trained[name].detach().numpy()
        np.testing.assert_allclose(array, expected, rtol=0, atol=2e-5, err_msg=name)
    assert max(np.abs(after[name] - before[name]).max() for name in after) > 1e-3
    assert (backend.policy_version, backend.num_updates) == (6, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_supervised_steps_equal_those_of_a_plain_loop(kind: str) -> None:
    backend = made(kind)
    naive = plain(backend, LossConfig(), "qwen3", tied=True)
    for seed in (3, 4):
        found = backend.sft_update(hf_sft_batch(seed), SMOOTH.lr)
        assert found["loss"] == pytest.approx(naive.sft_update(hf_batch(seed)), rel=1e-5)
    for name, array in trained(backend).items():
        expected = naive.trained[name].detach().numpy()
        np.testing.assert_allclose(array, expected, rtol=0, atol=2e-5, err_msg=name)
    assert (backend.policy_version, backend.num_updates) == (0, 0)


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


@pytest.mark.parametrize("max_microbatch_tokens", [1, 70, 10**6])
@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_padding_order_and_chunks_change_nothing(
    kind: str, max_microbatch_tokens: int
) -> None:
    loss = LossConfig(kind="gspo_token", reduction="trajectory_mean", kl_coef=0.1)
    first = made(kind, loss=loss)
    expected = first.update(hf_batch(3, num_minibatches=2))
    second = made(
        kind,
        loss=loss.model_copy(update={"chunk_size": 5}),
        max_microbatch_tokens=max_microbatch_tokens,
    )
    found = second.update(reordered(hf_batch(3, num_minibatches=2), [4, 1, 5, 0, 3, 2]))
    for name, value in expected.metrics.items():
        if name != "seconds_update":
            assert found.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for name, array in trained(first).items():
        np.testing.assert_allclose(trained(second)[name], array, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_parts_is_the_step_of_the_whole(kind: str, tmp_path: Path) -> None:
    whole, parted, other = (moved(kind, loss=KL) for _ in range(3))
    expected = whole.update(hf_batch(1)).metrics
    parts = parts_of(hf_batch(1), (2, 1, 3))
    results = []
    for backend, order in ((parted, (0, 1, 2)), (other, (2, 0, 1))):
        for place in order:
            backend.accumulate(parts[place], place)
        results.append(backend.commit_accumulated().metrics)
    for name in expected.keys() - {"seconds_update"}:
        assert results[0][name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    for name, array in trained(whole).items():
        np.testing.assert_allclose(trained(parted)[name], array, rtol=0, atol=1e-6, err_msg=name)
    assert student_state(parted, tmp_path / "a") == student_state(other, tmp_path / "b")


def broken(batch: TrainBatch, minibatch: int) -> TrainBatch:
    of_token = np.repeat(batch.minibatch_ids, np.diff(batch.sequence_starts))
    chosen = batch.loss_mask & (of_token == minibatch)
    return replace(batch, advantages=np.where(chosen, 1e300, batch.advantages))


FAILURES = [
    (lambda b: broken(b, 0), UpdateError, "loss is"),
    (lambda b: replace(b, token_ids=b.token_ids + NUM_IDS), TokenizerMismatchError, "no row"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("spoil", "error", "message"), FAILURES)
def test_an_update_that_fails_leaves_everything_as_it_was(
    kind: str, spoil: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    backend, other = moved(kind, loss=KL), moved(kind, loss=KL)
    before = student_state(backend, tmp_path / "before")
    with pytest.raises(error, match=message):
        backend.update(spoil(hf_batch(1)))
    assert student_state(backend, tmp_path / "after") == before
    for each in (backend, other):
        each.update(hf_batch(2))
    assert student_state(backend, tmp_path / "c") == student_state(other, tmp_path / "d")


def test_adapters_are_put_back_when_a_later_minibatch_fails(tmp_path: Path) -> None:
    backend = moved("lora", loss=KL)
    before = student_state(backend, tmp_path / "before")
    with pytest.raises(UpdateError, match="loss is") as found:
        backend.update(broken(hf_batch(1, num_minibatches=2), 1))
    assert not isinstance(found.value, StudentLostError)
    assert student_state(backend, tmp_path / "after") == before


def test_whole_weights_are_lost_when_a_later_minibatch_fails(tmp_path: Path) -> None:
    backend = moved("full", loss=KL)
    before = student_state(backend, tmp_path / "before")
    with pytest.raises(StudentLostError, match=r"1 optimizer step.* load the newest commit"):
        backend.update(broken(hf_batch(1, num_minibatches=2), 1))
    with pytest.raises(StudentLostError, match="cannot be used"):
        backend.snapshot()
    backend.load(tmp_path / "before", 1)
    assert student_state(backend, tmp_path / "after") == before
    backend.update(hf_batch(2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_that_fails_discards_all_parts(kind: str, tmp_path: Path) -> None:
    backend = moved(kind)
    before = student_state(backend, tmp_path / "before")
    first, second, _ = parts_of(hf_batch(1), (2, 1, 3))
    backend.accumulate(first, 0)
    with pytest.raises(UpdateError, match="in the middle of"):
        backend.update(hf_batch(1))
    with pytest.raises(UpdateError, match="loss is"):
        backend.accumulate(broken(second, 0), 1)
    with pytest.raises(BatchError, match="nothing has been accumulated"):
        backend.commit_accumulated()
    assert student_state(backend, tmp_path / "after") == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_takes_no_step(kind: str, tmp_path: Path) -> None:
    backend = moved(kind)
    before = student_state(backend, tmp_path / "before")
    batch = hf_batch(1)
    # Losses cancel, gradients do not.
    signs = np.where(batch.loss_mask, 3e37 * (-1.0) ** np.arange(len(batch.loss_mask)), 0.0)
    backend.accumulate(replace(batch, advantages=signs), 0)
    with pytest.raises(UpdateError, match=r"gradient norm is (inf|nan)"):
        backend.commit_accumulated()
    assert student_state(backend, tmp_path / "after") == before


def test_refusals() -> None:
    backend = made("full", max_context_tokens=40)
    with pytest.raises(BatchError, match="41 tokens exceeds max_context_tokens 40"):
        backend.update(hf_batch(1))
    empty = hf_sft_batch(1)
    with pytest.raises(BatchError, match="without a token to learn from"):
        backend.sft_update(replace(empty, loss_mask=np.zeros_like(empty.loss_mask)), 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_warmup_freezes_the_reference_and_forgets_its_moments(kind: str) -> None:
    warmed = made(kind, loss=KL)
    warmed.sft_update(hf_sft_batch(1), 0.5)
    drifted = warmed.update(hf_batch(2)).metrics["reference_kl_mean"]
    assert drifted > 0
    warmed.finish_warmup()
    metrics = warmed.update(hf_batch(2)).metrics
    assert metrics["reference_kl_mean"] == 0
    assert metrics["grad_norm"] > 0
    assert warmed._optimizer.num_steps == 1


def test_only_adapters_have_gradients_and_move() -> None:
    backend = made("lora", loss=KL)
    base = {n: w.detach().clone() for n, w in backend.student.model.weights.items()}
    reference = {n: f.detach().clone() for n, f in backend.student.reference.items()}
    backend.accumulate(hf_batch(1), 0)
    (gradients,) = backend._parts.gradients
    assert set(gradients) == set(backend.student.trained)
    assert all(name.endswith((".lora_A", ".lora_B")) for name in gradients)
    assert not any(w.requires_grad for w in backend.student.model.weights.values())
    assert all(w.grad is None for w in backend.student.model.weights.values())
    backend.commit_accumulated()
    for name, weight in backend.student.model.weights.items():
        assert torch.equal(weight, base[name]), name
    for name, factor in backend.student.reference.items():
        assert torch.equal(factor, reference[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_changes_nothing(family: str) -> None:
    batch = hf_batch(1)
    found = made("lora", family).logprobs(batch)
    np.testing.assert_array_equal(found, made("full", family).logprobs(batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_snapshot_is_the_student_to_any_engine(family: str) -> None:
    """Merged weights in the folder's own model say what the adapter's forward pass says."""
    backend, batch = moved("lora", family=family), hf_batch(1)
    snapshot = backend.snapshot()
    assert (snapshot.policy_version, snapshot.checksum) == (1, weights_checksum(snapshot.tensors))
    model = plain_student(family)
    untouched = {n: w.detach().clone() for n, w in model.named_parameters()}
    assert set(snapshot.tensors) == set(untouched)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(snapshot.tensors[name]))
    found = backend.logprobs(batch)
    for span in sequences(batch):
        expected = full_logprobs(model, batch.token_ids[span]).detach().numpy()
        np.testing.assert_allclose(found[span][1:], expected, rtol=0, atol=1e-5)
    gap = np.abs(found - made("full", family).logprobs(batch))
    assert np.nanmax(gap) > 1e-2  # the adapter has learned something


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_hold_the_snapshot(kind: str) -> None:
    backend = moved(kind)
    buckets = [dict(bucket) for bucket in backend.export(8000)]
    assert len(buckets) > 2
    found = {name: w.numpy() for bucket in buckets for name, w in bucket.items()}
    assert sum(map(len, buckets)) == len(found)
    assert weights_checksum(found) == backend.snapshot().checksum


def test_a_snapshot_is_a_copy() -> None:
    backend = moved("full")
    snapshot = backend.snapshot()
    backend.update(hf_batch(2))
    assert snapshot.checksum == weights_checksum(snapshot.tensors)
    assert snapshot.checksum != backend.snapshot().checksum
    backend.load_weights(snapshot.tensors)
    assert backend.snapshot().checksum == snapshot.checksum


def test_dropout_moves_ratios_and_is_repeatable(tmp_path: Path) -> None:
    """It is drawn from the counters: whoever stands at the same place drops the same."""
    with_dropout = lora(dropout=0.5)
    first, second = (made("lora", lora=with_dropout) for _ in range(2))
    torch.manual_seed(1)
    first.update(hf_batch(1))
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    metrics = second.update(hf_batch(1)).metrics
    assert torch.equal(torch.random.get_rng_state(), state)
    assert student_state(first, tmp_path / "a") == student_state(second, tmp_path / "b")
    assert metrics["ratio_max"] == pytest.approx(1)  # B is 0 still: nothing to drop
    assert second.update(hf_batch(1)).metrics["ratio_max"] > 1.01
    plainly = made("lora")
    plainly.update(hf_batch(1))
    assert plainly.update(hf_batch(1)).metrics["ratio_max"] == pytest.approx(1, abs=1e-5)


def test_bfloat16_weights_have_float32_masters() -> None:
    """Steps too small for bfloat16 add up in the masters until the weights move."""
    optim = OptimConfig(lr=1e-5)
    backend = hf_student(dtype="bfloat16", optim=optim)
    assert {w.dtype for w in backend.student.trained.values()} == {torch.bfloat16}
    before = {n: w.detach().clone() for n, w in backend.student.trained.items()}
    masters = {n: m.clone() for n, m in backend._optimizer.masters.items()}
    backend.update(hf_batch(1))
    gaps = {n: (m - masters[n]).abs().max() for n, m in backend._optimizer.masters.items()}
    assert all(0 < gap < 2e-5 for gap in gaps.values())
    same = [torch.equal(w, before[n]) for n, w in backend.student.trained.items()]
    assert any(same)
    for _ in range(20):
        backend.update(hf_batch(1))
    for name, weight in backend.student.trained.items():
        assert torch.equal(weight, backend._optimizer.masters[name].bfloat16()), name
    matrices = {n: w for n, w in backend.student.trained.items() if w.dim() > 1}
    assert not any(torch.equal(w, before[n]) for n, w in matrices.items())
