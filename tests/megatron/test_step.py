"""One rank of a Megatron student: its step against transformers, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.requirements import require_megatron

require_megatron()

from miniverl_dist.config.cluster import ParallelConfig  # noqa: E402
from miniverl_dist.config.recipe import LossConfig, OptimConfig  # noqa: E402
from miniverl_dist.errors import (  # noqa: E402
    BatchError,
    CheckpointError,
    ConfigError,
    StudentLostError,
    TokenizerMismatchError,
    UpdateError,
)
from tests.reference.megatron_step import transformers_step  # noqa: E402
from tests.support.megatron_student import (  # noqa: E402
    NUM_ROWS,
    GradientRecorder,
    folder,
    sft_batch,
    student,
    tensors,
    train_batch,
)
from tests.support.ranks import Rank, run_ranks  # noqa: E402


@contextmanager
def one_rank(model_type: str = "qwen3", **changes: Any) -> Iterator[GradientRecorder]:
    backend = student(None, model_type, **changes)
    try:
        yield backend
    finally:
        backend.close()


def weights(backend: GradientRecorder) -> dict[str, np.ndarray[Any, Any]]:
    return dict(backend.snapshot().tensors)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("model_type", "reduction"),
    [("qwen3", "token_mean"), ("qwen3_moe", "trajectory_mean"), ("qwen3_5_moe", "token_mean")],
)
def test_loss_and_gradients_equal_transformers_in_double_precision(
    model_type: str, reduction: str
) -> None:
    loss = LossConfig.model_validate({"reduction": reduction, "kl_coef": 0.1, "chunk_size": 16})
    batch = train_batch()
    with one_rank(model_type, loss=loss) as backend:
        backend.load_weights(tensors(model_type, 1))
        logprobs = backend.logprobs(batch)
        metrics = backend.update(batch).metrics
    oracle = transformers_step(folder(model_type, 1), folder(model_type, 0), batch, loss)
    np.testing.assert_allclose(logprobs, oracle.logprobs, rtol=0, atol=1e-5)
    assert metrics["loss"] == pytest.approx(oracle.loss, abs=1e-5)
    assert metrics["entropy_mean"] == pytest.approx(oracle.entropy, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(oracle.grad_norm, rel=1e-5)
    # The first ratio is 1 to the last bit: both passes cut the same microbatches.
    assert metrics["ratio_max"] == 1.0
    (gradients,) = backend.gradients
    assert gradients.keys() == oracle.gradients.keys()
    for name, expected in oracle.gradients.items():
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_microbatches_and_chunks_change_neither_loss_nor_gradient() -> None:
    results = []
    for tokens, chunk_size in ((1, 3), (40, 16), (10_000, 1000)):
        loss = LossConfig(chunk_size=chunk_size)
        with one_rank(loss=loss, max_microbatch_tokens=tokens) as backend:
            results.append((backend.update(train_batch()).metrics, backend.gradients[0]))
    for metrics, gradients in results[1:]:
        assert metrics["loss"] == pytest.approx(results[0][0]["loss"], abs=1e-6)
        for name, expected in results[0][1].items():
            np.testing.assert_allclose(gradients[name], expected, rtol=0, atol=1e-6, err_msg=name)


def test_an_update_takes_one_step_per_minibatch_at_the_scheduled_rate() -> None:
    optim = OptimConfig(lr=1e-3, warmup_steps=4, grad_clip=0.5)
    with one_rank(optim=optim) as backend:
        before = weights(backend)
        first = backend.update(train_batch(num_minibatches=2))
        moved = weights(backend)
        second = backend.update(train_batch(1))
        assert (first.policy_version, first.num_optimizer_steps) == (2, 2)
        assert (second.policy_version, second.num_optimizer_steps) == (3, 1)
        assert first.metrics["lr"] == pytest.approx(0.25e-3)
        assert second.metrics["lr"] == pytest.approx(0.5e-3)
        assert len(backend.gradients) == 3
        # Adam's first steps move a weight by the learning rate at most.
        largest = max(np.abs(moved[name] - before[name]).max() for name in before)
        assert 0.25e-3 < largest <= 2.1 * 0.25e-3
        assert first.metrics["ratio_max"] > 1.0


def test_k1_in_reward_lowers_advantages_and_adds_no_loss() -> None:
    batch = train_batch()
    loss = LossConfig.model_validate({"kl_coef": 0.3, "kl_estimator": "k1_in_reward"})
    found = {}
    for name, config in (("with", loss), ("without", LossConfig())):
        with one_rank(loss=config) as backend:
            backend.load_weights(tensors("qwen3", 1))
            policy = backend.logprobs(batch)
            found[name] = backend.update(batch).metrics
    with one_rank() as backend:
        reference = backend.logprobs(batch)
    mask = batch.loss_mask
    mismatch = np.minimum(np.exp(policy[mask] - batch.rollout_logprobs[mask]), 2.0)
    penalty = (mismatch * 0.3 * (policy - reference)[mask]).sum() / mask.sum()
    assert abs(penalty) > 1e-3
    assert found["with"]["loss"] - found["without"]["loss"] == pytest.approx(penalty, abs=1e-5)
    assert "kl_loss" not in found["with"]


def test_supervised_steps_lower_the_loss_and_count_no_version() -> None:
    with one_rank(loss=LossConfig(kl_coef=0.1)) as backend:
        losses = [backend.sft_update(sft_batch(), 3e-3)["loss"] for _ in range(5)]
        assert losses[-1] < 0.8 * losses[0]
        assert backend.policy_version == 0
        moved = weights(backend)
        with backend._reference.in_place():  # type: ignore[union-attr]
            assert_same(weights(backend), tensors("qwen3", 0))
        assert_same(weights(backend), moved)
        backend.finish_warmup()
        with backend._reference.in_place():  # type: ignore[union-attr]
            assert_same(weights(backend), moved)
        backend.sft_update(sft_batch(), 1e-3)
        after = weights(backend)
    with one_rank() as fresh:
        # The optimizer is as new: it steps as that of a student which begins with these weights.
        fresh.load_weights(moved)
        fresh.sft_update(sft_batch(), 1e-3)
        assert_same(weights(fresh), after)


@pytest.mark.parametrize("is_distributed", [True, False])
def test_loaded_weights_reach_the_bfloat16_masters(is_distributed: bool) -> None:
    """The step starts from the masters: old ones would bring the old weights back."""
    with one_rank(dtype="bfloat16", distributed_optimizer=is_distributed) as backend:
        backend.load_weights(tensors("qwen3", 1))
        loaded = weights(backend)
        backend.sft_update(sft_batch(), 1e-6)
        for name, value in weights(backend).items():
            expected = loaded[name].astype(np.float32)
            np.testing.assert_allclose(value.astype(np.float32), expected, rtol=1e-2, atol=1e-4)


def test_what_cannot_be_computed_is_refused_before_anything_changes() -> None:
    batch = train_batch()
    nothing = replace(
        batch,
        loss_mask=np.zeros_like(batch.loss_mask),
        advantages=np.zeros_like(batch.advantages),
        rollout_logprobs=np.full_like(batch.rollout_logprobs, np.nan),
    )
    foreign = replace(batch, token_ids=np.where(batch.loss_mask, NUM_ROWS, batch.token_ids))
    with one_rank(max_context_tokens=26) as backend:
        before = weights(backend)
        with pytest.raises(BatchError, match="none of the batch's 7 sequences"):
            backend.update(nothing)
        with pytest.raises(TokenizerMismatchError, match=f"token id {NUM_ROWS} at position"):
            backend.update(foreign)
        with pytest.raises(BatchError, match="a sequence of 27 tokens, max_context_tokens is 26"):
            backend.update(train_batch(lengths=(5, 27)))
        sft = sft_batch()
        with pytest.raises(BatchError, match="without a token to learn from"):
            backend.sft_update(replace(sft, loss_mask=np.zeros_like(sft.loss_mask)), 1e-3)
        lacking = {name: value for name, value in before.items() if "o_proj" not in name}
        with pytest.raises(CheckpointError, match="o_proj"):
            backend.load_weights(lacking)
        assert_same(weights(backend), before)
        assert backend.update(batch).policy_version == 1


def test_layouts_and_losses_that_do_not_fit_are_config_errors() -> None:
    gspo = LossConfig(kind="gspo_token")
    with pytest.raises(ConfigError, match="gspo_token needs each sequence on one rank"):
        student(None, "qwen3", loss=gspo, parallel=ParallelConfig(context=2))
    with pytest.raises(ConfigError, match="do not divide"):
        student(None, "qwen3", parallel=ParallelConfig(tensor=2))
    assert not torch.distributed.is_initialized()


def broken_on_rank_one(rank: Rank, act: Callable[[Any], Any]) -> Any:
    backend = student(rank, "qwen3", parallel=ParallelConfig(tensor=2, sequence=True))
    result = act(backend)
    backend.close()
    return result


def poison(backend: GradientRecorder, steps_before: int) -> None:
    """From the given step on, one gradient of rank 1 is not a number."""
    if torch.distributed.get_rank() == 1:
        parameter = next(iter(backend.model.module.parameters()))

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            taken = len(getattr(backend, "gradients", []))
            return gradient * torch.nan if taken >= steps_before else gradient

        parameter.register_hook(spoil)


def one_bad_gradient(backend: GradientRecorder) -> tuple[str, str, bool]:
    before = weights(backend)
    poison(backend, 0)
    with pytest.raises(UpdateError) as error:
        backend.update(train_batch())
    same = all(np.array_equal(value, before[name]) for name, value in weights(backend).items())
    return type(error.value).__name__, str(error.value), same and backend.policy_version == 0


def test_a_gradient_that_is_not_finite_on_one_rank_stops_all() -> None:
    for name, message, is_unchanged in run_ranks(2, broken_on_rank_one, one_bad_gradient):
        assert name == "UpdateError"
        assert "gradient norm nan" in message
        assert is_unchanged


def second_step_fails(backend: GradientRecorder) -> list[str]:
    poison(backend, 1)
    messages = []
    for call in (
        lambda: backend.update(train_batch(num_minibatches=2)),
        lambda: backend.update(train_batch()),
        lambda: backend.save(Path("/nowhere")),
        backend.snapshot,
    ):
        with pytest.raises(StudentLostError) as error:
            call()
        messages.append(str(error.value))
    assert backend.policy_version == 0
    return messages


def test_a_failure_behind_the_first_step_loses_the_student() -> None:
    for messages in run_ranks(2, broken_on_rank_one, second_step_fails):
        assert "1 optimizer step(s) of a failed update were already taken" in messages[0]
        assert all("rebuild" in message for message in messages)
