"""Divergences of distributions: against plain loops, at their edges, and what they promise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from miniverl_dist.config.lab import DistillConfig, EntropyAwareConfig
from miniverl_dist.errors import BatchError
from miniverl_dist.objective import distribution
from miniverl_dist.objective.distribution import (
    FullTargets,
    Targets,
    TopKRows,
    divergence,
    keep_top_k,
)
from tests.reference.divergence import (
    OracleTeacher,
    full_teacher,
    kept_teacher,
    slow_divergence,
    slow_gradient,
)
from tests.support.distillation import (
    SAMPLED,
    WITH_TEACHER,
    distill_config,
    full_targets,
    measure,
)

VOCAB = 6

logits_lists = st.lists(st.floats(-6, 6), min_size=VOCAB, max_size=VOCAB)


def _zero(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _oracle(
    student: list[float], teacher: OracleTeacher | None, config: DistillConfig
) -> tuple[float, list[float]]:
    def value(logits: list[float]) -> float:
        return slow_divergence(logits, teacher, SAMPLED, config)

    return value(student), slow_gradient(value, student)


def _assert_equal_to_oracle(
    student: list[float],
    targets: Targets | None,
    teacher: OracleTeacher | None,
    config: DistillConfig,
) -> None:
    values, slopes = measure(torch.tensor([student], dtype=torch.float64), targets, config)
    expected, expected_slopes = _oracle(student, teacher, config)
    assert float(values) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert slopes[0].tolist() == pytest.approx(expected_slopes, rel=1e-6, abs=1e-6)


CONFIGS = {
    "forward_kl": {"name": "forward_kl"},
    "reverse_kl": {"name": "reverse_kl"},
    "cross_entropy": {"name": "cross_entropy"},
    "jsd": {"name": "jsd"},
    "jsd beta 0.001": {"name": "jsd", "beta": 0.001},
    "jsd beta 0.999": {"name": "jsd", "beta": 0.999},
    "warm": {"name": "reverse_kl", "temperature": 2.0},
    "cold jsd": {"name": "jsd", "beta": 0.2, "temperature": 0.5},
    "mixed reverse_kl": {
        "name": "reverse_kl",
        "entropy_aware": EntropyAwareConfig(threshold_nats=1.0, forward_weight=0.3),
    },
    "mixed jsd": {
        "name": "jsd",
        "beta": 0.7,
        "entropy_aware": EntropyAwareConfig(threshold_nats=1.0, forward_weight=0.5),
    },
}


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
@settings(deadline=None, max_examples=25)
@given(student=logits_lists, teacher=logits_lists, top_k=st.sampled_from((0, 1, 2, 5, 6)))
def test_values_and_gradients_equal_the_loops(
    fields: dict[str, Any], student: list[float], teacher: list[float], top_k: int
) -> None:
    """``top_k`` 0: exact."""
    config = distill_config(**fields, exact=top_k == 0)
    full = full_targets(teacher)
    probabilities = full.logprobs[0].exp().tolist()
    if top_k == 0:
        _assert_equal_to_oracle(student, full, full_teacher(probabilities), config)
        return
    targets = keep_top_k(full, top_k)
    oracle = kept_teacher(probabilities, targets.rows[0].tolist())
    _assert_equal_to_oracle(student, targets, oracle, config)


@settings(deadline=None, max_examples=25)
@given(logits_lists, st.sampled_from((1.0, 0.5, 3.0)))
def test_sampled_nll_equals_the_loops(student: list[float], temperature: float) -> None:
    config = distill_config("sampled_nll", temperature=temperature)
    _assert_equal_to_oracle(student, None, None, config)


@pytest.mark.parametrize("name", WITH_TEACHER)
@pytest.mark.parametrize("kept", [[0, 3], [4], [], [0, 1, 2, 3, 4]])
def test_kept_tokens_need_not_be_the_likeliest_and_places_may_be_empty(
    name: str, kept: list[int]
) -> None:
    """Across tokenizers only some of the teacher's tokens are tokens of the student."""
    full = full_targets([0.0, 2.0, -1.0, 1.0, 0.5, -3.0])
    probabilities = full.logprobs[0].exp()
    places = [*kept[:1], -1, *kept[1:], -1]
    oracle = kept_teacher(probabilities.tolist(), kept)
    assert oracle.tail is not None
    logprobs = [full.logprobs[0, place].item() if place >= 0 else -math.inf for place in places]
    targets = TopKRows(
        torch.tensor([places]),
        torch.tensor([logprobs], dtype=torch.float64),
        torch.tensor([oracle.tail], dtype=torch.float64).log(),
        torch.tensor([oracle.entropy]),
    )
    _assert_equal_to_oracle([1.0, -2.0, 0.0, 0.3, 2.0, 1.0], targets, oracle, distill_config(name))


