"""A teacher's distributions in rows of the student's head, against the whole softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.backends.vocabulary import Vocabulary
from miniverl_dist.config.lab import DistillConfig
from miniverl_dist.errors import ConfigError, TokenizerMismatchError
from miniverl_dist.lab.resident import ResidentTeacher, require_top_k
from miniverl_dist.objective.distribution import FullTargets, TopKRows
from miniverl_dist.schemas.batch import IntArray
from miniverl_dist.schemas.targets import NO_TOKEN, TeacherContext
from teacher_server.scorer import ToyCausalLM
from tests.support.toy import VOCABULARY_IDS, random_ids, tiny_config

MODEL = ToyModel(tiny_config(), VOCABULARY_IDS, seed=3)
STUDENT_IDS = np.arange(1000, 1000 + len(VOCABULARY_IDS))
SHARED = np.full(500, NO_TOKEN)
SHARED[list(VOCABULARY_IDS)] = STUDENT_IDS
"""The student's ids are others; every token has a counterpart."""


def text(seed: int, length: int = 20, *positions: int) -> TeacherContext:
    ids = random_ids(np.random.default_rng(seed), length)
    return TeacherContext(np.array(ids), np.array(positions or (1, 5, length - 1)))


def expected(context: TeacherContext, temperature: float = 1.0) -> torch.Tensor:
    """[m, U] nats, from all logits at once."""
    rows = torch.from_numpy(MODEL.vocabulary.rows(context.token_ids))
    with torch.no_grad():
        logits = MODEL.hidden(rows[None])[0] @ MODEL.head.T
    return torch.log_softmax(logits / temperature, -1)[torch.from_numpy(context.positions) - 1]


def teacher(
    shared: IntArray | None = None, ids: IntArray | None = None, **config: object
) -> ResidentTeacher:
    return ResidentTeacher(
        ToyCausalLM(MODEL),
        SHARED if shared is None else shared,
        Vocabulary(STUDENT_IDS if ids is None else ids),
        DistillConfig.model_validate(config),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_exact_is_the_softmax_in_the_students_order(temperature: float) -> None:
    turned = SHARED.copy()
    order = np.random.default_rng(0).permutation(len(STUDENT_IDS))
    turned[list(VOCABULARY_IDS)] = STUDENT_IDS[order]
    found = teacher(turned, support="exact_full_vocab", temperature=temperature)
    texts = [text(1), text(2, 31, 4, 30)]
    targets = found.provider(texts).targets(slice(0, 5))
    assert isinstance(targets, FullTargets)
    whole = torch.cat([expected(one, temperature) for one in texts])
    for row, student_row in enumerate(order.tolist()):
        torch.testing.assert_close(
            targets.logprobs[:, student_row], whole[:, row], atol=1e-5, rtol=1e-5
        )


def test_no_more_tokens_can_be_kept_than_both_have() -> None:
    both = len(STUDENT_IDS) - 1
    shared = np.append(SHARED, STUDENT_IDS[1])  # a second spelling is no second token
    shared[VOCABULARY_IDS[4]] = NO_TOKEN
    vocabulary = Vocabulary(STUDENT_IDS)
    require_top_k(shared, vocabulary, DistillConfig(top_k=both))
    with pytest.raises(ConfigError, match=rf"top_k is {both + 1}, but .* share {both} tokens"):
        require_top_k(shared, vocabulary, DistillConfig(top_k=both + 1))
    exact = DistillConfig(support="exact_full_vocab", top_k=both + 1)
    require_top_k(shared, vocabulary, exact)


def test_exact_needs_the_same_tokens() -> None:
    lacking = SHARED.copy()
    lacking[VOCABULARY_IDS[4]] = NO_TOKEN
    for found in (
        teacher(lacking, support="exact_full_vocab"),
        teacher(ids=np.append(STUDENT_IDS, 7), support="exact_full_vocab"),
    ):
        with pytest.raises(TokenizerMismatchError, match="use top_k_tail"):
            found.provider([text(1)])


class TestTopK:
    def test_the_likeliest_and_the_rest(self) -> None:
        context = text(1)
        found = teacher(top_k=4).provider([context]).targets(slice(0, 3))
        assert isinstance(found, TopKRows)
        whole = expected(context)
        kept, places = whole.topk(4)
        torch.testing.assert_close(found.logprobs, kept, atol=1e-5, rtol=1e-5)
        assert found.rows.tolist() == places.tolist()
        rest = whole.scatter(1, places, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(found.tail_logprobs, rest, atol=1e-5, rtol=1e-5)
        entropy = -(whole.exp() * whole).sum(-1)
        torch.testing.assert_close(found.entropies, entropy, atol=1e-5, rtol=1e-5)

    def test_tokens_without_a_counterpart_stay_in_the_bucket(self) -> None:
        context = text(1)
        whole = expected(context)
        best = whole.argmax(-1).tolist()
        lacking = SHARED.copy()
        lacking[[VOCABULARY_IDS[row] for row in best]] = NO_TOKEN
        found = teacher(lacking, top_k=4).provider([context]).targets(slice(0, 3))
        assert isinstance(found, TopKRows)
        for row, likeliest in enumerate(best):
            assert likeliest not in found.rows[row].tolist()
            assert found.tail_logprobs[row].exp() > whole[row, likeliest].exp()
        mass = found.logprobs.exp().sum(-1) + found.tail_logprobs.exp()
        torch.testing.assert_close(mass, torch.ones(3), atol=1e-5, rtol=0)

    def test_of_two_tokens_for_one_only_the_first_stands_for_it(self) -> None:
        double = SHARED.copy()
        double[VOCABULARY_IDS[9]] = double[VOCABULARY_IDS[3]]
        found = teacher(double, top_k=60).provider([text(1)]).targets(slice(0, 3))
        assert isinstance(found, TopKRows)
        for rows, kept in zip(found.rows.tolist(), found.logprobs, strict=True):
            real = [row for row in rows if row >= 0]
            assert len(set(real)) == len(real) == len(VOCABULARY_IDS) - 1
            assert torch.isneginf(kept[len(real) :]).all()

    def test_k_beyond_the_vocabulary_leaves_nothing(self) -> None:
        found = teacher(top_k=999).provider([text(1)]).targets(slice(0, 3))
        assert isinstance(found, TopKRows)
        assert torch.isneginf(found.tail_logprobs).all()

    def test_stored_rows_name_the_students_ids(self) -> None:
        context = text(1, 140, *range(1, 140))
        stored = teacher(top_k=4).top_k(context)
        assert len(stored) == 139
        places = expected(context).topk(4).indices.numpy()
        np.testing.assert_array_equal(stored.token_ids, STUDENT_IDS[places])

    def test_a_text_without_rows(self) -> None:
        none = TeacherContext(np.zeros(0, np.int64), np.zeros(0, np.int64))
        assert len(teacher(top_k=4).top_k(none)) == 0
