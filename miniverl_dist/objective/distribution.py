"""Divergences between a teacher's and the student's next-token distributions, and their gradients.

Shapes: n rows, V vocabulary, k kept tokens, E outcomes: V (exact) or k + 1 (bucketed).

A row is a distribution over outcomes. Exact: every token is one. Bucketed: each kept token is one,
and all others together are the last one, the *tail*, on both sides. Values and gradients by the
outcomes' log-probabilities are the same few lines for both (``_compare``). The gradient by the
logits is written out by hand, in the memory of the logits: what the tail gets is shared among its
tokens by their own probabilities. Nothing is ever subtracted from 1: the student's tail is summed
over its own tokens, so it keeps its digits where the kept tokens hold nearly all mass.

Formulas, and what tail and floor do to them: docs/math.md section 9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miniverl_dist.config.lab import DistillConfig
from miniverl_dist.errors import BatchError

LOGPROB_FLOOR = -50.0
"""Nats. The teacher's log-probabilities below it, -inf too, count as this in every logarithm:
without a floor one impossible token makes reverse KL infinite. Also stands for the student's
log-probability of what it cannot write at all (an empty tail). e^-50 is beneath the resolution of
float64 at 1."""

_BLOCK_ELEMENTS = {"cpu": 1 << 20, "other": 1 << 26}


class FullTargets(NamedTuple):
    """The teacher's distribution over the rows of the student's head."""

    logprobs: Tensor
    """[n, V] nats, at the temperature of ``DistillConfig``; -inf: it cannot write this token."""


class TopKRows(NamedTuple):
    """The teacher's most likely tokens, and the mass of all others as one bucket."""

    rows: Tensor
    """[n, k] int64 distinct rows of the student's head; -1: no token in this place."""
    logprobs: Tensor
    """[n, k] nats; -inf where there is no token."""
    tail_logprobs: Tensor
    """[n] nats of all that is not kept; -inf where nothing is left."""
    entropies: Tensor
    """[n] nats of the teacher's whole distribution."""


Targets = FullTargets | TopKRows


class RowValues(NamedTuple):
    """What a call measured of its rows."""

    divergences: Tensor
    """[n] nats."""
    entropies: Tensor | None
    """[n] nats of the teacher's whole distribution; None where there is no teacher."""


def divergence(
    student_logits: Tensor, targets: Targets | None, sampled_rows: Tensor, config: DistillConfig
) -> Tensor:
    """The configured divergence of every row; differentiable once, by the student's logits.

    Args:
        student_logits: [n, V], not yet divided by ``config.temperature``.
        targets: None for ``sampled_nll`` only; of the kind that ``config.support`` names.
        sampled_rows: [n] int64 row of the head of the token that was written.
        config: Which divergence.

    Returns:
        [n] nats; float32 where the logits have less precision. Never negative but for rounding,
        where the teacher's mass is 1.

    Raises:
        BatchError: no targets where they are needed, of the wrong kind or of foreign shapes.
    """
    values: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        student_logits, targets, sampled_rows, config
    )
    return values