@settings(deadline=None, max_examples=50)
@given(logits_lists, logits_lists, st.sampled_from(list(CONFIGS)))
def test_all_tokens_kept_is_exact(student: list[float], teacher: list[float], name: str) -> None:
    full = full_targets(teacher)
    row = torch.tensor([student], dtype=torch.float64)
    found = measure(row, keep_top_k(full, VOCAB), distill_config(**CONFIGS[name]))
    expected = measure(row, full, distill_config(**CONFIGS[name], exact=True))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_peer_10_reverse_kl_keeps_the_tail() -> None:
    """k = 2, V = 4 by hand: without the tail, pushing mass out of the kept tokens would pay."""
    teacher = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    student = torch.tensor([[0.2, 0.1, 0.3, 0.4]], dtype=torch.float64)
    targets = keep_top_k(FullTargets(teacher.log()), 2)
    values, slopes = measure(student.log(), targets, distill_config("reverse_kl"))

    kept = 0.2 * math.log(0.2 / 0.4) + 0.1 * math.log(0.1 / 0.3)
    expected = kept + 0.7 * math.log(0.7 / 0.3)
    assert float(values) == pytest.approx(expected, abs=1e-12)
    assert kept < 0 < expected
    by_hand = [
        0.2 * (math.log(0.5) - expected),
        0.1 * (math.log(1 / 3) - expected),
        0.3 * (math.log(7 / 3) - expected),
        0.4 * (math.log(7 / 3) - expected),
    ]
    assert slopes[0].tolist() == pytest.approx(by_hand, abs=1e-12)
    assert (slopes[0, :2] < 0).all(), "descent gives mass to the kept tokens"
    assert (slopes[0, 2:] > 0).all(), "and takes it from the tail"


@settings(deadline=None, max_examples=50)
@given(logits_lists, logits_lists, st.booleans())
def test_jsd_at_its_ends_is_a_kl(student: list[float], teacher: list[float], exact: bool) -> None:
    """beta is the teacher's weight: JSD / beta -> forward KL, JSD / (1 - beta) -> reverse KL."""
    full = full_targets(teacher)
    targets = full if exact else keep_top_k(full, 2)
    row = torch.tensor([student], dtype=torch.float64)
    tiny = 2.0**-30
    for beta, share, kl in ((tiny, tiny, "forward_kl"), (1 - tiny, tiny, "reverse_kl")):
        found = measure(row, targets, distill_config("jsd", beta=beta, exact=exact))
        limit = measure(row, targets, distill_config(kl, exact=exact))
        for one, other in zip(found, limit, strict=True):
            torch.testing.assert_close(one / share, other, rtol=1e-3, atol=2e-5)


@settings(deadline=None, max_examples=50)
@given(logits_lists, logits_lists, st.sampled_from((0, 1, 3)))
def test_jsd_is_symmetric_at_one_half(one: list[float], other: list[float], top_k: int) -> None:
    """Over the same outcomes: tokens 0 .. k - 1 are kept on both sides."""

    def value(student: list[float], teacher: list[float]) -> float:
        full = full_targets(teacher)
        if top_k == 0:
            row = torch.tensor([student], dtype=torch.float64)
            return float(measure(row, full, distill_config("jsd", exact=True))[0])
        targets = TopKRows(
            torch.arange(top_k)[None],
            full.logprobs[:, :top_k],
            full.logprobs[:, top_k:].logsumexp(1),
            _zero(1).double(),
        )
        return float(
            measure(torch.tensor([student], dtype=torch.float64), targets, distill_config("jsd"))[0]
        )

    assert value(one, other) == pytest.approx(value(other, one), abs=1e-13)
    assert value(one, other) <= math.log(2)


