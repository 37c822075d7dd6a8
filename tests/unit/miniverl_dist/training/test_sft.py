from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.config.roles import SftConfig
from miniverl_dist.errors import BatchError
from miniverl_dist.schemas.batch import SftBatch
from miniverl_dist.training.sft import SftExample, run_sft, sft_batches

NOISE = (900, 901, 902)


def example(index: int, num_written: int = 4) -> SftExample:
    """Ids that name it; two context tokens, then written ones, the first not learned."""
    written = np.array([False, False] + [True] * num_written)
    loss_mask = written.copy()
    loss_mask[2] = False
    return SftExample(np.arange(len(written)) + 10 * index, loss_mask, written)


def config(num_steps: int, batch_size: int = 3, input_dropout: float = 0.0) -> SftConfig:
    return SftConfig(num_steps=num_steps, batch_size=batch_size, input_dropout=input_dropout)


def parts(batch: SftBatch) -> list[list[int]]:
    starts = batch.sequence_starts
    return [batch.token_ids[a:b].tolist() for a, b in pairwise(starts)]


def visited(batches: list[SftBatch]) -> list[int]:
    return [ids[0] // 10 for batch in batches for ids in parts(batch)]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 30), st.integers(0, 99))
def test_each_epoch_visits_every_example_once(
    num_examples: int, batch_size: int, num_steps: int, seed: int
) -> None:
    examples = [example(i) for i in range(num_examples)]
    order = visited(list(sft_batches(examples, config(num_steps, batch_size), seed=seed)))
    assert len(order) == num_steps * batch_size
    epochs = [order[i : i + num_examples] for i in range(0, len(order), num_examples)]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch)


def test_the_order_changes_from_epoch_to_epoch() -> None:
    examples = [example(i) for i in range(8)]
    order = visited(list(sft_batches(examples, config(16, 2), seed=0)))
    epochs = {tuple(order[i : i + 8]) for i in range(0, 32, 8)}
    assert len(epochs) == 4


def test_it_is_a_function_of_the_seed() -> None:
    examples = [example(i) for i in range(5)]

    def run(seed: int) -> list[tuple[bytes, bytes]]:
        batches = sft_batches(
            examples, config(6, input_dropout=0.5), seed=seed, replacement_ids=NOISE
        )
        return [(batch.token_ids.tobytes(), batch.loss_mask.tobytes()) for batch in batches]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_sequences_keep_their_tokens_and_masks() -> None:
    examples = [example(i, num_written=i + 1) for i in range(3)]
    [batch] = sft_batches(examples, config(1), seed=0)
    for ids, index in zip(parts(batch), visited([batch]), strict=True):
        assert ids == examples[index].token_ids.tolist()
    assert int(batch.loss_mask.sum()) == sum(int(e.loss_mask.sum()) for e in examples)
    assert batch.sequence_starts[-1] == len(batch.token_ids) == len(batch.loss_mask)


class TestDropout:
    def batches(self, share: float, num_steps: int = 40) -> list[tuple[SftBatch, SftBatch]]:
        """The same batches with and without dropout (the order is drawn before the noise)."""
        examples = [example(i, num_written=20) for i in range(3)]
        clean = {tuple(e.token_ids[:1]): e for e in examples}
        pairs = []
        for batch in sft_batches(
            examples, config(num_steps, input_dropout=share), seed=3, replacement_ids=NOISE
        ):
            sources = [clean[(ids[0],)] for ids in parts(batch)]
            whole = SftBatch(
                np.concatenate([e.token_ids for e in sources]),
                batch.sequence_starts,
                np.concatenate([e.loss_mask for e in sources]),
            )
            pairs.append((batch, whole))
        return pairs

    def test_it_replaces_written_tokens_only_and_never_learns_them(self) -> None:
        for batch, clean in self.batches(0.4):
            replaced = batch.token_ids != clean.token_ids
            written = np.tile(np.array([False, False] + [True] * 20), 3)
            assert not (replaced & ~written).any()
            assert set(batch.token_ids[replaced].tolist()) <= set(NOISE)
            assert not batch.loss_mask[replaced].any()
            np.testing.assert_array_equal(batch.loss_mask[~replaced], clean.loss_mask[~replaced])

    def test_its_share_is_that_of_the_config(self) -> None:
        pairs = self.batches(0.4, num_steps=100)
        replaced = sum(int((a.token_ids != b.token_ids).sum()) for a, b in pairs)
        # 6000 written tokens: 0.4 within four standard deviations.
        assert replaced / 6000 == pytest.approx(0.4, abs=4 * (0.4 * 0.6 / 6000) ** 0.5)

    def test_it_does_not_change_the_examples(self) -> None:
        examples = [example(0)]
        before = examples[0].token_ids.copy()
        list(sft_batches(examples, config(5, input_dropout=1.0), seed=0, replacement_ids=NOISE))
        np.testing.assert_array_equal(examples[0].token_ids, before)

    def test_it_needs_ids_to_put_in(self) -> None:
        with pytest.raises(BatchError, match="needs ids to put in place"):
            next(sft_batches([example(0)], config(1, input_dropout=0.1), seed=0))


def test_no_examples_are_an_error() -> None:
    with pytest.raises(BatchError, match="at least one trace"):
        next(sft_batches([], config(1), seed=0))


async def test_every_batch_is_fed_and_reported() -> None:
    fed: list[tuple[SftBatch, float]] = []
    told: list[tuple[int, dict[str, float]]] = []

    async def update(batch: SftBatch, learning_rate: float) -> dict[str, float]:
        fed.append((batch, learning_rate))
        return {"loss": float(len(fed))}

    batches = list(sft_batches([example(0)], config(3), seed=0))
    await run_sft(iter(batches), update, 5e-3, lambda step, metrics: told.append((step, metrics)))
    assert [batch for batch, _ in fed] == batches
    assert {rate for _, rate in fed} == {5e-3}
    assert told == [(0, {"loss": 1.0}), (1, {"loss": 2.0}), (2, {"loss": 3.0})]
