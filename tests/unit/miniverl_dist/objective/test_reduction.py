"""Reductions: shares of a step's mean that add up over any split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import BatchError
from miniverl_dist.objective.reduction import Reduction, reduce_tokens, tokens_per_sequence

REDUCTIONS: tuple[Reduction, ...] = ("token_mean", "trajectory_mean")

ROWS = st.lists(
    st.tuples(st.floats(-5, 5), st.booleans(), st.integers(0, 3), st.integers(0, 2)), max_size=16
)


def _slow_mean(rows: list[tuple[float, bool, int, int]], reduction: str) -> float:
    kept = [(value, sequence) for value, on_mask, sequence, _ in rows if on_mask]
    if reduction == "token_mean":
        return sum(value for value, _ in kept) / len(kept)
    means = []
    for sequence in {sequence for _, sequence in kept}:
        values = [value for value, other in kept if other == sequence]
        means.append(sum(values) / len(values))
    return sum(means) / len(means)


@settings(deadline=None, max_examples=150)
@given(ROWS.filter(lambda rows: any(row[1] for row in rows)), st.sampled_from(REDUCTIONS))
def test_calls_over_any_split_add_up_to_the_plain_mean(
    rows: list[tuple[float, bool, int, int]], reduction: Reduction
) -> None:
    values = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    mask = torch.tensor([row[1] for row in rows])
    sequence_ids = torch.tensor([row[2] for row in rows])
    calls = torch.tensor([row[3] for row in rows])
    lengths = tokens_per_sequence(mask, sequence_ids)
    total = sum(
        reduce_tokens(
            values[calls == call],
            mask[calls == call],
            sequence_ids[calls == call],
            reduction=reduction,
            num_loss_tokens=float(mask.sum()),
            num_sequences=float((lengths > 0).sum()),
            sequence_lengths=lengths,
        )
        for call in range(3)
    )
    torch.testing.assert_close(
        total, torch.tensor(_slow_mean(rows, reduction), dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


def test_lengths_are_counted_where_no_sequence_is_split() -> None:
    arguments = {
        "values": torch.tensor([1.0, 3.0, 10.0, 7.0]),
        "mask": torch.tensor([True, True, True, False]),
        "sequence_ids": torch.tensor([0, 0, 2, 2]),
    }
    found = reduce_tokens(
        **arguments, reduction="trajectory_mean", num_loss_tokens=3.0, num_sequences=2.0
    )
    assert found == (2 + 10) / 2
    assert tokens_per_sequence(arguments["mask"], arguments["sequence_ids"]).tolist() == [2, 0, 1]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_denominators_are_the_callers(reduction: Reduction) -> None:
    found = reduce_tokens(
        torch.tensor([1.0, 1.0]),
        torch.tensor([True, True]),
        torch.tensor([0, 0]),
        reduction=reduction,
        num_loss_tokens=20.0,
        num_sequences=10.0,
    )
    torch.testing.assert_close(found, torch.tensor(0.1))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nan_off_the_mask_stays_there(reduction: Reduction) -> None:
    values = torch.tensor([1.0, float("nan")], requires_grad=True)
    loss = reduce_tokens(
        values,
        torch.tensor([True, False]),
        torch.tensor([0, 1]),
        reduction=reduction,
        num_loss_tokens=1.0,
        num_sequences=1.0,
    )
    loss.backward()
    assert loss == 1
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize(
    ("reduction", "name"),
    [("token_mean", "num_loss_tokens"), ("trajectory_mean", "num_sequences")],
)
def test_a_denominator_that_is_not_positive_is_refused(
    reduction: Reduction, name: str, value: float
) -> None:
    denominators = {"num_loss_tokens": 1.0, "num_sequences": 1.0} | {name: value}
    with pytest.raises(BatchError, match=name):
        reduce_tokens(
            torch.ones(1),
            torch.ones(1, dtype=torch.bool),
            torch.zeros(1, dtype=torch.int64),
            reduction=reduction,
            **denominators,
        )
