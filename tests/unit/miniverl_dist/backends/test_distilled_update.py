"""Whole distributions in the toy student's update: against one softmax over everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from miniverl_dist.backends.distilled import RowLoss, StoredTargets, known_rows
from miniverl_dist.backends.padding import cut_microbatches
from miniverl_dist.backends.toy import ToyBackend
from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.backends.vocabulary import Vocabulary
from miniverl_dist.config.lab import DistillConfig
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.errors import BatchError
from miniverl_dist.lab.resident import ResidentTeacher
from miniverl_dist.objective.chunked import ChunkTargetProvider
from miniverl_dist.objective.distribution import FullTargets, Targets, TopKRows
from miniverl_dist.schemas.batch import TrainBatch
from miniverl_dist.schemas.targets import Distillation, TeacherContext, TopKTargets, join_top_k
from teacher_server.scorer import ToyCausalLM
from tests.support.toy import TOKENIZER, VOCABULARY_IDS, random_batch, tiny_config

OPTIM = OptimConfig(lr=0.5, eps=1.0)
"""A step nearly proportional to the gradient; see test_toy_backend."""
EVERY_ID = np.where(np.isin(np.arange(500), VOCABULARY_IDS), np.arange(500), -1)


def teacher_model() -> ToyModel:
    return ToyModel(tiny_config(hidden_size=32, num_heads=4), VOCABULARY_IDS, seed=5)


def student(config: DistillConfig, *, resident: bool, chunk_size: int = 256) -> ToyBackend:
    vocabulary = Vocabulary(VOCABULARY_IDS)
    teacher = ResidentTeacher(ToyCausalLM(teacher_model()), EVERY_ID, vocabulary, config)
    return ToyBackend(
        tiny_config(),
        VOCABULARY_IDS,
        TOKENIZER,
        loss=LossConfig(chunk_size=chunk_size),
        optim=OPTIM,
        num_steps=10,
        rows=RowLoss(config, vocabulary, teacher if resident else None),
    )


def row_places(batch: TrainBatch) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Every second trained token, and none of one sequence."""
    places = np.flatnonzero(batch.loss_mask)[::2]
    silent = slice(*batch.sequence_starts[2:4])
    return places[(places < silent.start) | (places >= silent.stop)].astype(np.int64)


def contexts(batch: TrainBatch) -> tuple[TeacherContext, ...]:
    """The same texts for the teacher, with two tokens in front of each."""
    places = row_places(batch)
    made = []
    for start, end in zip(batch.sequence_starts, batch.sequence_starts[1:], strict=False):
        own = places[(places >= start) & (places < end)]
        ids = np.concatenate([VOCABULARY_IDS[:2], batch.token_ids[start:end]])
        made.append(TeacherContext(ids.astype(np.int64), own - start + 2))
    return tuple(made)


def with_rows(batch: TrainBatch, config: DistillConfig, *, stored: bool) -> TrainBatch:
    places = row_places(batch)
    sequences = np.searchsorted(batch.sequence_starts, places, side="right") - 1
    steps = batch.minibatch_ids[sequences]
    counts = tuple(int((steps == step).sum()) for step in range(batch.num_minibatches))
    rows = Distillation(places, counts, contexts=contexts(batch), num_candidates=len(places))
    if stored:
        teacher = ResidentTeacher(
            ToyCausalLM(teacher_model()), EVERY_ID, Vocabulary(VOCABULARY_IDS), config
        )
        kept = join_top_k([teacher.top_k(context) for context in rows.contexts])
        rows = replace(rows, contexts=(), top_k=kept)
    return replace(batch, distillation=rows)


def naive_gradient(batch: TrainBatch, model: ToyModel, divergence: str) -> float:
    """Mean divergence over the rows of the whole batch, one softmax per sequence; and backward."""
    teacher = teacher_model()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for index, context in enumerate(contexts(batch)):
        if not len(context.positions):
            continue
        start = int(batch.sequence_starts[index])
        ids = batch.token_ids[start : int(batch.sequence_starts[index + 1])]
        places = torch.from_numpy(context.positions - 2)
        own = model.hidden(torch.from_numpy(model.vocabulary.rows(ids))[None])[0]
        theirs = teacher.hidden(torch.from_numpy(teacher.vocabulary.rows(context.token_ids))[None])
        q = torch.log_softmax((own[places - 1] @ model.head.T).double(), -1)
        p = torch.log_softmax((theirs[0][places + 1] @ teacher.head.T).double(), -1).detach()
        if divergence == "forward_kl":
            total = total + (p.exp() * (p - q)).sum()
        elif divergence == "reverse_kl":
            total = total + (q.exp() * (q - p)).sum()
        else:
            rows = torch.from_numpy(model.vocabulary.rows(ids))[places]
            total = total - q.gather(1, rows[:, None]).sum()
        count += len(places)
    (total / count).backward()
    return float(total.detach() / count)


