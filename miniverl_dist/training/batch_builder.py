"""From scored groups to a training batch: align -> credit -> advantage -> pack. Pure.

    trajectory + teacher score --align--> units --credit--> weight per token
    rewards of a group --------------------------------> group advantage
    advantage_t = group advantage - opd_coef * weight_t on scored tokens

Shapes: T tokens of a trajectory, S tokens of a span, N packed tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.advantage import (
    group_advantages,
    leave_one_out,
    token_advantages,
    zero_variance_groups,
)
from miniverl_dist.alignment.credit import opd_weights, stopped, unit_log_ratios
from miniverl_dist.alignment.mau import align
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.recipe import OpdConfig
from miniverl_dist.errors import RecordError
from miniverl_dist.packing import sequence_ids, sequence_starts, split_minibatches
from miniverl_dist.ports import ScoredGroup, ScoredTrajectory, TargetAnswer
from miniverl_dist.schemas.batch import BoolArray, FloatArray, IntArray, TrainBatch
from miniverl_dist.schemas.routing import PackedRows, pack_rows
from miniverl_dist.schemas.targets import Distillation, TrajectoryTargets
from miniverl_dist.schemas.teacher import TeacherScore
from miniverl_dist.schemas.token_analysis import TokenAnalysis
from miniverl_dist.schemas.trajectory import HARNESS_TERMINATIONS, Trajectory
from miniverl_dist.training.drops import check_drops
from miniverl_dist.training.target_rows import Targets, pack_targets, trained_mask
from miniverl_dist.training.token_credit import TokenCredit, analyse

SpanByteEnds = Callable[[Sequence[int]], IntArray]
"""Byte ends [S] of a sampled span's ids, a turn end as one virtual byte (`alignment.spans`)."""


@dataclass(frozen=True)
class BuiltBatch:
    """A batch, or None where nothing could be trained on, with what building it measured."""

    batch: TrainBatch | None
    metrics: dict[str, float]
    analysis: tuple[TokenAnalysis, ...] = ()
    """Of the first groups (``loop.analysed_groups``)."""


def credit_trajectory(
    trajectory: Trajectory, score: TeacherScore, byte_ends: SpanByteEnds, opd: OpdConfig
) -> TokenCredit:
    """Align every scored span and turn its log-ratios into token weights.

    Raises:
        AlignmentError: student and teacher do not spell the same bytes.
        StaleScoreError: the score was made for another policy version.
    """
    score.require_version(trajectory.oldest_version)
    if score.trajectory_id != trajectory.trajectory_id:
        raise RecordError(
            f"score of {score.trajectory_id} given for trajectory {trajectory.trajectory_id}"
        )
    num_tokens = len(trajectory.token_ids)
    weights = np.full(num_tokens, np.nan)
    mask = np.zeros(num_tokens, dtype=bool)
    is_stopped = np.zeros(num_tokens, dtype=bool)
    ratios: list[FloatArray] = []
    unit_ids = np.full(num_tokens, -1, dtype=np.int64)
    for scored in score.spans:
        span = trajectory.spans[scored.span_index]
        here = slice(span.start, span.end)
        units = align(
            byte_ends(trajectory.token_ids[here]), np.asarray(scored.byte_ends, dtype=np.int64)
        )
        student, teacher = trajectory.rollout_logprobs[here], np.asarray(scored.logprobs)
        weights[here], mask[here] = opd_weights(
            student,
            teacher,
            units,
            rule=opd.rule,
            clip=opd.clip,
            lookahead=opd.lookahead,
            stop_after=opd.stop_after,
            discount=opd.discount,
        )
        is_stopped[here] = stopped(student, teacher, units, stop_after=opd.stop_after)
        first = sum(map(len, ratios))
        unit_ids[here] = np.where(units.student_unit < 0, -1, units.student_unit + first)
        ratios.append(unit_log_ratios(student, teacher, units))
    return TokenCredit(weights, mask, is_stopped, np.concatenate([np.zeros(0), *ratios]), unit_ids)


