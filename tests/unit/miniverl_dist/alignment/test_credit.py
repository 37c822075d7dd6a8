"""Credit against a loop oracle, and its estimators against enumerated gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.alignment.credit import (
    BoolArray,
    CreditRule,
    Lookahead,
    opd_weights,
    stopped,
    unit_log_ratios,
)
from miniverl_dist.alignment.mau import align
from miniverl_dist.errors import AlignmentError, ConfigError
from scripts import credit_study
from tests.reference.credit import slow_weights
from tests.reference.enumeration import (
    STUDY,
    Case,
    FloatArray,
    Weigh,
    estimator_weights,
    expected_gradient,
    flow,
    growth,
    kl_gradient,
    prefix_model,
    sequence_kl,
    warm_case,
    weigher,
)

RULES = get_args(CreditRule)
SUMMING_RULES = tuple(rule for rule in RULES if rule != "unit")
PLAIN: dict[str, Any] = {"clip": None, "lookahead": 0}


@dataclass(frozen=True)
class Span:
    """Two tokenisations of one span with their logprobs."""

    student_ends: list[int]
    teacher_ends: list[int]
    student: list[float]
    teacher: list[float]

    def weights(self, **options: Any) -> tuple[FloatArray, BoolArray]:
        units = align(self.student_ends, self.teacher_ends)
        return opd_weights(self.student, self.teacher, units, **options)

    def slow(self, **options: Any) -> list[float | None]:
        return slow_weights(
            self.student_ends, self.teacher_ends, self.student, self.teacher, **options
        )


FLOATS = st.floats(-20, -1e-30) | st.just(0.0)
EIGHTHS = st.integers(-80, 0).map(lambda eighths: eighths / 8)
"""Sums of these are exact, so that both sides of a comparison stop at the same unit."""


@st.composite
def ends(draw: st.DrawFn, num_bytes: int) -> list[int]:
    inner = draw(st.sets(st.integers(0, num_bytes)))
    byteless = draw(st.lists(st.integers(0, num_bytes), max_size=2))
    inner |= {num_bytes} if num_bytes else set()
    return sorted([*inner, *(end for end in byteless if end in inner)])


@st.composite
def spans(draw: st.DrawFn, logprob: st.SearchStrategy[float] = FLOATS) -> Span:
    num_bytes = draw(st.integers(0, 24))
    student_ends, teacher_ends = draw(ends(num_bytes)), draw(ends(num_bytes))
    return Span(
        student_ends,
        teacher_ends,
        draw(st.lists(logprob, min_size=len(student_ends), max_size=len(student_ends))),
        draw(st.lists(logprob, min_size=len(teacher_ends), max_size=len(teacher_ends))),
    )


options = st.fixed_dictionaries(
    {
        "rule": st.sampled_from(RULES),
        "clip": st.sampled_from([None, 0.5, 3.0]),
        "lookahead": st.sampled_from([0, 1, 2, 100, "return_to_go"]),
        "stop_after": st.sampled_from([None, 0.0, 3.0]),
        "discount": st.sampled_from([0.0, 0.9, 1.0]),
    }
)

# Units: "ab" (student a, b; teacher ab), "c" (1:1), "de" (student de; teacher d, e).
THREE = Span([1, 2, 3, 5], [2, 3, 4, 5], [-1.0, -3.0, -0.5, -2.0], [-1.0, -1.5, -0.25, -0.75])


@settings(deadline=None, max_examples=400)
@given(spans(EIGHTHS), options)
def test_equals_the_loop_oracle(span: Span, chosen: dict[str, Any]) -> None:
    weights, mask = span.weights(**chosen)
    expected = span.slow(**chosen)
    assert mask.tolist() == [weight is not None for weight in expected]
    assert np.isnan(weights[~mask]).all()
    np.testing.assert_allclose(weights[mask], [w for w in expected if w is not None], atol=1e-9)


@settings(deadline=None)
@given(spans())
def test_mass_is_conserved(span: Span) -> None:
    units = align(span.student_ends, span.teacher_ends)
    covered = np.array(span.student)[units.student_unit >= 0].sum()
    covered_teacher = np.array(span.teacher)[units.teacher_unit >= 0].sum()
    deltas = unit_log_ratios(span.student, span.teacher, units)
    assert deltas.sum() == pytest.approx(covered - covered_teacher, abs=1e-9)
    for rule in SUMMING_RULES:
        weights, mask = span.weights(rule=rule, **PLAIN)
        assert weights[mask].sum() == pytest.approx(covered - covered_teacher, abs=1e-9)


@settings(deadline=None)
@given(spans(), options)
def test_weights_of_a_unit_add_up_to_its_clipped_sum(span: Span, chosen: dict[str, Any]) -> None:
    units = align(span.student_ends, span.teacher_ends)
    chosen = chosen | {"stop_after": None}
    whole, mask = span.weights(**chosen | {"rule": "unit"})
    for rule in SUMMING_RULES:
        weights, _ = span.weights(**chosen | {"rule": rule})
        for unit in range(units.num_units):
            inside = units.student_unit == unit
            assert weights[inside].sum() == pytest.approx(whole[inside][0], abs=1e-9)
    assert mask.tolist() == (units.student_unit >= 0).tolist()


@settings(deadline=None)
@given(spans(), options, st.integers(1, 7))
def test_agreement_gives_exactly_zero(span: Span, chosen: dict[str, Any], parts: int) -> None:
    # The teacher spells every student token in `parts` pieces of equal logprob, so that the two
    # sums differ by rounding only.
    bytes_per_token = [8 * b for b in span.student_ends]
    teacher_ends, teacher = [], []
    start = 0
    for end, logprob in zip(bytes_per_token, span.student, strict=True):
        if end > start:
            teacher_ends += [*range(start + 1, start + parts), end]
            teacher += [logprob / parts] * parts
        start = end
    agreed = Span(bytes_per_token, teacher_ends, span.student, teacher)
    rule = chosen["rule"] if chosen["rule"] != "equal_teacher" else "unit"
    weights, mask = agreed.weights(**chosen | {"rule": rule})
    assert (weights[mask] == 0).all()


def test_rules_on_a_span_worked_by_hand() -> None:
    # delta: -4 + 1 = -3;  -0.5 + 1.5 = 1;  -2 + 1 = -1
    expected = {
        "unit": [-3.0, -3.0, 1.0, -1.0],
        "mean": [-1.5, -1.5, 1.0, -1.0],
        "proportional": [-0.75, -2.25, 1.0, -1.0],
        "equal_teacher": [-0.5, -2.5, 1.0, -1.0],
    }
    for rule, weights in expected.items():
        np.testing.assert_allclose(THREE.weights(rule=rule, **PLAIN)[0], weights)


def test_lookahead_is_one_by_default_and_the_last_unit_has_only_its_own() -> None:
    weights, _ = THREE.weights(rule="unit", clip=None)
    np.testing.assert_allclose(weights, [-2.0, -2.0, 0.0, -1.0])


def test_return_to_go_discounts_each_further_unit() -> None:
    weights, _ = THREE.weights(rule="unit", clip=None, lookahead="return_to_go", discount=0.5)
    np.testing.assert_allclose(weights, [-2.75, -2.75, 0.5, -1.0])


def test_long_return_to_go_does_not_underflow() -> None:
    num_tokens = 5000
    ends = list(range(1, num_tokens + 1))
    span = Span(ends, ends, [-1.0] * num_tokens, [-2.0] * num_tokens)
    weights, _ = span.weights(rule="unit", clip=None, lookahead="return_to_go", discount=0.5)
    np.testing.assert_allclose(weights[:-60], 2.0)


def test_clip_bounds_the_sum_not_the_parts() -> None:
    ends = [1, 2]
    span = Span(ends, ends, [-9.0, -1.0], [-1.0, -9.0])
    assert span.weights(rule="unit", clip=3.0)[0].tolist() == [0.0, 3.0]  # -8 + 8, not -3 + 3
    span = Span(ends, ends, [-9.0, -1.0], [-1.0, -5.0])
    assert span.weights(rule="unit", clip=3.0)[0].tolist() == [-3.0, 3.0]  # -8 + 4, not -3 + 3


def test_stop_zeroes_what_follows_the_first_blunder_and_keeps_the_mask() -> None:
    ends = [1, 2, 3, 4]
    span = Span(ends, ends, [-1.0, -0.5, -1.0, -1.0], [-1.5, -4.5, -9.0, -0.5])
    weights, mask = span.weights(rule="unit", clip=None, lookahead=0, stop_after=3.0)
    assert weights.tolist() == [0.5, 4.0, 0.0, 0.0]
    assert mask.all()
    units = align(ends, ends)
    behind = stopped(span.student, span.teacher, units, stop_after=3.0)
    assert behind.tolist() == [False, False, True, True]
    assert not stopped(span.student, span.teacher, units, stop_after=None).any()


def test_stop_needs_a_larger_delta_before_clip_and_lookahead() -> None:
    ends = [1, 2, 3]
    span = Span(ends, ends, [-1.0, -1.0, -1.0], [-4.0, -4.0, -2.0])
    chosen = {"rule": "unit", "clip": 1.0, "lookahead": 1}
    assert span.weights(**chosen, stop_after=3.0)[0].tolist() == [1.0, 1.0, 1.0]  # 3 is not more
    assert span.weights(**chosen, stop_after=2.9)[0].tolist() == [1.0, 0.0, 0.0]


def test_stop_changes_no_sum() -> None:
    ends = [1, 2, 3]
    span = Span(ends, ends, [-1.0, -1.0, -1.0], [-5.0, -3.0, -2.0])
    weights, _ = span.weights(rule="unit", clip=None, lookahead=1, stop_after=3.0)
    assert weights.tolist() == [6.0, 0.0, 0.0]


def test_byteless_token_is_not_behind_a_stop() -> None:
    units = align([1, 1, 2], [1, 2])
    behind = stopped([-1.0, -1.0, -1.0], [-9.0, -1.0], units, stop_after=3.0)
    assert behind.tolist() == [False, False, True]


def test_empty_span() -> None:
    weights, mask = Span([], [], [], []).weights(rule="mean", clip=3.0, stop_after=3.0)
    assert weights.dtype == np.float64
    assert weights.size == mask.size == 0


def test_proportional_shares_equally_where_the_student_is_certain() -> None:
    span = Span([1, 2], [2], [0.0, 0.0], [-3.0])
    assert span.weights(rule="proportional", **PLAIN)[0].tolist() == [1.5, 1.5]


@pytest.mark.parametrize(
    ("student", "teacher", "says"),
    [
        ([-1.0], [-1.0, -1.0], r"student logprobs have shape \(1,\).* 2 student tokens"),
        ([-1.0, -1.0], [-1.0], r"teacher logprobs have shape \(1,\)"),
        ([-1.0, np.nan], [-1.0, -1.0], "student logprob of token 1 is nan"),
        ([-1.0, -1.0], [-np.inf, -1.0], "teacher logprob of token 0 is -inf"),
    ],
)
def test_refuses_foreign_lengths_and_broken_numbers(
    student: list[float], teacher: list[float], says: str
) -> None:
    units = align([1, 2], [1, 2])
    with pytest.raises(AlignmentError, match=says):
        opd_weights(student, teacher, units, rule="unit", clip=3.0)
    with pytest.raises(AlignmentError, match=says):
        stopped(student, teacher, units, stop_after=3.0)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rule", "equal"),
        ("clip", 0.0),
        ("clip", float("nan")),
        ("lookahead", -1),
        ("lookahead", "all"),
        ("discount", 1.5),
        ("stop_after", -1.0),
    ],
)
def test_refuses_options_out_of_range(option: str, value: object) -> None:
    chosen: dict[str, Any] = {"rule": "unit", "clip": 3.0} | {option: value}
    with pytest.raises(ConfigError, match=option):
        THREE.weights(**chosen)


def test_tutorial_zero_width_token_takes_no_part_in_a_sum() -> None:
    span = Span([1, 1, 2], [1, 2, 2], [-1.0, -7.0, -2.0], [-1.5, -2.5, -7.0])
    weights, mask = span.weights(rule="unit", **PLAIN)
    assert weights[mask].tolist() == [0.5, 0.5]
    assert mask.tolist() == [True, False, True]


def test_tutorial_uncovered_token_gets_nan_not_a_bonus() -> None:
    # Reading "no teacher logprob" as 0.0 would make the weight negative, a bonus after the sign.
    weights, mask = Span([0, 1], [1], [-2.0, -1.0], [-1.0]).weights(rule="unit", clip=3.0)
    assert np.isnan(weights[0])
    assert not mask[0]


def test_tutorial_equal_split_rewards_within_an_agreed_unit() -> None:
    # Student and teacher agree on "ab" as a whole; the equal split still pushes a against b.
    span = Span([1, 2], [2], [-0.1, -1.9], [-2.0])
    np.testing.assert_allclose(span.weights(rule="equal_teacher", **PLAIN)[0], [0.9, -0.9])
    for rule in ("unit", "mean", "proportional"):
        assert span.weights(rule=rule, **PLAIN)[0].tolist() == [0.0, 0.0]


def test_peer_9_tool_tokens_have_no_weight() -> None:
    # model / tool / model: each model span is one call, the tool tokens between are in none.
    weights = np.full(6, np.nan)
    mask = np.zeros(6, dtype=bool)
    for start in (0, 4):
        own, covered = Span([1, 2], [1, 2], [-1.0, -1.0], [-2.0, -1.0]).weights(
            rule="unit", clip=3.0, lookahead=1
        )
        weights[start : start + 2], mask[start : start + 2] = own, covered
    assert mask.tolist() == [True, True, False, False, True, True]
    assert np.isnan(weights[2:4]).all()
    assert weights[mask].tolist() == [1.0, 0.0, 1.0, 0.0]  # no sum reaches across the tool


@settings(deadline=None)
@given(spans(), st.sampled_from([0, 1, "return_to_go"]), st.floats(0.1, 5))
def test_peer_11_clip_is_symmetric_and_keeps_the_sign(
    span: Span, lookahead: Lookahead, clip: float
) -> None:
    free, mask = span.weights(rule="unit", clip=None, lookahead=lookahead)
    bound, _ = span.weights(rule="unit", clip=clip, lookahead=lookahead)
    assert (np.sign(bound[mask]) == np.sign(free[mask])).all()
    assert (np.abs(bound[mask]) == np.minimum(np.abs(free[mask]), clip)).all()


# Estimators, exactly.


def bias(case: Case, logits: FloatArray, weigh: Weigh, of: str = "text") -> float:
    expected = expected_gradient(case, logits, estimator_weights(case, logits, weigh))
    return credit_study.relative_bias(expected, kl_gradient(case, logits, of=of))


@pytest.mark.parametrize("name", STUDY)
@pytest.mark.parametrize("of", ["text", "episode"])
def test_enumerated_gradient_is_the_derivative_of_the_kl(name: str, of: str) -> None:
    case, logits = STUDY[name](3)
    step = 1e-6 * np.eye(logits.size)
    numeric = [
        (sequence_kl(case, logits + d, of=of) - sequence_kl(case, logits - d, of=of)) / 2e-6
        for d in step
    ]
    np.testing.assert_allclose(kl_gradient(case, logits, of=of), numeric, atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_unit_is_unbiased_for_one_unit_and_the_others_are_not(seed: int) -> None:
    case, logits = STUDY["one unit"](seed)
    assert bias(case, logits, weigher("unit", 0)) < 1e-12
    for rule in SUMMING_RULES:
        assert bias(case, logits, weigher(rule, 0)) > 0.1


def test_tutorial_equal_split_is_biased() -> None:
    for seed in range(3):
        case, logits = STUDY["one unit"](seed)
        assert bias(case, logits, weigher("equal_teacher", 0)) > 0.1


@pytest.mark.parametrize("name", ["fixed units", "prefix"])
def test_return_to_go_is_unbiased_where_units_do_not_depend_on_the_sample(name: str) -> None:
    horizons: tuple[Lookahead, ...] = (0, 1, 2, "return_to_go")
    biases = np.array(
        [[bias(*STUDY[name](seed), weigher("unit", h)) for h in horizons] for seed in range(5)]
    )
    local, one, two, to_go = biases.mean(axis=0)
    assert local > one > two
    assert to_go < 1e-12


def test_no_horizon_is_unbiased_where_units_depend_on_the_sample() -> None:
    case, logits = STUDY["merging teacher"](0)
    assert bias(case, logits, weigher("unit", "return_to_go")) > 0.05


def test_several_spellings_leave_the_entropy_of_the_spelling() -> None:
    case, logits = STUDY["two spellings"](0)
    to_go = weigher("unit", "return_to_go")
    assert bias(case, logits, to_go, of="episode") < 1e-12
    assert bias(case, logits, to_go, of="text") > 0.05
    assert sequence_kl(case, logits, of="episode") < sequence_kl(case, logits, of="text")


@pytest.mark.parametrize("rule", RULES)
def test_prefix_defect_local_credit_rewards_the_wrong_short_token(rule: CreditRule) -> None:
    for seed in range(3):
        case, logits = warm_case(seed)
        rates = {}
        for ahead in (0, 1):
            weights = estimator_weights(case, logits, weigher(rule, ahead, clip=3.0))
            update = expected_gradient(case, logits, weights)
            rates[ahead] = growth(case, logits, b"<f", update)
        assert growth(case, logits, b"<f", kl_gradient(case, logits)) < 0
        assert rates[0] > 0.05
        assert rates[1] < -0.02 if rule == "unit" else rates[1] < rates[0]


def test_prefix_model_local_credit_raises_the_wrong_text_and_lookahead_lowers_it() -> None:
    case, logits = prefix_model()
    local = flow(case, logits, weigher("unit", 0, clip=3.0), rate=0.25, steps=20, watch=b"<f")
    ahead = flow(case, logits, weigher("unit", 1, clip=3.0), rate=0.25, steps=200, watch=b"<f")
    assert local[0] == ahead[0] == pytest.approx(0.0495)
    assert local[20] == pytest.approx(0.27, abs=0.02)
    assert max(ahead) == ahead[0]
    assert ahead[200] == pytest.approx(0.013, abs=0.001)


def test_the_tables_in_the_document_are_what_the_study_prints() -> None:
    text = credit_study.DOC.read_text(encoding="utf-8")
    stored = text.split(credit_study.BEGIN)[1].split(credit_study.END)[0].strip()
    assert stored == credit_study.study(), "run: python -m scripts.credit_study --write"