def gradients_of(backend: ToyBackend, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """What one update has moved, per unit of learning rate and of clipped gradient."""
    before = backend.model.arrays()
    backend.update(batch)
    after = backend.model.arrays()
    return {name: torch.from_numpy(before[name] - after[name]) for name in before}


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "sampled_nll"])
def test_the_step_is_that_of_full_logits(divergence: str) -> None:
    config = DistillConfig(divergence=divergence, support="exact_full_vocab")  # type: ignore[arg-type]
    batch = with_rows(random_batch(3), config, stored=False)
    # Nothing else moves the weights: no advantage.
    batch = replace(batch, advantages=np.zeros(len(batch.token_ids)))
    model = ToyModel(tiny_config(), VOCABULARY_IDS)
    for weight in model.weights.values():
        weight.requires_grad_()
    value = naive_gradient(batch, model, divergence)
    backend = student(config, resident=True)
    result = backend.update(batch)
    assert result.metrics["divergence_mean"] == pytest.approx(value, abs=1e-5)
    assert result.metrics["distill_loss"] == pytest.approx(value, abs=1e-5)
    weights = list(model.weights.values())
    norm = torch.nn.utils.clip_grad_norm_(weights, OPTIM.grad_clip)
    assert result.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    torch.optim.AdamW(
        weights, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=0.0
    ).step()
    for name, array in backend.model.arrays().items():
        np.testing.assert_allclose(array, model.weights[name].detach().numpy(), atol=2e-5)


class TestSameStep:
    """Ways of computing one and the same step."""

    config = DistillConfig(divergence="reverse_kl", top_k=6)

    def moved(self, batch: TrainBatch, *, resident: bool, chunk_size: int = 256) -> Any:
        return gradients_of(student(self.config, resident=resident, chunk_size=chunk_size), batch)

    def test_stored_rows_and_a_teacher_in_memory(self) -> None:
        batch = random_batch(4, num_minibatches=2)
        stored = self.moved(with_rows(batch, self.config, stored=True), resident=False)
        resident = self.moved(with_rows(batch, self.config, stored=False), resident=True)
        for name, moved in stored.items():
            torch.testing.assert_close(moved, resident[name], rtol=1e-4, atol=1e-6)

    def test_any_chunk(self) -> None:
        batch = with_rows(random_batch(4), self.config, stored=True)
        whole = self.moved(batch, resident=False)
        for name, moved in self.moved(batch, resident=False, chunk_size=3).items():
            torch.testing.assert_close(moved, whole[name], rtol=1e-4, atol=1e-6)

    def test_any_cut_into_microbatches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        batch = with_rows(random_batch(4), self.config, stored=True)
        whole = self.moved(batch, resident=False)
        monkeypatch.setattr("miniverl_dist.backends.toy.MAX_PADDED_TOKENS", 45)
        assert len(cut_microbatches(batch.sequence_starts, np.arange(6), 45)) > 1
        for name, moved in self.moved(batch, resident=False).items():
            torch.testing.assert_close(moved, whole[name], rtol=1e-4, atol=1e-6)

    def test_exact_is_top_k_with_every_token(self) -> None:
        batch = random_batch(4)
        every = DistillConfig(divergence="reverse_kl", top_k=len(VOCABULARY_IDS))
        exact = every.model_copy(update={"support": "exact_full_vocab"})
        one = gradients_of(student(every, resident=True), with_rows(batch, every, stored=False))
        other = gradients_of(student(exact, resident=True), with_rows(batch, exact, stored=False))
        for name, moved in one.items():
            torch.testing.assert_close(moved, other[name], rtol=1e-4, atol=1e-6)


def test_policy_and_divergence_add_up() -> None:
    config = DistillConfig(divergence="forward_kl", top_k=6, coef=0.7)
    plain = random_batch(8)
    rows = with_rows(plain, config, stored=True)
    silent = replace(rows, advantages=np.zeros(len(plain.token_ids)))
    policy = student(config, resident=False).update(plain).metrics
    both = student(config, resident=False).update(rows).metrics
    alone = student(config, resident=False).update(silent).metrics
    assert both["policy_loss"] == pytest.approx(policy["policy_loss"], abs=1e-6)
    assert both["distill_loss"] == pytest.approx(0.7 * both["divergence_mean"], rel=1e-5)
    assert both["loss"] == pytest.approx(policy["loss"] + both["distill_loss"], abs=1e-5)
    assert alone["loss"] == pytest.approx(both["distill_loss"], abs=1e-5)
    assert both["mismatch_mean_abs"] == pytest.approx(policy["mismatch_mean_abs"], rel=1e-5)


