"""Scores from batches and remembered prefixes equal those of transformers' full logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from teacher_server.batching import BatchLimits, ScoredBatch, ScoreJob
from teacher_server.scorer import PrefillScorer, load_scorer
from teacher_server.scorer_batches import PrefixBatcher
from teacher_server.scorer_hf import HFCausalLM

VOCAB, CONTEXT = 211, 200
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
TOLERANCE = 1e-5


@cache
def model(kind: str = "Qwen3") -> Any:
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,  # far from uniform, else any two softmaxes look alike
        "pad_token_id": 0,
    }
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**sizes | KINDS.get(kind, {}))
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def full_logprobs(ids: Sequence[int], kind: str = "Qwen3") -> NDArray[np.float64]:
    """[L - 1, V] by transformers alone: the whole text in one pass, no cache, no padding."""
    with torch.no_grad():
        logits = model(kind)(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return torch.log_softmax(logits[:-1].double(), -1).numpy()


def plain(job: ScoreJob, kind: str = "Qwen3") -> NDArray[np.float64]:
    table = full_logprobs(job.token_ids.tolist(), kind)
    return table[np.arange(len(table)), job.token_ids[1:]][job.start - 1 :]


def batched(kind: str = "Qwen3", **limits: int) -> PrefillScorer:
    made = HFCausalLM(model(kind))
    return PrefillScorer(
        made, name=kind, chunk_tokens=16, batcher=PrefixBatcher(made, BatchLimits(**limits))
    )


def text(length: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def sibling(
    prefix: NDArray[np.int64], length: int, seed: int, start: int | None = None
) -> ScoreJob:
    ids = np.concatenate([prefix, text(length, seed)])
    return ScoreJob(ids, len(prefix) if start is None else start)


def score_all(
    scorer: PrefillScorer, jobs: Sequence[ScoreJob]
) -> tuple[list[Any], list[ScoredBatch]]:
    """Results in the order of the jobs, and the batches they came from."""
    waiting, batches, found = list(jobs), [], {}
    while waiting:
        batch = scorer.score_some(waiting)
        assert 0 in batch.results
        batches.append(batch)
        found |= {waiting[index]: result for index, result in batch.results.items()}
        waiting = [job for index, job in enumerate(waiting) if index not in batch.results]
    return [found[job] for job in jobs], batches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [1, 2, 76, 150])
def test_alone(kind: str, start: int) -> None:
    job = ScoreJob(text(151, 1), start)
    (result,), _ = score_all(batched(kind), [job])
    assert result.logprobs.shape == (151 - start,)
    assert result.logprobs.std() > 0 or start == 150
    np.testing.assert_allclose(result.logprobs, plain(job, kind), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_in_company_of_similar_lengths(kind: str) -> None:
    lengths = (37, 41, 33, 40, 3, 2, 151)
    jobs = [ScoreJob(text(n, seed), 1 + seed % (n - 1)) for seed, n in enumerate(lengths)]
    results, batches = score_all(batched(kind), jobs)
    assert [sorted(batch.results) for batch in batches] == [[0, 1, 2, 3, 4], [0], [0]]
    assert batches[0].num_padding_tokens == 41 * 5 - (37 + 41 + 33 + 40 + 3)
    for job, result in zip(jobs, results, strict=True):
        assert result.num_cached_tokens == 0
        np.testing.assert_allclose(result.logprobs, plain(job, kind), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_siblings_share_their_prefix(kind: str) -> None:
    prefix = text(120, 5)
    jobs = [sibling(prefix, 5 + seed % 4, seed) for seed in range(8)]
    results, batches = score_all(batched(kind), jobs)
    assert [len(batch.results) for batch in batches] == [1, 7]
    # Scoring starts behind the prefix, so its last token's state is computed for each of them.
    assert [result.num_cached_tokens for result in results] == [0, *[119] * 7]
    for job, result in zip(jobs, results, strict=True):
        np.testing.assert_allclose(result.logprobs, plain(job, kind), rtol=0, atol=TOLERANCE)


def test_a_later_sibling_and_a_longer_text_find_what_was_computed_before() -> None:
    scorer, prefix = batched(), text(100, 5)
    first = sibling(prefix, 20, 1)
    score_all(scorer, [first])
    later = sibling(prefix, 13, 2)
    (result,), _ = score_all(scorer, [later])
    assert result.num_cached_tokens == 99
    np.testing.assert_allclose(result.logprobs, plain(later), rtol=0, atol=TOLERANCE)
    # The first text grows by a turn, of which only the new part is asked for.
    grown = ScoreJob(np.concatenate([first.token_ids, text(30, 3)]), 120)
    (result,), _ = score_all(scorer, [grown])
    assert result.num_cached_tokens == 119
    np.testing.assert_allclose(result.logprobs, plain(grown), rtol=0, atol=TOLERANCE)
    # From its beginning on, nothing may be reused: every state is needed.
    (result,), _ = score_all(scorer, [ScoreJob(grown.token_ids, 1)])
    assert result.num_cached_tokens == 0


def test_a_sibling_that_is_asked_for_earlier_is_not_put_behind_the_prefix() -> None:
    scorer, prefix = batched(), text(100, 5)
    score_all(scorer, [sibling(prefix, 9, 1)])
    jobs = [sibling(prefix, 9, 2), sibling(prefix, 9, 3, start=90), sibling(prefix, 9, 4)]
    results, batches = score_all(scorer, jobs)
    assert [sorted(batch.results) for batch in batches] == [[0, 2], [0]]
    assert [result.num_cached_tokens for result in results] == [99, 89, 99]
    for job, result in zip(jobs, results, strict=True):
        np.testing.assert_allclose(result.logprobs, plain(job), rtol=0, atol=TOLERANCE)


def test_without_memory_siblings_are_a_batch_and_no_more() -> None:
    jobs = [sibling(text(50, 5), 5, seed) for seed in range(4)]
    results, batches = score_all(batched(prefix_cache_tokens=0), jobs)
    assert [len(batch.results) for batch in batches] == [4]
    assert [result.num_cached_tokens for result in results] == [0] * 4
    for job, result in zip(jobs, results, strict=True):
        np.testing.assert_allclose(result.logprobs, plain(job), rtol=0, atol=TOLERANCE)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_mixture_of_texts_has_the_scores_of_full_logits(data: st.DataObject) -> None:
    """Prefixes of prefixes, other starts, small memories and batches, one scorer all along."""
    scorer = batched(
        prefix_cache_tokens=data.draw(st.sampled_from([0, 40, 150, 10_000])),
        max_batch_tokens=data.draw(st.sampled_from([1, 60, 400])),
        min_shared_tokens=data.draw(st.sampled_from([1, 8])),
    )
    for _ in range(data.draw(st.integers(1, 3))):
        jobs = []
        for seed in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)):
            base = text(60, seed % 2)[: data.draw(st.integers(0, 60))]
            ids = np.concatenate([base, text(data.draw(st.integers(2, 30)), 10 + seed)])
            top = data.draw(st.sampled_from([0, 2]))
            jobs.append(ScoreJob(ids, data.draw(st.integers(1, len(ids) - 1)), top))
        results, _ = score_all(scorer, jobs)
        for job, result in zip(jobs, results, strict=True):
            assert result.num_cached_tokens < job.start
            np.testing.assert_allclose(result.logprobs, plain(job), rtol=0, atol=TOLERANCE)


def test_the_most_likely_tokens_are_those_of_full_logits() -> None:
    jobs = [ScoreJob(sibling(text(60, 5), 9, seed).token_ids, 60, 4) for seed in range(3)]
    results, _ = score_all(batched(), jobs)
    for job, result in zip(jobs, results, strict=True):
        table = full_logprobs(job.token_ids.tolist())[job.start - 1 :]
        best = np.sort(table, axis=-1)[:, ::-1][:, :4]
        assert result.top is not None
        assert result.top.ids.shape == (9, 4)
        np.testing.assert_allclose(result.top.logprobs, best, rtol=0, atol=TOLERANCE)
        at = np.take_along_axis(table, result.top.ids, axis=-1)
        np.testing.assert_allclose(at, best, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "changes", "can_reuse"),
    [
        ("Qwen3", {}, True),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, False),
    ],
)
def test_models_that_forget_are_scored_whole_and_one_by_one(
    kind: str, changes: dict[str, Any], can_reuse: bool, tmp_path: Path
) -> None:
    import transformers

    config = model(kind).config.to_dict() | {"layer_types": None} | changes
    forgetful = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**config)
    ).eval()
    forgetful.save_pretrained(tmp_path)
    scorer = load_scorer(tmp_path, limits=BatchLimits())
    jobs = [sibling(text(60, 5), 9, seed) for seed in range(3)]
    results, batches = score_all(scorer, jobs)
    assert (results[1].num_cached_tokens > 0) == can_reuse
    assert len(batches) == (2 if can_reuse else 3)
    assert (scorer.num_kept_tokens > 0) == can_reuse
    for job, result in zip(jobs, results, strict=True):
        with torch.no_grad():
            logits = forgetful(input_ids=torch.from_numpy(job.token_ids)[None]).logits[0].double()
        table = torch.log_softmax(logits, -1).numpy()[job.start - 1 : -1]
        expected = table[np.arange(len(table)), job.token_ids[job.start :]]
        np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=TOLERANCE)


def test_by_default_nothing_is_remembered(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    scorer = load_scorer(tmp_path)
    ids = text(80, 1).tolist()
    first = scorer.score(ids, 40)
    assert np.array_equal(scorer.score(ids, 40), first)
    assert scorer.num_kept_tokens == 0
    with_memory = load_scorer(tmp_path, limits=BatchLimits())
    np.testing.assert_allclose(with_memory.score(ids, 40), first, rtol=0, atol=TOLERANCE)
    assert with_memory.num_kept_tokens == 80