@settings(deadline=None, max_examples=100)
@given(logits_lists, logits_lists, st.sampled_from(WITH_TEACHER[:3]), st.sampled_from((0, 1, 2)))
def test_a_divergence_is_never_negative_and_zero_only_between_equals(
    student: list[float], teacher: list[float], name: str, top_k: int
) -> None:
    full = full_targets(teacher)
    exact = top_k == 0
    targets: Targets = full if exact else keep_top_k(full, top_k)
    row = torch.tensor([student], dtype=torch.float64)
    value, slopes = measure(row, targets, distill_config(name, exact=exact))
    policy = row.log_softmax(1).exp()
    if isinstance(targets, FullTargets):
        gap = (policy - full.logprobs.exp()).abs().max()
    else:
        gap = (policy.gather(1, targets.rows) - targets.logprobs.exp()).abs().max()
    # Pinsker, and its like for JSD, over the outcomes.
    assert float(value) >= float(gap) ** 2 / 8 - 1e-14
    assert abs(float(slopes.sum())) < 1e-13, "adding a constant to all logits changes nothing"

    same, none = measure(full.logprobs + 3.0, targets, distill_config(name, exact=exact))
    assert abs(float(same)) < 1e-14
    assert float(none.abs().max()) < 1e-14


@settings(deadline=None, max_examples=100)
@given(logits_lists, logits_lists, st.sampled_from((0.1, 0.5, 0.9)))
def test_the_bucket_loses_what_happens_inside_the_tail(
    student: list[float], teacher: list[float], beta: float
) -> None:
    """Value and gradient stay within the bounds of docs/math.md section 9."""
    full = full_targets(teacher)
    targets = keep_top_k(full, 2)
    row = torch.tensor([student], dtype=torch.float64)
    policy = row.log_softmax(1)
    in_tail = torch.ones(VOCAB, dtype=torch.bool)
    in_tail[targets.rows[0]] = False
    s, p = policy[0, in_tail], full.logprobs[0, in_tail]
    m = torch.logaddexp(s + math.log(1 - beta), p + math.log(beta))
    mass = {"s": float(s.exp().sum()), "p": float(p.exp().sum()), "m": float(m.exp().sum())}
    s, p, m = s.log_softmax(0), p.log_softmax(0), m.log_softmax(0)

    def kl(one: Tensor, other: Tensor) -> float:
        return float((one.exp() * (one - other)).sum())

    lost = {
        "forward_kl": mass["p"] * kl(p, s),
        "reverse_kl": mass["s"] * kl(s, p),
        "jsd": beta * mass["p"] * kl(p, m) + (1 - beta) * mass["s"] * kl(s, m),
    }
    bound = {
        "forward_kl": 2 * mass["p"],
        "reverse_kl": mass["s"] * (2 * kl(s, p) + 2 / math.e),
        "jsd": (1 - beta) * mass["s"] * (2 * kl(s, m) + 2 / math.e),
    }
    for name, expected in lost.items():
        exact, exact_slopes = measure(row, full, distill_config(name, beta=beta, exact=True))
        bucketed, slopes = measure(row, targets, distill_config(name, beta=beta))
        assert float(exact - bucketed) == pytest.approx(expected, abs=1e-12)
        assert float((exact_slopes - slopes).abs().sum()) <= bound[name] + 1e-12
        if name == "forward_kl":
            torch.testing.assert_close(slopes[0, ~in_tail], exact_slopes[0, ~in_tail])
    assert lost["jsd"] <= mass["m"] * math.log(2) + 1e-12