def build_batch(
    groups: Sequence[ScoredGroup],
    config: RunConfig,
    byte_ends: SpanByteEnds,
    answers: Mapping[str, TargetAnswer] | None = None,
) -> BuiltBatch:
    """Build the batch of one step.

    Args:
        groups: In FIFO order.
        config: Of the run.
        byte_ends: Of the student's tokens.
        answers: The teacher's distributions by trajectory, under an objective that compares them.

    Harness faults are left out and counted. A trajectory without a score keeps its group
    advantage, also counted; too many of them fail the step.

    Raises:
        TeacherDropFractionError: more than ``teacher.max_drop_fraction`` lack a score.
        AlignmentError, StaleScoreError: see `credit_trajectory`.
    """
    everyone = [member for group in groups for member in group.members]
    members = [m for m in everyone if _can_be_trained_on(m.trajectory, config)]
    metrics = _rollout_metrics(everyone, members, is_online=config.is_online)
    metrics["num_groups"] = float(len(groups))
    if config.is_online:
        horizons = [group.assignment.tail_calls for group in groups]
        metrics["tail_calls_mean"] = sum(horizons) / len(horizons)
        metrics["tail_calls_max"] = float(max(horizons))
    if not members:
        return BuiltBatch(None, metrics)
    advantage = _group_advantage(members, config, metrics)
    credits = _credits(members, config, byte_ends, metrics)
    if config.uses_targets:
        told = answers or {}
        check_drops([told.get(m.trajectory.trajectory_id) for m in members], config, metrics)
    targets = None if answers is None else _answered(answers)
    batch = _pack(members, advantage, credits, config, metrics, targets)
    analysed = {group.assignment.group_id for group in groups[: config.loop.analysed_groups]}
    analysis = [
        analyse(member.trajectory, credit, batch, index)
        for index, (member, credit) in enumerate(zip(members, credits, strict=True))
        if config.is_online and member.trajectory.group_id in analysed
    ]
    return BuiltBatch(batch, metrics, tuple(analysis))


def _can_be_trained_on(trajectory: Trajectory, config: RunConfig) -> bool:
    if config.is_online:
        return trajectory.is_trainable
    return any(trained_mask(trajectory, is_online=False))


def _group_advantage(
    members: Sequence[ScoredTrajectory], config: RunConfig, metrics: dict[str, float]
) -> FloatArray:
    """[B] advantage by reward; 0 under an objective that leaves rewards out."""
    rewards = [m.trajectory.reward for m in members]
    group_ids = [m.trajectory.group_id for m in members]
    if config.is_online:
        flat = zero_variance_groups(rewards, group_ids)
        metrics["num_zero_variance_groups"] = float(
            len({g for g, is_flat in zip(group_ids, flat, strict=True) if is_flat})
        )
    if not config.uses_group_advantage:
        return np.zeros(len(members))
    return group_advantages(
        rewards,
        group_ids,
        normalize_std=config.grpo.normalize_std,
        std_floor=config.grpo.std_floor,
    )


def _credits(
    members: Sequence[ScoredTrajectory],
    config: RunConfig,
    byte_ends: SpanByteEnds,
    metrics: dict[str, float],
) -> list[TokenCredit]:
    """OPD credit of every member; without a score nothing is credited (and never guessed)."""
    credits: list[TokenCredit] = []
    for member in members:
        if config.opd is not None and isinstance(member.teacher, TeacherScore):
            credits.append(
                credit_trajectory(member.trajectory, member.teacher, byte_ends, config.opd)
            )
        else:
            size = len(member.trajectory.token_ids)
            nothing = np.zeros(size, dtype=bool)
            credits.append(
                TokenCredit(np.full(size, np.nan), nothing, nothing, np.zeros(0), np.full(size, -1))
            )
    if config.uses_teacher:
        check_drops([member.teacher for member in members], config, metrics)
    return credits


def _answered(answers: Mapping[str, TargetAnswer]) -> Targets:
    return {
        name: answer for name, answer in answers.items() if isinstance(answer, TrajectoryTargets)
    }


def _pack(
    members: Sequence[ScoredTrajectory],
    group_advantage: FloatArray,
    credits: Sequence[TokenCredit],
    config: RunConfig,
    metrics: dict[str, float],
    targets: Targets | None,
) -> TrainBatch:
    """Lay the sequences end to end, each cut behind its last trainable token."""
    masks = [
        np.asarray(trained_mask(m.trajectory, is_online=config.is_online), dtype=bool)
        for m in members
    ]
    cuts = [int(np.flatnonzero(mask)[-1]) + 1 for mask in masks]
    starts = sequence_starts(cuts)
    ids = sequence_ids(starts)

    def cut(arrays: Sequence[Any]) -> NDArray[Any]:
        return np.concatenate([array[:n] for array, n in zip(arrays, cuts, strict=True)])

    loss_mask = cut(masks)
    weights, scored = cut([c.weights for c in credits]), cut([c.mask for c in credits])
    scored &= loss_mask
    advantages = _token_advantages(
        group_advantage,
        weights,
        scored,
        cut([c.is_stopped for c in credits]),
        ids,
        config,
        loss_mask,
    )
    if config.uses_group_advantage:
        metrics["group_advantage_abs_mean"] = float(np.abs(group_advantage[ids][loss_mask]).mean())
    metrics["num_loss_tokens"] = float(loss_mask.sum())
    if config.is_online:
        _credit_metrics(metrics, credits, weights[scored], advantages[loss_mask], config)
    steps = split_minibatches(len(members), config.loop.num_minibatches)
    num_steps = int(steps.max()) + 1
    return TrainBatch(
        token_ids=cut([np.asarray(m.trajectory.token_ids, dtype=np.int64) for m in members]),
        sequence_starts=starts,
        loss_mask=loss_mask,
        advantages=advantages,
        rollout_logprobs=cut([m.trajectory.rollout_logprobs for m in members]),
        group_ids=tuple(m.trajectory.group_id for m in members),
        minibatch_ids=steps,
        num_loss_tokens=tuple(int(loss_mask[steps[ids] == k].sum()) for k in range(num_steps)),
        num_sequences=tuple(int((steps == k).sum()) for k in range(num_steps)),
        policy_version=min(m.trajectory.oldest_version for m in members),
        temperature=config.rollout.temperature,
        routed_experts=_routing(members, cuts, config),
        is_sampled=config.is_online,
        has_policy_term=config.has_policy_term,
        distillation=_rows(members, targets, starts, steps, metrics),
        metrics=metrics,
    )


