from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from miniverl_dist.errors import BatchError
from miniverl_dist.schemas.batch import TrainBatch


def batch(**changes: object) -> TrainBatch:
    """Two sequences of three tokens; the last two of each are trained."""
    mask = np.array([False, True, True] * 2)
    values: dict[str, Any] = {
        "token_ids": np.arange(6),
        "sequence_starts": np.array([0, 3, 6]),
        "loss_mask": mask,
        "advantages": np.where(mask, 0.5, 0.0),
        "rollout_logprobs": np.where(mask, -1.0, np.nan),
        "group_ids": ("a", "a"),
        "minibatch_ids": np.array([0, 1]),
        "num_loss_tokens": (2, 2),
        "num_sequences": (1, 1),
        "policy_version": 0,
        "temperature": 1.0,
    }
    return TrainBatch(**(values | changes))


def at(name: str, index: int, value: float) -> dict[str, Any]:
    array = getattr(batch(), name).copy()
    array[index] = value
    return {name: array}


def test_a_sound_batch_is_taken() -> None:
    assert batch().num_minibatches == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": np.zeros(5, dtype=bool)}, "loss_mask has 5 entries for 6"),
        ({"advantages": np.zeros(7)}, "advantages has 7 entries"),
        ({"rollout_logprobs": np.zeros(5)}, "rollout_logprobs has 5 entries"),
        ({"sequence_starts": np.array([0, 3])}, "do not tile"),
        ({"sequence_starts": np.array([1, 3, 6])}, "do not tile"),
        ({"sequence_starts": np.array([0, 3, 5])}, "do not tile"),
        ({"group_ids": ("a",)}, "do not tile"),
        ({"sequence_starts": np.array([0, 0, 6])}, "at least one token"),
        (at("loss_mask", 0, True), "position 0"),
        (at("loss_mask", 3, True), "position 0"),
        (at("advantages", 0, 0.1), "0 off the loss mask"),
        (at("advantages", 1, np.nan), "must be finite"),
        (at("rollout_logprobs", 0, -1.0), "exactly on the loss mask"),
        (at("rollout_logprobs", 1, np.nan), "exactly on the loss mask"),
        (at("rollout_logprobs", 1, -np.inf), "exactly on the loss mask"),
        ({"minibatch_ids": np.array([0])}, "1 minibatch_ids for 2 sequences"),
        ({"minibatch_ids": np.array([0, 2])}, "not all in 0 .. 1"),
        ({"minibatch_ids": np.array([-1, 1])}, "not all in 0 .. 1"),
        ({"num_sequences": (2,)}, "1 num_sequences for 2"),
        ({"routed_experts": np.zeros((5, 2, 2), np.int16)}, r"\[5, 2, 2\], expected \[6, layers"),
        ({"routed_experts": np.zeros((6, 2), np.int16)}, r"\[6, 2\], expected \[6, layers"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        batch(**changes)