def test_entropy_aware_looks_at_the_teachers_whole_entropy_row_by_row() -> None:
    """Both rows keep the same two tokens and tail; only inside the tail do they differ."""
    sure, unsure = [0.5, 0.2, 0.3, 0.0, 0.0], [0.5, 0.2, 0.1, 0.1, 0.1]
    full = FullTargets(torch.tensor([sure, unsure], dtype=torch.float64).log())
    targets = keep_top_k(full, 1)
    low, high = targets.entropies.tolist()
    row = torch.tensor([[0.3, -1.0, 0.0, 2.0, 0.5]], dtype=torch.float64).expand(2, 5)
    mixture = EntropyAwareConfig(threshold_nats=(low + high) / 2, forward_weight=0.25)
    found, slopes = measure(row, targets, distill_config("reverse_kl", entropy_aware=mixture))
    reverse, reverse_slopes = measure(row, targets, distill_config("reverse_kl"))
    forward, forward_slopes = measure(row, targets, distill_config("forward_kl"))
    assert torch.equal(found[0], reverse[0])
    assert torch.equal(slopes[0], reverse_slopes[0])
    assert float(found[1]) == pytest.approx(float(0.25 * forward[1] + 0.75 * reverse[1]))
    torch.testing.assert_close(slopes[1], 0.25 * forward_slopes[1] + 0.75 * reverse_slopes[1])

    at_threshold = EntropyAwareConfig(threshold_nats=high, forward_weight=0.25)
    found, _ = measure(row, targets, distill_config("reverse_kl", entropy_aware=at_threshold))
    assert torch.equal(found, reverse), "rows above the threshold, not at it"


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_rows_do_not_see_each_other(
    fields: dict[str, Any], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order, company and the blocks of the computation change nothing."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(7, 9, generator=generator, dtype=torch.float64) * 3
    teacher = torch.randn(7, 9, generator=generator, dtype=torch.float64)
    teacher *= torch.tensor([0.1, 9.0, 1.0, 9.0, 9.0, 0.5, 9.0])[:, None]  # unsure and sure rows
    full = FullTargets(teacher.log_softmax(1))
    targets: Targets = full if exact else keep_top_k(full, 3)
    config = distill_config(**fields, exact=exact)
    expected = measure(student, targets, config)
    order = torch.tensor([4, 0, 6, 2, 5, 1, 3])
    shuffled = type(targets)(*(field[order] for field in targets))
    monkeypatch.setitem(distribution._BLOCK_ELEMENTS, "cpu", 20)
    found = measure(student[order], shuffled, config)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other[order], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", [*WITH_TEACHER, "sampled_nll"])
@pytest.mark.parametrize("exact", [True, False])
def test_bfloat16_logits_are_measured_in_float32(name: str, exact: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    student = torch.randn(5, 50, generator=generator).bfloat16()
    full = FullTargets(torch.randn(5, 50, generator=generator).log_softmax(1))
    targets = full if exact else keep_top_k(full, 4)
    values, slopes = measure(student, targets, distill_config(name, exact=exact))
    expected, expected_slopes = measure(
        student.double(), targets, distill_config(name, exact=exact)
    )
    assert values.dtype == torch.float32
    assert slopes.dtype == torch.bfloat16
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slopes.double(), expected_slopes, rtol=2**-8, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(logits_lists, min_size=1, max_size=3), st.integers(1, 8))
def test_keep_top_k_keeps_the_likeliest_and_sums_the_rest(
    teacher: list[list[float]], top_k: int
) -> None:
    full = full_targets(*teacher)
    found = keep_top_k(full, top_k)
    for row, logprobs in enumerate(full.logprobs.tolist()):
        ranked = sorted(logprobs, reverse=True)
        assert found.logprobs[row].tolist() == ranked[:top_k]
        assert [logprobs[place] for place in found.rows[row]] == ranked[:top_k]
        assert len(set(found.rows[row].tolist())) == min(top_k, VOCAB)
        rest = math.fsum(map(math.exp, ranked[top_k:]))
        assert float(found.tail_logprobs[row].exp()) == pytest.approx(rest, abs=1e-15)
        entropy = full_teacher([math.exp(value) for value in logprobs]).entropy
        assert float(found.entropies[row]) == pytest.approx(entropy, abs=1e-12)


def test_keep_top_k_keeps_no_token_without_mass() -> None:
    found = keep_top_k(full_targets([0.0, -math.inf, 1.0]), 3)
    assert found.rows.tolist() == [[2, 0, -1]]
    assert found.tail_logprobs.tolist() == [-math.inf]


def _top_k(rows: Tensor, num_rows: int = 2) -> TopKRows:
    return TopKRows(rows, torch.zeros(num_rows, 2), torch.zeros(num_rows), torch.zeros(num_rows))


@pytest.mark.parametrize(
    ("targets", "exact", "message"),
    [
        (None, False, "needs TopKRows, found NoneType"),
        (FullTargets(torch.zeros(2, 3)), False, "needs TopKRows, found FullTargets"),
        (_top_k(_zero(2, 2)), True, "needs FullTargets, found TopKRows"),
        (FullTargets(torch.zeros(2, 4)), True, r"\[\[2, 4\]\] for \[2, 3\] logits"),
        (_top_k(_zero(2, 2), 3), False, r"expected \[\[2, 2\], \[2, 2\], \[2\], \[2\]\]"),
        (_top_k(_zero(2, 2) + 3), False, "rows 3 .. 3 of a head of 3 rows"),
        (_top_k(_zero(2, 2) - 2), False, "rows -2 .. -2 of a head of 3 rows"),
    ],
)
def test_targets_that_do_not_fit_are_refused(
    targets: Targets | None, exact: bool, message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        divergence(torch.zeros(2, 3), targets, _zero(2), distill_config("reverse_kl", exact=exact))


def test_sampled_rows_must_be_one_per_row() -> None:
    with pytest.raises(BatchError, match=r"\[3\] sampled rows for 2 rows of logits"):
        divergence(torch.zeros(2, 3), None, _zero(3), distill_config("sampled_nll"))