class _Divergence(torch.autograd.Function):
    """``overwrite_with_slopes`` on a copy of the logits."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch types its context so
        student_logits: Tensor,
        targets: Targets | None,
        sampled_rows: Tensor,
        config: DistillConfig,
    ) -> Tensor:
        dtype = torch.promote_types(student_logits.dtype, torch.float32)
        slopes = student_logits.to(dtype, copy=True).div_(config.temperature)
        values = overwrite_with_slopes(slopes, targets, sampled_rows, config).divergences
        ctx.save_for_backward(slopes.div_(config.temperature))
        ctx.logits_dtype = student_logits.dtype
        return values

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401 -- see forward
        grad_values: Tensor,
    ) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return (grad_values[:, None] * slopes).to(ctx.logits_dtype), None, None, None


def overwrite_with_slopes(
    logits: Tensor, targets: Targets | None, sampled_rows: Tensor, config: DistillConfig
) -> RowValues:
    """Measure the divergences and leave their gradients by ``logits`` in place of the logits.

    Args:
        logits: [n, V] float32 or float64, already divided by the temperature; destroyed.
        targets: See ``divergence``.
        sampled_rows: See ``divergence``.
        config: Its temperature is not used here.

    Raises:
        BatchError: see ``divergence``.
    """
    _check(logits, targets, sampled_rows, config)
    divergences = logits.new_empty(len(logits))
    entropies = logits.new_empty(len(logits)) if config.needs_teacher else None
    for rows in _row_blocks(logits):
        if targets is None or entropies is None:
            divergences[rows] = _sampled_nll(logits[rows], sampled_rows[rows])
        elif isinstance(targets, TopKRows):
            part = TopKRows(*(field[rows] for field in targets))
            divergences[rows] = _bucketed(logits[rows], part, config)
            entropies[rows] = part.entropies.to(logits.dtype)
        else:
            divergences[rows], entropies[rows] = _exact(
                logits[rows], targets.logprobs[rows], config
            )
    return RowValues(divergences, entropies)


def keep_top_k(targets: FullTargets, top_k: int, head_rows: Tensor | None = None) -> TopKRows:
    """The teacher's ``top_k`` most likely tokens of every row, and the rest summed on its own.

    Args:
        targets: Over the rows of the student's head, or of the teacher's own where ``head_rows``
            translates them.
        top_k: k; more than there are tokens keeps all.
        head_rows: [V] the student's row of each of these, -1 without one: such a token is never
            kept. None where the rows are the student's already.
    """
    full = targets.logprobs
    candidates = full if head_rows is None else full.masked_fill(head_rows < 0, -math.inf)
    logprobs, places = candidates.topk(min(top_k, full.shape[1]), dim=1)
    is_none = logprobs.isneginf()
    rows = places if head_rows is None else head_rows[places]
    # What was kept leaves; a place that kept nothing leaves its token in the rest.
    left = full.gather(1, places).masked_fill(~is_none, -math.inf)
    return TopKRows(
        rows=rows.masked_fill(is_none, -1),
        logprobs=logprobs,
        tail_logprobs=full.scatter(1, places, left).logsumexp(1),
        entropies=-(full.exp() * full.clamp_min(LOGPROB_FLOOR)).sum(1),
    )


def _sampled_nll(logits: Tensor, sampled_rows: Tensor) -> Tensor:
    _normalise(logits)
    chosen = sampled_rows[:, None]
    values = -logits.gather(1, chosen).squeeze(1)
    logits.exp_().scatter_add_(1, chosen, logits.new_full(chosen.shape, -1.0))
    return values


def _exact(
    logits: Tensor, teacher_logprobs: Tensor, config: DistillConfig
) -> tuple[Tensor, Tensor]:
    """Divergences and the teacher's entropies, [n] each; the logits become the slopes."""
    _normalise(logits)
    pair = _Pair.of(logits, teacher_logprobs.to(logits.dtype))
    entropies = -(pair.target * pair.log_target).sum(1)
    values, slopes = _compare(pair, entropies, config)
    logits.copy_(slopes)
    return values, entropies


def _normalise(logits: Tensor) -> None:
    """Log-softmax in place; ``torch.log_softmax`` adds up long float32 rows less exactly."""
    logits.sub_(logits.amax(1, keepdim=True))
    logits.sub_(logits.exp().sum(1, keepdim=True).log())


def _bucketed(logits: Tensor, targets: TopKRows, config: DistillConfig) -> Tensor:
    """One pass over the vocabulary; the logits become the slopes."""
    is_kept = targets.rows >= 0
    row, place = is_kept.nonzero(as_tuple=True)
    column = targets.rows[row, place]
    kept = logits.gather(1, targets.rows.clamp_min(0)).masked_fill_(~is_kept, -math.inf)
    logits[row, column] = -math.inf
    peak = logits.amax(1, keepdim=True)
    peak.masked_fill_(peak.isneginf(), 0)  # an empty tail: -inf - -inf would be NaN
    total = logits.sub_(peak).exp_().sum(1, keepdim=True)
    teacher = torch.cat((targets.logprobs, targets.tail_logprobs[:, None]), 1).to(logits.dtype)
    student = torch.cat((kept, total.log() + peak), 1).log_softmax(1)
    values, slopes = _compare(_Pair.of(student, teacher), targets.entropies, config)
    # What stands in the logits is each token's share of the tail, times the total.
    logits.mul_(slopes[:, -1:] / total.masked_fill(total == 0, 1))
    logits[row, column] = slopes[row, place]
    return values


