"""Whole distributions in the hf student's update: against one softmax over everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from miniverl_dist.backends.distilled import RowLoss
from miniverl_dist.backends.vocabulary import FullVocabulary
from miniverl_dist.config.lab import DistillConfig
from miniverl_dist.config.recipe import LossConfig
from miniverl_dist.errors import BatchError
from miniverl_dist.schemas.batch import TrainBatch
from miniverl_dist.schemas.targets import Distillation, TopKTargets
from tests.reference.plain_student import PlainStudent
from tests.support.hf_student import (
    NUM_IDS,
    SMOOTH,
    hf_batch,
    hf_student,
    lora,
    plain_student,
    sequences,
)

STUDENTS = [("qwen3", True, False), ("gpt2", False, False), ("qwen3", True, True)]


def teacher_logprobs(num_rows: int) -> torch.Tensor:
    """[m, V] nats."""
    noise = np.random.default_rng(8).normal(size=(num_rows, NUM_IDS)) * 2
    return torch.log_softmax(torch.from_numpy(noise), -1)


def with_rows(batch: TrainBatch, *, is_sampled: bool) -> TrainBatch:
    """Every second trained token is compared with all of a teacher's distribution."""
    places = np.flatnonzero(batch.loss_mask)[::2].astype(np.int64)
    logprobs = teacher_logprobs(len(places)).numpy()
    kept = TopKTargets(
        np.tile(np.arange(NUM_IDS), (len(places), 1)),
        logprobs,
        np.full(len(places), -np.inf),
        -(np.exp(logprobs) * logprobs).sum(1),
    )
    rows = Distillation(places, (len(places),), top_k=kept, num_candidates=len(places))
    if is_sampled:
        return replace(batch, distillation=rows)
    return replace(
        batch,
        distillation=rows,
        is_sampled=False,
        advantages=np.zeros(len(batch.token_ids)),
        rollout_logprobs=np.full(len(batch.token_ids), np.nan),
    )


def divergence(plain: PlainStudent, batch: TrainBatch, kind: str) -> torch.Tensor:
    """Mean over the rows, from whole logits."""
    rows = batch.distillation
    assert rows is not None
    wanted, start = teacher_logprobs(len(rows.positions)), 0
    total = torch.zeros((), dtype=torch.float64)
    for span in sequences(batch):
        places = rows.positions[(rows.positions >= span.start) & (rows.positions < span.stop)]
        ids = torch.from_numpy(batch.token_ids[span])
        inputs = {"input_ids": ids[None], "use_cache": False}
        logits = torch.func.functional_call(plain.model, plain.weights(), (), inputs).logits
        local = torch.from_numpy(places - span.start)
        q = torch.log_softmax(logits[0, local - 1, :NUM_IDS].double(), -1)
        p = wanted[start : start + len(places)]
        start += len(places)
        if kind == "reverse_kl":
            total = total + (q.exp() * (q - p)).sum()
        elif kind == "forward_kl":
            total = total + (p.exp() * (p - q)).sum()
        else:
            total = total - q.gather(1, ids[local, None]).sum()
    return total / start


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "sampled_nll"])
@pytest.mark.parametrize(("family", "tied", "adapted"), STUDENTS)
@pytest.mark.parametrize("is_sampled", [True, False])
def test_the_step_is_that_of_whole_logits(
    kind: str, family: str, tied: bool, adapted: bool, is_sampled: bool
) -> None:
    """Alone, and beside a policy loss that it adds to."""
    config = DistillConfig(divergence=kind, top_k=NUM_IDS, coef=0.7)  # type: ignore[arg-type]
    loss = LossConfig(chunk_size=7)
    backend = hf_student(
        family,
        tied=tied,
        lora=lora(family) if adapted else None,
        loss=loss,
        optim=SMOOTH,
        rows=RowLoss(config, FullVocabulary(NUM_IDS)),
    )
    adapters = backend.student.adapters
    plain = PlainStudent(
        plain_student(family, tied=tied),
        NUM_IDS,
        loss,
        SMOOTH,
        None if adapters is None else adapters.factors("actor"),
        0.0 if adapters is None else adapters.scale,
        transposed=family == "gpt2",
    )
    batch = with_rows(hf_batch(6), is_sampled=is_sampled)
    term = divergence(plain, batch, kind)
    expected = plain.update(batch, extra=0.7 * term) if is_sampled else [plain._step(0.7 * term)]
    result = backend.update(batch)
    assert result.metrics["divergence_mean"] == pytest.approx(float(term.detach()), rel=1e-5)
    assert result.metrics["loss"] == pytest.approx(expected[0], rel=1e-4)
    for name, weight in backend.student.trained.items():
        wanted: Any = plain.trained[name].detach()
        torch.testing.assert_close(weight.detach(), wanted, rtol=0, atol=2e-5, msg=name)


def test_a_student_that_was_not_built_for_rows_refuses_them() -> None:
    with pytest.raises(BatchError, match="was not built for it"):
        hf_student().update(with_rows(hf_batch(6), is_sampled=True))
