"""A Hugging Face teacher whose projection has more rows than its tokenizer has ids."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from miniverl_dist.backends.vocabulary import FullVocabulary
from miniverl_dist.config.lab import DistillConfig
from miniverl_dist.errors import RequestRejectedError
from miniverl_dist.lab.resident import ResidentTeacher
from miniverl_dist.objective.distribution import FullTargets
from miniverl_dist.schemas.targets import TeacherContext
from teacher_server.batching import BatchLimits, ScoreJob
from teacher_server.scorer import PrefillScorer, load_model, load_scorer
from tests.support.hf_student import NUM_IDS, full_logprobs, plain_student, student_folder

LIMITS = BatchLimits(max_batch_tokens=512, prefix_cache_tokens=1024, min_shared_tokens=8)


@cache
def scorer(*, is_batched: bool, num_ids: int | None = NUM_IDS) -> PrefillScorer:
    limits = LIMITS if is_batched else None
    return load_scorer(student_folder(), limits=limits, num_ids=num_ids)


def text(length: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, NUM_IDS, length)


def expected(ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """[L - 1] nats, of softmaxes over the tokenizer's ids alone."""
    with torch.no_grad():
        found: NDArray[np.float64] = full_logprobs(plain_student(), ids).numpy()
    return found


@pytest.mark.parametrize("is_batched", [False, True])
def test_padding_has_no_share_in_a_score(is_batched: bool) -> None:
    ids = text(60)
    np.testing.assert_allclose(
        scorer(is_batched=is_batched).score(ids.tolist(), 1), expected(ids), atol=1e-5
    )


def test_nor_behind_a_remembered_prefix_or_in_company() -> None:
    first = text(50)
    texts = [first, *(np.concatenate([first[:40], text(20, seed)]) for seed in (1, 2))]
    shared = load_scorer(student_folder(), limits=LIMITS, num_ids=NUM_IDS)
    waiting = [ScoreJob(ids, 1) for ids in texts]
    rounds = []
    while waiting:
        found = shared.score_some(waiting).results
        for index, result in found.items():
            ids = waiting[index].token_ids
            start = len(ids) - len(result.logprobs)
            np.testing.assert_allclose(result.logprobs, expected(ids)[start - 1 :], atol=1e-5)
        rounds.append(len(found))
        waiting = [job for index, job in enumerate(waiting) if index not in found]
    later = [ScoreJob(ids, 45) for ids in texts[1:]]
    again = shared.score_some(later).results
    assert any(result.num_cached_tokens for result in again.values())
    for index, result in again.items():
        np.testing.assert_allclose(
            result.logprobs, expected(later[index].token_ids)[44:], atol=1e-5
        )


def test_the_likeliest_tokens_are_ids_of_the_tokenizer() -> None:
    ids = text(30)
    (result,) = (
        scorer(is_batched=False).score_some([ScoreJob(ids, 1, num_top=200)]).results.values()
    )
    assert result.top is not None
    assert result.top.ids.shape == (29, NUM_IDS)
    assert set(result.top.ids[0].tolist()) == set(range(NUM_IDS))
    np.testing.assert_allclose(np.exp(result.top.logprobs).sum(1), 1, atol=1e-5)


def test_ids_of_padding_are_refused() -> None:
    found = scorer(is_batched=False)
    assert found.vocab_size == NUM_IDS
    with pytest.raises(RequestRejectedError, match=f"the model has 0 to {NUM_IDS - 1}"):
        found.check([0, NUM_IDS])


def test_without_a_tokenizer_every_row_counts() -> None:
    found = scorer(is_batched=False, num_ids=None)
    assert found.vocab_size == NUM_IDS + 3
    ids = text(40)
    assert (found.score(ids.tolist(), 1) < expected(ids) - 1e-3).any()


def test_a_tokenizer_with_more_ids_than_rows_adds_none() -> None:
    assert scorer(is_batched=False, num_ids=5000).vocab_size == NUM_IDS + 3


def test_whole_distributions_match_the_students_head() -> None:
    teacher = ResidentTeacher(
        load_model(student_folder(), num_ids=NUM_IDS),
        np.arange(NUM_IDS),
        FullVocabulary(NUM_IDS),
        DistillConfig(support="exact_full_vocab"),
    )
    ids = text(20)
    found = teacher.provider([TeacherContext(ids, np.arange(1, 20))]).targets(slice(0, 19))
    assert isinstance(found, FullTargets)
    assert found.logprobs.shape == (19, NUM_IDS)
    picked = found.logprobs[np.arange(19), ids[1:]].numpy()
    np.testing.assert_allclose(picked, expected(ids), atol=1e-5)
