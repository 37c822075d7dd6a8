"""Targets refuse what is no distribution, and rows that nothing predicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from miniverl_dist.errors import BatchError
from miniverl_dist.schemas.targets import (
    NO_TOKEN,
    TeacherContext,
    TopKTargets,
    TrajectoryTargets,
    join_top_k,
)

LOG = np.log


def top_k(**changes: Any) -> TopKTargets:
    arrays = {
        "token_ids": np.array([[5, 7], [9, NO_TOKEN]]),
        "logprobs": np.array([LOG([0.5, 0.3]), [LOG(0.9), -np.inf]]),
        "tail_logprobs": LOG([0.2, 0.1]),
        "entropies": np.array([1.0, 0.3]),
    }
    return TopKTargets(**arrays | changes)


class TestTopK:
    def test_rows_can_be_chosen(self) -> None:
        kept = top_k().rows(np.array([1]))
        assert len(kept) == 1
        assert kept.token_ids.tolist() == [[9, NO_TOKEN]]
        assert kept.entropies.tolist() == [0.3]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"logprobs": LOG([[0.5, 0.3]])}, "expected \\[rows, k\\] twice"),
            ({"token_ids": np.array([5, 7]), "logprobs": LOG([0.5, 0.5])}, "twice"),
            ({"tail_logprobs": LOG([0.2])}, "2 rows of tokens, 1 tails"),
            ({"entropies": np.zeros(3)}, "3 entropies"),
            ({"tail_logprobs": LOG([0.2, 0.3])}, "row 1 has mass 1.2"),
            ({"tail_logprobs": np.array([LOG(0.2), np.nan])}, "row 1 has mass nan"),
            ({"token_ids": np.array([[5, 7], [9, 3]])}, "exactly where there is no token"),
        ],
    )
    def test_what_is_no_distribution_is_refused(self, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(BatchError, match=words):
            top_k(**changes)

    def test_joining_pads_the_smaller_k(self) -> None:
        narrow = TopKTargets(np.array([[3]]), LOG([[0.4]]), LOG([0.6]), np.array([0.7]))
        joined = join_top_k([top_k(), narrow])
        assert joined.token_ids.tolist() == [[5, 7], [9, NO_TOKEN], [3, NO_TOKEN]]
        assert np.isneginf(joined.logprobs[2, 1])
        assert joined.tail_logprobs.tolist() == [*LOG([0.2, 0.1]), LOG(0.6)]


class TestContext:
    @pytest.mark.parametrize("position", [0, -1, 4])
    def test_a_row_that_nothing_predicts_is_refused(self, position: int) -> None:
        with pytest.raises(BatchError, match=r"expected 1 \.\. 3"):
            TeacherContext(np.arange(4), np.array([position]))

    def test_no_rows_are_fine(self) -> None:
        TeacherContext(np.zeros(0, np.int64), np.zeros(0, np.int64))


class TestTrajectoryTargets:
    def of(self, positions: list[int], **rows: Any) -> TrajectoryTargets:
        return TrajectoryTargets("t", 0, np.array(positions, dtype=np.int64), 9, **rows)

    def test_one_source_at_most(self) -> None:
        context = TeacherContext(np.arange(9), np.array([1, 2]))
        with pytest.raises(BatchError, match="one only"):
            self.of([1, 2], top_k=top_k(), context=context)
        self.of([1, 2])  # the written tokens themselves

    @pytest.mark.parametrize(
        "rows", [{"top_k": top_k()}, {"context": TeacherContext(np.arange(9), np.array([1, 2]))}]
    )
    def test_rows_and_positions_agree(self, rows: dict[str, Any]) -> None:
        self.of([3, 5], **rows)
        with pytest.raises(BatchError, match="2 target rows for 3 positions"):
            self.of([3, 5, 6], **rows)

    @pytest.mark.parametrize("positions", [[0, 1], [2, 2], [5, 3]])
    def test_positions_rise_from_one(self, positions: list[int]) -> None:
        with pytest.raises(BatchError, match="rise"):
            self.of(positions)