def _rows(
    members: Sequence[ScoredTrajectory],
    targets: Targets | None,
    starts: IntArray,
    minibatch_ids: IntArray,
    metrics: dict[str, float],
) -> Distillation | None:
    if targets is None:
        return None
    trajectories = [member.trajectory for member in members]
    rows = pack_targets(trajectories, targets, starts, minibatch_ids)
    metrics["num_target_rows"] = float(len(rows.positions))
    metrics["teacher_queried_position_ratio"] = len(rows.positions) / max(rows.num_candidates, 1)
    return rows


def _routing(
    members: Sequence[ScoredTrajectory], cuts: Sequence[int], config: RunConfig
) -> PackedRows | None:
    """[N, layers, experts per token]; None where the trainer is to route by itself."""
    if config.rollout.routing_replay == "off":
        return None
    rows = [member.trajectory.routed_experts for member in members]
    if all(array is None for array in rows):
        raise RecordError(
            "rollout.routing_replay is on, but no trajectory of the batch holds routed experts: "
            "they were sampled without it"
        )
    return pack_rows(rows, cuts)


def _token_advantages(
    group_advantage: FloatArray,
    weights: FloatArray,
    scored: BoolArray,
    is_stopped: BoolArray,
    ids: IntArray,
    config: RunConfig,
    loss_mask: BoolArray,
) -> FloatArray:
    """[N] the one place where the teacher's term meets the reward's."""
    opd = config.opd
    if opd is None:
        return token_advantages(
            group_advantage, weights, scored, ids, opd_coef=0.0, loss_mask=loss_mask
        )
    signed = weights * opd.sign
    baseline = None
    if opd.baseline == "leave_one_out":
        baseline = leave_one_out(signed, scored & ~is_stopped, ids)
    return token_advantages(
        group_advantage,
        signed,
        scored,
        ids,
        opd_coef=opd.coef,
        baseline=baseline,
        loss_mask=loss_mask,
    )


def _rollout_metrics(
    everyone: Sequence[ScoredTrajectory], members: Sequence[ScoredTrajectory], *, is_online: bool
) -> dict[str, float]:
    """Of what the student has played; what stored episodes earned is not its doing."""
    metrics = {
        "num_trajectories": float(len(members)),
        "num_harness_faults": float(
            sum(m.trajectory.termination in HARNESS_TERMINATIONS for m in everyone)
        ),
    }
    if not members or not is_online:
        return metrics
    trajectories = [m.trajectory for m in members]
    rewards = np.array([t.reward for t in trajectories])
    metrics["reward_mean"], metrics["reward_std"] = float(rewards.mean()), float(rewards.std())
    metrics["pass_rate"] = float(np.mean([t.passed for t in trajectories]))
    metrics["calls_per_trajectory"] = float(np.mean([len(t.tool_calls) for t in trajectories]))
    metrics["response_tokens_mean"] = float(np.mean([sum(t.loss_mask) for t in trajectories]))
    metrics["rollout_tokens"] = float(sum(sum(t.loss_mask) for t in trajectories))
    for name, part in (
        ("partial_mean", "mean_partial"),
        ("first_call_mean", "first_call"),
        ("exec_mean", "exec_score"),
    ):
        values = [t.reward_parts[part] for t in trajectories if part in t.reward_parts]
        if values:
            metrics[name] = float(np.mean(values))
    return metrics


def _credit_metrics(
    metrics: dict[str, float],
    credits: Sequence[TokenCredit],
    weights: FloatArray,
    advantages: FloatArray,
    config: RunConfig,
) -> None:
    if config.uses_group_advantage or config.opd is not None:
        metrics["advantage_abs_mean"] = float(np.abs(advantages).mean())
    ratios = np.concatenate([c.reverse_kl for c in credits])
    if config.opd is None or not len(ratios) or not len(weights):
        return
    metrics["opd_weight_mean"] = float(weights.mean())
    metrics["opd_weight_abs_mean"] = float(np.abs(weights).mean())
    metrics["opd_stopped_fraction"] = sum(int(c.is_stopped.sum()) for c in credits) / len(weights)
    metrics["reverse_kl_mean"] = float(ratios.sum() / len(weights))
    if config.opd.clip is not None and config.opd.rule == "unit":
        metrics["opd_clip_fraction"] = float(np.mean(np.abs(weights) >= config.opd.clip))