def test_stored_episodes_have_no_policy_loss() -> None:
    config = DistillConfig(divergence="sampled_nll")
    told = random_batch(8)
    size = len(told.token_ids)
    batch = replace(
        with_rows(told, config, stored=False),
        is_sampled=False,
        advantages=np.zeros(size),
        rollout_logprobs=np.full(size, np.nan),
    )
    metrics = student(config, resident=False).update(batch).metrics
    assert metrics.keys() == {
        *("loss", "grad_norm", "divergence_mean", "distill_loss", "num_loss_tokens"),
        *("lr", "seconds_update"),
    }
    assert metrics["loss"] == pytest.approx(metrics["divergence_mean"])
    assert metrics["num_loss_tokens"] == told.loss_mask.sum()


def test_the_teachers_bucket_is_measured_where_it_is_used_stored_or_not() -> None:
    config = DistillConfig(divergence="forward_kl", top_k=6)
    batch = random_batch(8)
    told = [
        student(config, resident=not stored).update(with_rows(batch, config, stored=stored)).metrics
        for stored in (True, False)
    ]
    found = with_rows(batch, config, stored=True).distillation
    assert found is not None
    assert found.top_k is not None
    expected = float(np.exp(found.top_k.tail_logprobs).mean())
    assert expected > 0.1
    for metrics in told:
        assert metrics["teacher_tail_mass_mean"] == pytest.approx(expected, rel=1e-5)
    exact = DistillConfig(divergence="forward_kl", support="exact_full_vocab")
    whole = student(exact, resident=True).update(with_rows(batch, exact, stored=False)).metrics
    assert "teacher_tail_mass_mean" not in whole


def test_running_out_of_memory_halves_the_chunk_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = DistillConfig(divergence="reverse_kl", top_k=6)
    batch = with_rows(random_batch(4), config, stored=True)
    expected = gradients_of(student(config, resident=False), batch)

    class Tight(StoredTargets):
        def targets(self, rows: slice) -> Targets:
            if rows.stop - rows.start > 8:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate everything")
            return super().targets(rows)

    monkeypatch.setattr("miniverl_dist.backends.distilled.StoredTargets", Tight)
    backend = student(config, resident=False)
    before = backend.model.arrays()
    result = backend.update(batch)
    assert result.chunk_halvings
    assert all(new == old // 2 for old, new in result.chunk_halvings)
    for name, array in backend.model.arrays().items():
        moved = torch.from_numpy(before[name] - array)
        torch.testing.assert_close(moved, expected[name], rtol=1e-4, atol=1e-6)
    assert not backend.update(batch).chunk_halvings  # it has learned its size


def test_a_token_that_the_student_lacks_moves_into_the_bucket() -> None:
    vocabulary = Vocabulary([10, 17, 24])
    targets = TopKTargets(
        np.array([[17, 99], [24, -1]]),
        np.log([[0.5, 0.2], [0.6, 1.0]]) + np.array([[0, 0], [0, -np.inf]]),
        np.log([0.3, 0.4]),
        np.zeros(2),
    )
    found = StoredTargets(targets, vocabulary, dtype=torch.float64).targets(slice(0, 2))
    assert isinstance(found, TopKRows)
    assert found.rows.tolist() == [[1, -1], [2, -1]]
    np.testing.assert_allclose(found.tail_logprobs.exp().numpy(), [0.5, 0.4])
    assert np.isneginf(found.logprobs[:, 1].numpy()).all()


def test_rows_of_ids_of_any_shape() -> None:
    found = known_rows(Vocabulary([10, 17, 24]), np.array([[24, 9], [25, 10]]))
    assert found.tolist() == [[2, -1], [-1, 0]]


class TestRefused:
    def test_a_student_that_was_not_built_for_it(self) -> None:
        config = DistillConfig(top_k=6)
        backend = ToyBackend(
            tiny_config(), VOCABULARY_IDS, TOKENIZER, loss=LossConfig(), optim=OPTIM, num_steps=3
        )
        before = backend.model.arrays()
        with pytest.raises(BatchError, match="not built for it"):
            backend.update(with_rows(random_batch(4), config, stored=True))
        assert all((before[n] == a).all() for n, a in backend.model.arrays().items())

    def test_rows_without_targets(self) -> None:
        config = DistillConfig(top_k=6)
        batch = with_rows(random_batch(4), config, stored=False)
        with pytest.raises(BatchError, match="neither stored ones nor texts"):
            student(config, resident=False).update(batch)


def test_a_resident_provider_gives_a_chunk_what_it_gives_the_whole() -> None:
    config = DistillConfig(support="exact_full_vocab")
    teacher = ResidentTeacher(
        ToyCausalLM(teacher_model()), EVERY_ID, Vocabulary(VOCABULARY_IDS), config
    )
    provider: ChunkTargetProvider = teacher.provider(
        contexts(with_rows(random_batch(4), config, stored=False))
    )
    whole, part = provider.targets(slice(0, 20)), provider.targets(slice(7, 11))
    assert isinstance(whole, FullTargets)
    assert isinstance(part, FullTargets)
    torch.testing.assert_close(whole.logprobs[7:11], part.logprobs)