class _Pair(NamedTuple):
    """Both sides over the same outcomes: [n, E] each; the logarithms are finite."""

    policy: Tensor
    log_policy: Tensor
    is_impossible: Tensor
    """Where the student's log-probability is -inf: a masked logit, an empty place or tail."""
    target: Tensor
    log_target: Tensor

    @classmethod
    def of(cls, student: Tensor, teacher: Tensor) -> _Pair:
        """From [n, E] log-probabilities, -inf where an outcome cannot be."""
        is_impossible = student.isneginf()
        return cls(
            policy=student.exp(),
            log_policy=student.masked_fill(is_impossible, LOGPROB_FLOOR),
            is_impossible=is_impossible,
            target=teacher.exp(),
            log_target=teacher.clamp_min(LOGPROB_FLOOR),
        )


def _compare(pair: _Pair, entropies: Tensor, config: DistillConfig) -> tuple[Tensor, Tensor]:
    """Values [n], and slopes [n, E] by the student's unnormalised log-probabilities.

    ``entropies`` [n]: of the teacher's whole distribution, for ``config.entropy_aware``.
    """
    values, slopes = _DIVERGENCES[config.divergence](pair, config)
    if config.entropy_aware is not None:
        forward_values, forward_slopes = _forward_kl(pair, config)
        is_unsure = entropies > config.entropy_aware.threshold_nats
        share = is_unsure.to(values.dtype) * config.entropy_aware.forward_weight
        values = torch.lerp(values, forward_values, share)
        slopes = torch.lerp(slopes, forward_slopes, share[:, None])
    slopes = slopes.masked_fill(pair.is_impossible, 0)
    return values, slopes.addcmul_(pair.policy, slopes.sum(1, keepdim=True), value=-1)


# Each gives the values [n] and the slopes [n, E] by log_policy, up to a multiple of policy: that
# part is the same factor for every logit's softmax and drops out in _compare.
_Measured = tuple[Tensor, Tensor]


def _forward_kl(pair: _Pair, _config: DistillConfig) -> _Measured:
    return (pair.target * (pair.log_target - pair.log_policy)).sum(1), -pair.target


def _cross_entropy(pair: _Pair, _config: DistillConfig) -> _Measured:
    return -(pair.target * pair.log_policy).sum(1), -pair.target


def _reverse_kl(pair: _Pair, _config: DistillConfig) -> _Measured:
    terms = pair.policy * (pair.log_policy - pair.log_target)
    return terms.sum(1), terms


def _jsd(pair: _Pair, config: DistillConfig) -> _Measured:
    teacher_share, student_share = config.beta, 1 - config.beta
    log_mixture = torch.logaddexp(
        pair.log_target + math.log(teacher_share), pair.log_policy + math.log(student_share)
    )
    of_teacher = pair.target * (pair.log_target - log_mixture)
    of_student = pair.policy * (pair.log_policy - log_mixture)
    values = teacher_share * of_teacher.sum(1) + student_share * of_student.sum(1)
    return values, student_share * of_student


_DIVERGENCES: dict[str, Callable[[_Pair, DistillConfig], _Measured]] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
    "cross_entropy": _cross_entropy,
}


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    """A few rows at a time: every step makes several blocks of the size of what it works on.

    On a CPU they stay within the cache; elsewhere many launches would cost more.
    """
    elements = _BLOCK_ELEMENTS["cpu" if logits.device.type == "cpu" else "other"]
    size = max(1, elements // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))


def _check(
    logits: Tensor, targets: Targets | None, sampled_rows: Tensor, config: DistillConfig
) -> None:
    num_rows, vocab_size = logits.shape
    if sampled_rows.shape != (num_rows,):
        raise BatchError(f"{list(sampled_rows.shape)} sampled rows for {num_rows} rows of logits")
    if not config.needs_teacher:
        return
    wanted = FullTargets if config.support == "exact_full_vocab" else TopKRows
    if not isinstance(targets, wanted):
        raise BatchError(
            f"{config.divergence} with distill.support {config.support} needs "
            f"{wanted.__name__}, found {type(targets).__name__}"
        )
    found = [list(field.shape) for field in targets]
    if isinstance(targets, FullTargets):
        expected = [[num_rows, vocab_size]]
    else:
        top_k = targets.rows.shape[-1]
        expected = [[num_rows, top_k], [num_rows, top_k], [num_rows], [num_rows]]
    if found != expected:
        raise BatchError(
            f"{wanted.__name__} of shapes {found} for [{num_rows}, {vocab_size}] logits, expected "
            f"{expected}"
        )
    if isinstance(targets, TopKRows) and targets.rows.numel():
        lowest, highest = int(targets.rows.min()), int(targets.rows.max())
        if lowest < -1 or highest >= vocab_size:
            raise BatchError(
                f"kept tokens at rows {lowest} .. {highest} of a head of {vocab_size} rows"
            )
