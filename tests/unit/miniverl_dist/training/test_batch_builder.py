"""Synthetic byte-level episodes under two tokenisations; oracles in tests/reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import AlignmentError, StaleScoreError, TeacherDropFractionError
from miniverl_dist.ports import Assignment, ScoredGroup, ScoredTrajectory
from miniverl_dist.schemas.batch import TrainBatch
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal, TeacherScore
from miniverl_dist.schemas.trajectory import Span, SpanKind, Termination, Trajectory
from miniverl_dist.training.batch_builder import build_batch
from tests.fake_world import CHAT, byte_ends
from tests.fakes import ByteTokenizer, run_config, teacher_score, trajectory
from tests.reference.advantage import slow_group_advantages, slow_token_advantages
from tests.reference.credit import slow_weights

TEACHER = ByteTokenizer((b"hi", b"<call>", "é".encode(), b"ab"), name="teacher")
PLAIN = {"coef": 0.5, "lookahead": 0, "clip": None, "stop_after": None}
"""OPD by its bare formula."""


def config(objective: str = "grpo_opd", **opd: object) -> RunConfig:
    teacher = {"url": "http://t", "rendering": "raw", "max_drop_fraction": 0.5}
    if objective == "grpo":
        return run_config(objective=objective)
    return run_config(objective=objective, opd=PLAIN | opd, teacher=teacher)


def scored(told: Trajectory, rate: float | Callable[[int], float] = -0.5) -> ScoredTrajectory:
    return ScoredTrajectory(trajectory=told, teacher=teacher_score(told, TEACHER, rate))


def refused(told: Trajectory) -> ScoredTrajectory:
    refusal = TeacherRefusal(
        trajectory_id=told.trajectory_id, reason=RefusalReason.TOO_LONG, detail="9 > 3 tokens"
    )
    return ScoredTrajectory(trajectory=told, teacher=refusal)


def groups_of(*members: Sequence[ScoredTrajectory]) -> list[ScoredGroup]:
    """Groups with ticket 0, 1, ..."""
    return [
        ScoredGroup(
            assignment=Assignment(ticket=ticket, task_id="a", prefix_calls=0, tail_calls=1),
            members=tuple(group),
            num_publishes=1,
        )
        for ticket, group in enumerate(members)
    ]


def build(
    *members: Sequence[ScoredTrajectory], recipe: RunConfig | None = None
) -> tuple[TrainBatch, dict[str, float]]:
    built = build_batch(groups_of(*members), recipe or config(), byte_ends)
    assert built.batch is not None
    return built.batch, built.metrics


def per_sequence(batch: TrainBatch) -> list[list[float]]:
    """Advantages of the trained tokens of each sequence."""
    starts = batch.sequence_starts
    return [batch.advantages[a:b][batch.loss_mask[a:b]].tolist() for a, b in pairwise(starts)]


def siblings(*rewards: float, name: str = "g", **fields: object) -> list[Trajectory]:
    return [
        trajectory(**{"group_id": name, "member": i, "reward": r} | fields)  # type: ignore[arg-type]
        for i, r in enumerate(rewards)
    ]


def spans_of(told: Trajectory, *texts: str, logprob: float = -0.5) -> Trajectory:
    """The episode with several sampled turns instead of its one, a context token between them."""
    end = told.spans[0].end
    ids, spans = list(told.token_ids[:end]), [told.spans[0]]
    for number, text in enumerate(texts):
        written = [*CHAT.tokenizer.encode(text), CHAT.turn_end_id]
        sampled = Span(
            kind=SpanKind.ASSISTANT_TEXT,
            start=len(ids),
            end=len(ids) + len(written),
            segment_key=f"assistant:{number}",
            sampled=True,
            weight_versions=(0,),
        )
        ids += [*written, 10]
        context = Span(
            kind=SpanKind.USER, start=len(ids) - 1, end=len(ids), segment_key=f"user:{number + 1}"
        )
        spans += [sampled, context]
    mask = [any(s.sampled and s.start <= i < s.end for s in spans) for i in range(len(ids))]
    fields = {name: getattr(told, name) for name in Trajectory.model_fields}
    return Trajectory.model_validate(
        fields
        | {
            "token_ids": tuple(ids),
            "spans": tuple(spans),
            "loss_mask": tuple(mask),
            "rollout_logprobs": [logprob if m else None for m in mask],
        }
    )


class TestSign:
    def test_defect_sign(self) -> None:
        # Student: h i <end>, 0.5 nats each. Teacher: "hi" and <end>, 3 nats each.
        told = siblings(0.0, 0.0)
        batch, _ = build([scored(t, -3.0) for t in told])
        likes_more = (-0.5 - 0.5) - -3.0
        end = -0.5 - -3.0
        assert per_sequence(batch)[0] == [-0.5 * likes_more, -0.5 * likes_more, -0.5 * end]

    def test_the_more_the_student_likes_it_the_lower_the_advantage(self) -> None:
        advantages = [
            per_sequence(build([scored(t, -1.0) for t in siblings(0.0, 0.0, logprob=p)])[0])[0][0]
            for p in (-3.0, -1.0, -0.1)
        ]
        assert advantages[0] > 0 > advantages[2]
        assert sorted(advantages, reverse=True) == advantages

    def test_sign_minus_one_turns_only_the_teachers_term(self) -> None:
        members = [scored(t, -2.0) for t in siblings(0.0, 1.0)]
        right, _ = build(members)
        wrong, _ = build(members, recipe=config(sign=-1))
        for one, other, group in zip(
            per_sequence(right), per_sequence(wrong), (-0.5, 0.5), strict=True
        ):
            assert np.add(one, other).tolist() == pytest.approx([2 * group] * 3)
            assert one != other

    def test_agreement_leaves_the_group_advantage_alone(self) -> None:
        # The teacher's "hi" is as likely as the student's "h" and "i" together.
        members = [scored(t, lambda i: (-1.0, -0.5)[i]) for t in siblings(0.0, 1.0)]
        for recipe in (config(), config(lookahead=1, clip=3.0, stop_after=3.0)):
            batch, metrics = build(members, recipe=recipe)
            assert per_sequence(batch) == [[-0.5] * 3, [0.5] * 3]
            assert metrics["reverse_kl_mean"] == 0.0


class TestGroupAdvantage:
    def test_defect_rewards_are_compared_within_their_group(self) -> None:
        batch, _ = build(
            [scored(t, lambda i: (-1.0, -0.5)[i]) for t in siblings(5.0, 5.0, 6.5, name="easy")],
            [scored(t, lambda i: (-1.0, -0.5)[i]) for t in siblings(0.0, 0.5, name="hard")],
        )
        assert [found[0] for found in per_sequence(batch)] == [-0.5, -0.5, 1.0, -0.25, 0.25]

    def test_objective_opd_leaves_rewards_out(self) -> None:
        batch, _ = build([scored(t, -1.0) for t in siblings(0.0, 9.0)], recipe=config("opd"))
        assert per_sequence(batch)[0] == per_sequence(batch)[1]

    def test_objective_grpo_leaves_the_teacher_out(self) -> None:
        batch, metrics = build([scored(t, -1.0) for t in siblings(0.0, 1.0)], recipe=config("grpo"))
        assert per_sequence(batch) == [[-0.5] * 3, [0.5] * 3]
        assert "teacher_dropped" not in metrics

    def test_equal_rewards_have_no_advantage_and_are_counted(self) -> None:
        flat = [ScoredTrajectory(trajectory=t) for t in siblings(0.1, 0.1, 0.1, name="flat")]
        mixed = [ScoredTrajectory(trajectory=t) for t in siblings(0.1, 0.7, name="mixed")]
        batch, metrics = build(flat, mixed, recipe=config("grpo"))
        assert [found[0] == 0.0 for found in per_sequence(batch)] == [True] * 3 + [False] * 2
        assert metrics["num_zero_variance_groups"] == 1.0


class TestCredit:
    def test_defect_zero_width_tokens_are_not_counted_twice(self) -> None:
        base = siblings(0.0, 0.0)
        stop = CHAT.tokenizer.special_id("<|stop|>")
        start = base[0].spans[1].start
        fields = {name: getattr(base[0], name) for name in Trajectory.model_fields}
        ids = (*base[0].token_ids[: start + 1], stop, *base[0].token_ids[start + 1 :])
        wide = Trajectory.model_validate(
            fields
            | {
                "token_ids": ids,
                "spans": (
                    base[0].spans[0],
                    base[0].spans[1].model_copy(update={"end": len(ids)}),
                ),
                "loss_mask": (False,) * start + (True,) * 4,
                "rollout_logprobs": [None] * start + [-0.5, -9.0, -0.5, -0.5],
            }
        )
        score = teacher_score(base[0], TEACHER, -3.0)
        batch, _ = build([ScoredTrajectory(trajectory=wide, teacher=score), scored(base[1], -3.0)])
        h, special, i, end = per_sequence(batch)[0]
        assert [h, i, end] == per_sequence(batch)[1]
        assert special == 0.0  # its group advantage, and no share of -9 nats anywhere

    def test_defect_bytes_not_characters(self) -> None:
        # "é" is two bytes and one teacher token; in characters "x" would end elsewhere.
        told = siblings(0.0, 0.0, member=0, reward=0.0, text="éx")
        batch, _ = build([scored(t, lambda i: (-4.0, -0.5, -0.5)[i]) for t in told])
        assert per_sequence(batch)[0] == [-0.5 * 3.0] * 2 + [0.0, 0.0]

    def test_defect_units_do_not_cross_spans(self) -> None:
        told = [spans_of(t, "hi", "hi") for t in siblings(0.0, 0.0)]

        def first_span_agrees(told: Trajectory) -> TeacherScore:
            score = teacher_score(told, TEACHER, lambda i: (-1.0, -0.5)[i])
            second = score.spans[1].model_copy(update={"logprobs": (-9.0, -0.5)})
            return score.model_copy(update={"spans": (score.spans[0], second)})

        members = [ScoredTrajectory(trajectory=t, teacher=first_span_agrees(t)) for t in told]
        for lookahead in (1, "return_to_go"):
            batch, _ = build(members, recipe=config(lookahead=lookahead))
            assert per_sequence(batch)[0] == [0.0] * 3 + [-0.5 * 8.0] * 2 + [0.0]

    def test_defect_uncovered_tokens_get_no_bonus(self) -> None:
        told = [spans_of(t, "hi", "hi") for t in siblings(0.0, 1.0)]
        scores = [teacher_score(t, TEACHER, -3.0) for t in told]
        half = [score.model_copy(update={"spans": score.spans[:1]}) for score in scores]
        members = [
            ScoredTrajectory(trajectory=t, teacher=s) for t, s in zip(told, half, strict=True)
        ]
        batch, _ = build(members)
        assert per_sequence(batch)[0][3:] == [-0.5] * 3
        assert per_sequence(batch)[1][3:] == [0.5] * 3

    def test_the_turn_end_is_a_unit_of_its_own(self) -> None:
        told = siblings(0.0, 0.0)
        batch, _ = build([scored(t, lambda i: (-1.0, -6.0)[i]) for t in told])
        assert per_sequence(batch)[0] == [0.0, 0.0, -0.5 * 5.5]

    @settings(deadline=None, max_examples=80)
    @given(
        st.lists(st.text("abhi<cal>é ", max_size=9), min_size=2, max_size=5),
        st.sampled_from(["unit", "mean", "proportional", "equal_teacher"]),
        st.sampled_from([0, 1, 2, "return_to_go"]),
        st.sampled_from([None, 0.7]),
        st.sampled_from([None, 0.9]),
        st.integers(0, 2**31),
    )
    def test_it_follows_the_oracles(
        self,
        texts: list[str],
        rule: str,
        lookahead: int | str,
        clip: float | None,
        stop_after: float | None,
        seed: int,
    ) -> None:
        draw = random.Random(seed)
        recipe = config(rule=rule, lookahead=lookahead, clip=clip, stop_after=stop_after)
        members = [
            scored(
                trajectory(
                    text, group_id="g", member=i, reward=draw.random(), logprob=-draw.random()
                ),
                lambda _: -2 * draw.random(),
            )
            for i, text in enumerate(texts)
        ]
        batch, _ = build(members, recipe=recipe)
        group = slow_group_advantages([m.trajectory.reward for m in members], ["g"] * len(members))
        for index, member in enumerate(members):
            assert isinstance(member.teacher, TeacherScore)
            span = member.trajectory.spans[1]
            student = member.trajectory.rollout_logprobs[span.start : span.end].tolist()
            weights = slow_weights(
                byte_ends(member.trajectory.token_ids[span.start : span.end]).tolist(),
                member.teacher.spans[0].byte_ends,
                student,
                member.teacher.spans[0].logprobs,
                rule=rule,
                clip=clip,
                lookahead=lookahead,
                stop_after=stop_after,
            )
            expected = slow_token_advantages(
                [group[index]],
                [weight or 0.0 for weight in weights],
                [weight is not None for weight in weights],
                [0] * len(weights),
                0.5,
            )
            assert per_sequence(batch)[index] == pytest.approx(expected, abs=1e-12)


class TestBaseline:
    def test_it_is_the_mean_of_the_others(self) -> None:
        told = siblings(0.0, 0.0)
        members = [scored(told[0], -3.0), scored(told[1], -1.5)]
        plain, _ = build(members)
        based, _ = build(members, recipe=config(baseline="leave_one_out"))
        for own, other in ((0, 1), (1, 0)):
            expected = np.array(per_sequence(plain)[own]) - np.mean(per_sequence(plain)[other])
            assert per_sequence(based)[own] == pytest.approx(expected.tolist())

    def test_stopped_tokens_neither_give_nor_take(self) -> None:
        told = siblings(0.0, 0.0, text="abhi")
        # The first one blunders at "ab" (8 nats) and is stopped behind it.
        members = [
            scored(told[0], lambda i: (-9.0, -0.25, -0.25)[i]),
            scored(told[1], lambda i: (-2.0, -2.0, -0.5)[i]),
        ]
        recipe = config(baseline="leave_one_out", stop_after=3.0)
        batch, metrics = build(members, recipe=recipe)
        first, second = per_sequence(batch)
        assert first[2:] == [0.0, 0.0, 0.0]
        weights = (8.0, 8.0), (1.0, 1.0, 1.0, 1.0, 0.0)
        assert first[:2] == pytest.approx([-0.5 * (8.0 - np.mean(weights[1]))] * 2)
        assert second == pytest.approx([-0.5 * (w - 8.0) for w in weights[1]])
        assert metrics["opd_stopped_fraction"] == pytest.approx(0.3)


class TestMissingScores:
    def test_without_a_score_the_group_advantage_stays(self) -> None:
        told = siblings(0.0, 1.0)
        batch, metrics = build([refused(told[0]), scored(told[1], -3.0)])
        assert per_sequence(batch)[0] == [-0.5] * 3
        assert per_sequence(batch)[1] != [0.5] * 3
        assert (metrics["teacher_dropped"], metrics["teacher_scored_fraction"]) == (1.0, 0.5)

    def test_too_many_of_them_fail_the_step_with_the_teachers_words(self) -> None:
        told = siblings(0.0, 1.0, 1.0)
        with pytest.raises(
            TeacherDropFractionError, match=r"2 of 3 .* 0\.5 allows.*too_long: 9 > 3 tokens"
        ):
            build([refused(told[0]), ScoredTrajectory(trajectory=told[1]), scored(told[2])])

    def test_all_may_be_missing_when_config_says_so(self) -> None:
        recipe = run_config(
            objective="grpo_opd",
            opd=PLAIN,
            teacher={"url": "http://t", "rendering": "raw", "max_drop_fraction": 1.0},
        )
        batch, metrics = build([refused(t) for t in siblings(0.0, 1.0)], recipe=recipe)
        assert per_sequence(batch) == [[-0.5] * 3, [0.5] * 3]
        assert "reverse_kl_mean" not in metrics

    def test_a_score_of_another_version_is_stale(self) -> None:
        told = siblings(0.0, 1.0, version=4)
        stale = teacher_score(told[0], TEACHER, version=3)
        with pytest.raises(StaleScoreError, match="made for policy version 3"):
            build([ScoredTrajectory(trajectory=told[0], teacher=stale), scored(told[1])])

    def test_a_score_of_other_bytes_is_refused(self) -> None:
        told = siblings(0.0, 1.0)
        other = teacher_score(trajectory("hello", group_id="g"), TEACHER)
        with pytest.raises(AlignmentError, match="spell the same bytes"):
            build([ScoredTrajectory(trajectory=told[0], teacher=other), scored(told[1])])


class TestHarnessFaults:
    @pytest.mark.parametrize(
        "termination",
        [Termination.DEADLINE, Termination.ENGINE_ERROR, Termination.ENVIRONMENT_ERROR],
    )
    def test_defect_they_are_left_out_and_counted(self, termination: Termination) -> None:
        told = siblings(0.5, 1.0)
        broken = trajectory(group_id="g", member=2, reward=0.0, termination=termination)
        batch, metrics = build([*map(scored, told), ScoredTrajectory(trajectory=broken)])
        clean, _ = build([*map(scored, told)])
        assert per_sequence(batch) == per_sequence(clean)
        assert (metrics["num_trajectories"], metrics["num_harness_faults"]) == (2.0, 1.0)
        assert metrics["reward_mean"] == 0.75

    def test_nothing_left_makes_no_batch(self) -> None:
        broken = trajectory(termination=Termination.ENGINE_ERROR)
        built = build_batch(groups_of([ScoredTrajectory(trajectory=broken)]), config(), byte_ends)
        assert built.batch is None
        assert built.metrics["num_harness_faults"] == 1.0
