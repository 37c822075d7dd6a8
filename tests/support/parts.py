"""A training batch cut into the parts that groups would have been."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniverl_dist.schemas.batch import TrainBatch


def parts_of(batch: TrainBatch, sizes: Sequence[int]) -> list[TrainBatch]:
    """Consecutive sequences, so many in each part; of a batch of one minibatch."""
    assert sum(sizes) == len(batch.group_ids)
    ends = np.cumsum(sizes).tolist()
    return [_part(batch, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _part(batch: TrainBatch, first: int, last: int) -> TrainBatch:
    starts = batch.sequence_starts
    here = slice(starts[first], starts[last])
    return TrainBatch(
        token_ids=batch.token_ids[here],
        sequence_starts=starts[first : last + 1] - starts[first],
        loss_mask=batch.loss_mask[here],
        advantages=batch.advantages[here],
        rollout_logprobs=batch.rollout_logprobs[here],
        group_ids=batch.group_ids[first:last],
        minibatch_ids=batch.minibatch_ids[first:last],
        num_loss_tokens=(int(batch.loss_mask[here].sum()),),
        num_sequences=(last - first,),
        policy_version=batch.policy_version,
        temperature=batch.temperature,
    )
