"""Credit: from the log-ratio of units to one weight per student token.

Shapes: S student tokens, R teacher tokens, M units, of one span. One call is one span: no sum and
no stop crosses a span.

How the parts compose, in this order (docs/math.md section 3):

1. ``delta_m``: summed student logprobs minus summed teacher logprobs over unit m, in nats.
2. lookahead adds the following units' delta; 3. clip bounds that sum, symmetrically.
4. the rule shares the clipped sum ``c_m`` among the unit's n tokens. Under ``unit`` each gets
   ``c_m``; under the other rules the n weights add up to ``c_m``.
5. stop sets the weights behind the first blunder to 0. It looks at delta, before 2 and 3, and
   changes no sum: the unit of the blunder still counts the unit behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.alignment.mau import Units
from miniverl_dist.errors import AlignmentError, ConfigError

CreditRule = Literal["unit", "mean", "proportional", "equal_teacher"]
Lookahead = int | Literal["return_to_go"]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Logprobs = Sequence[float] | NDArray[np.floating]


def opd_weights(
    student_logprobs: Logprobs,
    teacher_logprobs: Logprobs,
    units: Units,
    *,
    rule: CreditRule,
    clip: float | None,
    lookahead: Lookahead = 1,
    stop_after: float | None = None,
    discount: float = 1.0,
) -> tuple[FloatArray, BoolArray]:
    """Turn unit-level log-ratios into one weight per student token.

    A positive weight says that the student likes the token more than the teacher does:
    ``advantage.token_advantages`` subtracts it.

    Args:
        student_logprobs: [S] nats, <= 0, of the rollout, at the sampling temperature.
        teacher_logprobs: [R] nats, <= 0.
        units: of these two tokenisations, from ``mau.align``.
        rule: how a unit's sum is shared: ``unit`` (each token gets all of it), ``mean``,
            ``proportional`` (to the student's logprobs), ``equal_teacher`` (own logprob minus an
            equal part of the teacher's; what lookahead and clip add is shared equally).
        clip: bound in nats on the absolute value of a unit's sum, after lookahead; None: no bound.
        lookahead: how many following units' delta each unit adds, or ``"return_to_go"``: all of
            them, each discounted once more.
        stop_after: nats; behind the first unit with a larger delta all weights are 0 (the mask
            stays True, see ``stopped``); None: never.
        discount: in [0, 1]; used by ``"return_to_go"`` only.

    Returns:
        ``(weights, mask)``, both [S]. ``mask`` is False and ``weights`` NaN where no unit covers
        the token: a caller that forgets the mask gets NaN, not 0. Where student and teacher agree
        on every unit (up to rounding), all weights are exactly 0, but under ``equal_teacher``.

    Raises:
        AlignmentError: lengths differ from those the units were built from, or a logprob is not
            finite.
        ConfigError: an unknown rule, or a number outside its range.

    Source:
        SimCT, arXiv:2605.07711; ``proportional`` is DPCA; estimator study in docs/math.md
        section 4; oracle tests/reference/credit.py.
    """
    _check_options(rule, clip, lookahead, stop_after, discount)
    student, teacher = _checked(student_logprobs, teacher_logprobs, units)
    delta = _delta(student, teacher, units)
    credit = _look_ahead(delta, lookahead, discount)
    if clip is not None:
        credit = np.clip(credit, -clip, clip)

    mask = units.student_unit >= 0
    token_unit = units.student_unit[mask]
    shared = _share(rule, student[mask], token_unit, credit)
    shared[token_unit > _stop_unit(delta, stop_after)] = 0.0
    weights = np.full(student.size, np.nan)
    weights[mask] = shared
    return weights, mask


def unit_log_ratios(
    student_logprobs: Logprobs, teacher_logprobs: Logprobs, units: Units
) -> FloatArray:
    """[M] delta of each unit in nats, before lookahead and clip; their sum samples the reverse KL.

    Raises:
        AlignmentError: as for ``opd_weights``.
    """
    student, teacher = _checked(student_logprobs, teacher_logprobs, units)
    return _delta(student, teacher, units)


def stopped(
    student_logprobs: Logprobs,
    teacher_logprobs: Logprobs,
    units: Units,
    *,
    stop_after: float | None,
) -> BoolArray:
    """[S] True for the tokens whose weight is 0 because they stand behind a stop.

    Their 0 is no sample of the KL. A baseline must leave them out: subtracting its (positive)
    mean from their 0 would reward every token that follows a blunder.

    Raises:
        AlignmentError, ConfigError: as for ``opd_weights``.
    """
    _check_stop_after(stop_after)
    delta = unit_log_ratios(student_logprobs, teacher_logprobs, units)
    return units.student_unit > _stop_unit(delta, stop_after)


def _check_options(
    rule: str, clip: float | None, lookahead: int | str, stop_after: float | None, discount: float
) -> None:
    if rule not in get_args(CreditRule):
        raise ConfigError(f"unknown credit rule {rule!r}; expected one of {get_args(CreditRule)}")
    if clip is not None and not clip > 0:
        raise ConfigError(f"clip is {clip}; expected nats > 0, or None for no bound")
    if lookahead != "return_to_go" and (not isinstance(lookahead, int) or lookahead < 0):
        raise ConfigError(
            f"lookahead is {lookahead!r}; expected a number of units >= 0, or 'return_to_go'"
        )
    if not 0 <= discount <= 1:
        raise ConfigError(f"discount is {discount}; expected a number in [0, 1]")
    _check_stop_after(stop_after)


def _check_stop_after(stop_after: float | None) -> None:
    if stop_after is not None and not stop_after >= 0:
        raise ConfigError(f"stop_after is {stop_after}; expected nats >= 0, or None for no stop")


def _checked(
    student_logprobs: Logprobs, teacher_logprobs: Logprobs, units: Units
) -> tuple[FloatArray, FloatArray]:
    return (
        _checked_side(student_logprobs, units.student_unit.size, "student"),
        _checked_side(teacher_logprobs, units.teacher_unit.size, "teacher"),
    )


def _checked_side(logprobs: Logprobs, num_tokens: int, whose: str) -> FloatArray:
    array = np.asarray(logprobs, dtype=np.float64)
    if array.shape != (num_tokens,):
        raise AlignmentError(
            f"{whose} logprobs have shape {array.shape}, the units were built from {num_tokens} "
            f"{whose} tokens; pass the logprobs of the same span"
        )
    broken = np.flatnonzero(~np.isfinite(array))
    if broken.size:
        where = int(broken[0])
        raise AlignmentError(
            f"{whose} logprob of token {where} is {array[where]} ({broken.size} of {num_tokens} "
            "are not finite); such a score is a refusal (not_finite) and must not reach credit"
        )
    return array


def _delta(student: FloatArray, teacher: FloatArray, units: Units) -> FloatArray:
    """[M]; a difference within the rounding of the two sums is exactly 0."""
    student_sum = _unit_sum(student, units.student_unit, units.num_units)
    teacher_sum = _unit_sum(teacher, units.teacher_unit, units.num_units)
    delta = student_sum - teacher_sum
    # Adding n numbers loses at most n - 1 half-ulps of the sum; without this, agreement would
    # leave residues that depend on how the teacher cuts the same text.
    num_terms = _unit_count(units.student_unit, units.num_units) + _unit_count(
        units.teacher_unit, units.num_units
    )
    rounding = np.finfo(np.float64).eps * num_terms * (np.abs(student_sum) + np.abs(teacher_sum))
    delta[np.abs(delta) <= rounding] = 0.0
    return delta


def _unit_sum(values: FloatArray, unit: NDArray[np.int32], num_units: int) -> FloatArray:
    # Shifted by one, tokens without a unit fall into bin 0, which is cut off.
    sums = np.bincount(unit + 1, weights=values, minlength=num_units + 1)[1:]
    return sums.astype(np.float64, copy=False)  # without tokens, bincount answers integers


def _unit_count(unit: NDArray[np.int32], num_units: int) -> NDArray[np.intp]:
    return np.bincount(unit + 1, minlength=num_units + 1)[1:]


def _look_ahead(delta: FloatArray, lookahead: Lookahead, discount: float) -> FloatArray:
    """[M] delta plus the following units' delta."""
    if isinstance(lookahead, int):
        total = delta.copy()
        for ahead in range(1, min(lookahead, delta.size - 1) + 1):
            total[:-ahead] += delta[ahead:]
        return total
    # Doubling: after each round a unit holds its next 2 * reach deltas, in log2(M) rounds. Dividing
    # a cumulative sum by the discount's powers would be shorter, and underflow on long spans.
    total, reach = delta.copy(), 1
    while reach < delta.size:
        total[:-reach] = total[:-reach] + discount**reach * total[reach:]
        reach *= 2
    return total


def _share(
    rule: CreditRule,
    student: FloatArray,
    token_unit: NDArray[np.int32],
    credit: FloatArray,
) -> FloatArray:
    """Share each unit's credit among its tokens; arrays of the covered tokens only."""
    own = credit[token_unit]
    if rule == "unit":
        return own
    count = np.bincount(token_unit, minlength=credit.size)[token_unit]
    if rule == "mean":
        return own / count
    total = np.bincount(token_unit, weights=student, minlength=credit.size)[token_unit]
    if rule == "proportional":
        share = 1.0 / count
        np.divide(student, total, out=share, where=total != 0)
        return own * share
    # log p_j - L_T / n + (credit - delta) / n, since L_T = L_S - delta.
    return student - (total - own) / count


def _stop_unit(delta: FloatArray, stop_after: float | None) -> int:
    """Index of the first unit with a larger delta; behind the last one where there is none."""
    if stop_after is None:
        return delta.size
    beyond = np.flatnonzero(delta > stop_after)
    return int(beyond[0]) if beyond.size else delta.size
