"""How `batch_builder` lays sequences out; what their advantages are is in test_batch_builder."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import RecordError
from miniverl_dist.observability.metrics import METRICS
from miniverl_dist.ports import Assignment, ScoredGroup, ScoredTrajectory
from miniverl_dist.schemas.batch import TrainBatch
from miniverl_dist.schemas.trajectory import Termination, Trajectory
from miniverl_dist.training.batch_builder import build_batch
from tests.fake_world import byte_ends
from tests.fakes import ByteTokenizer, run_config, teacher_score, trajectory

TEACHER = ByteTokenizer((b"ab", b"abc"), name="teacher")


def groups_of(*members: list[Trajectory], with_scores: bool = False) -> list[ScoredGroup]:
    return [
        ScoredGroup(
            assignment=Assignment(ticket=ticket, task_id="a", prefix_calls=0, tail_calls=1),
            members=tuple(
                ScoredTrajectory(
                    trajectory=told, teacher=teacher_score(told, TEACHER) if with_scores else None
                )
                for told in group
            ),
            num_publishes=1,
        )
        for ticket, group in enumerate(members)
    ]


def build(groups: list[ScoredGroup], **changes: object) -> tuple[TrainBatch, dict[str, float]]:
    built = build_batch(groups, run_config(**changes), byte_ends)
    assert built.batch is not None
    return built.batch, built.metrics


def test_sequences_are_cut_behind_their_last_trained_token() -> None:
    plain = trajectory("abc", group_id="g", member=0)
    longer = trajectory("abc", group_id="g", member=1, context_after="a result nobody answers")
    batch, _ = build(groups_of([plain, longer]))
    size = len(plain.token_ids)
    assert len(longer.token_ids) > size
    assert batch.sequence_starts.tolist() == [0, size, 2 * size]
    assert batch.token_ids.tolist() == [*plain.token_ids, *longer.token_ids[:size]]
    assert batch.loss_mask[-1]


def test_every_array_keeps_its_tokens() -> None:
    told = [
        trajectory("a", group_id="g", member=0, logprob=-0.1, version=7),
        trajectory("abcd", group_id="g", member=1, logprob=-0.2, context_after="x", version=5),
    ]
    batch, _ = build(groups_of(told))
    for index, source in enumerate(told):
        here = slice(*batch.sequence_starts[index : index + 2])
        size = here.stop - here.start
        assert batch.token_ids[here].tolist() == list(source.token_ids[:size])
        assert batch.loss_mask[here].tolist() == list(source.loss_mask[:size])
        np.testing.assert_array_equal(batch.rollout_logprobs[here], source.rollout_logprobs[:size])
    assert batch.group_ids == ("g", "g")
    assert batch.policy_version == 5  # the oldest


def test_defect_no_advantage_off_the_mask_and_none_at_position_zero() -> None:
    told = [trajectory(group_id="g", member=i, reward=float(i), context_after="x") for i in (0, 1)]
    batch, _ = build(groups_of(told, with_scores=True), objective="grpo_opd")
    assert (batch.advantages[~batch.loss_mask] == 0).all()
    assert (batch.advantages[batch.loss_mask] != 0).all()
    assert not batch.loss_mask[batch.sequence_starts[:-1]].any()


@pytest.mark.parametrize(("num_minibatches", "expected"), [(1, 1), (2, 2), (3, 3), (5, 5)])
def test_minibatches_have_their_own_denominators(num_minibatches: int, expected: int) -> None:
    told = [trajectory("a" * i, group_id="g", member=i, reward=float(i)) for i in range(5)]
    loop = {"num_groups": 5, "num_minibatches": num_minibatches}
    batch, metrics = build(groups_of(told), loop=loop)
    assert batch.num_minibatches == expected
    tokens = [int(batch.loss_mask[a:b].sum()) for a, b in pairwise(batch.sequence_starts)]
    for step in range(expected):
        chosen = np.flatnonzero(batch.minibatch_ids == step)
        assert batch.num_sequences[step] == len(chosen) > 0
        assert batch.num_loss_tokens[step] == sum(tokens[i] for i in chosen)
    assert sum(batch.num_loss_tokens) == metrics["num_loss_tokens"] == sum(tokens)
    assert max(batch.num_sequences) - min(batch.num_sequences) <= 1


def test_peer_17_what_filtering_leaves_uneven_still_fills_every_step() -> None:
    told = [trajectory(group_id="g", member=i, reward=float(i)) for i in range(13)]
    told += [
        trajectory(group_id="h", member=i, termination=Termination.ENGINE_ERROR) for i in range(3)
    ]
    loop = {"num_groups": 8, "num_minibatches": 4}
    batch, _ = build(groups_of(told[:13], told[13:]), loop=loop)
    assert sorted(batch.num_sequences) == [3, 3, 3, 4]
    few, _ = build(groups_of(told[:2]), loop=loop)
    assert few.num_sequences == (1, 1)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.text("abc", max_size=5), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.sampled_from(["grpo", "opd", "grpo_opd"]),
    st.sampled_from(["none", "leave_one_out"]),
)
def test_the_order_of_groups_and_members_changes_no_advantage(
    texts: list[list[str]], seed: int, objective: str, baseline: str
) -> None:
    draw = random.Random(seed)
    groups = groups_of(
        *(
            [
                trajectory(
                    text,
                    group_id=f"g{g}",
                    member=i,
                    reward=draw.choice([0.0, 0.3, 1.0]),
                    logprob=-draw.random(),
                )
                for i, text in enumerate(group)
            ]
            for g, group in enumerate(texts)
        ),
        with_scores=True,
    )
    changes = {} if objective == "grpo" else {"opd": {"coef": 0.3, "baseline": baseline}}
    shuffled = [
        group.model_copy(update={"members": tuple(draw.sample(group.members, len(group.members)))})
        for group in draw.sample(groups, len(groups))
    ]
    one = by_trajectory(groups, build(groups, objective=objective, **changes)[0])
    other = by_trajectory(shuffled, build(shuffled, objective=objective, **changes)[0])
    assert one.keys() == other.keys()
    for name, advantages in one.items():
        assert other[name] == pytest.approx(advantages, abs=1e-12)


def by_trajectory(groups: list[ScoredGroup], batch: TrainBatch) -> dict[str, list[float]]:
    names = [m.trajectory.trajectory_id for group in groups for m in group.members]
    starts = batch.sequence_starts
    return {
        name: batch.advantages[starts[i] : starts[i + 1]].tolist() for i, name in enumerate(names)
    }


@pytest.mark.parametrize("objective", ["grpo", "opd", "grpo_opd"])
def test_every_metric_is_declared_and_a_number(objective: str) -> None:
    told = [trajectory(group_id="g", member=i, reward=float(i), passed=bool(i)) for i in range(2)]
    _, metrics = build(groups_of(told, with_scores=True), objective=objective)
    assert set(metrics) <= set(METRICS)
    assert all(isinstance(value, float) and np.isfinite(value) for value in metrics.values())
    assert metrics["reward_mean"] == metrics["pass_rate"] == metrics["reward_std"] == 0.5
    assert metrics["rollout_tokens"] == metrics["num_loss_tokens"] == 6.0
    assert metrics["response_tokens_mean"] == 3.0


def test_the_temperature_of_sampling_travels_with_the_batch() -> None:
    told = [trajectory(group_id="g", member=i, reward=float(i)) for i in range(2)]
    batch, _ = build(groups_of(told), rollout={"temperature": 0.7})
    assert batch.temperature == 0.7


MOE = {"kind": "megatron", "config": "configs/models/tiny_qwen3_moe.json"}
REPLAY = {"student": {"model": MOE}, "rollout": {"routing_replay": "on"}}


def routed(told: Trajectory, num_rows: int) -> Trajectory:
    fields = {name: getattr(told, name) for name in Trajectory.model_fields}
    rows = np.random.default_rng(num_rows).integers(0, 8, (num_rows, 4, 2)).astype("uint8")
    return Trajectory.model_validate(fields | {"routed_experts": rows})


def test_routing_stands_at_its_tokens_where_it_is_replayed() -> None:
    plain = trajectory("abc", group_id="g", member=0, context_after="x")
    size = int(np.flatnonzero(plain.loss_mask)[-1]) + 1
    told = [
        routed(trajectory("ab", group_id="g", member=1), 3),
        plain,
        # More rows than tokens that are trained on: an answer to the last call was read too.
        routed(trajectory("abc", group_id="g", member=2, context_after="x"), size + 1),
    ]
    batch, _ = build(groups_of(told), **REPLAY)
    starts, found = batch.sequence_starts, batch.routed_experts
    assert found is not None
    assert found.shape == (starts[-1], 4, 2)
    np.testing.assert_array_equal(found[:3], told[0].routed_experts)
    assert (found[3 : starts[2]] == -1).all()
    assert told[2].routed_experts is not None
    np.testing.assert_array_equal(found[starts[2] :], told[2].routed_experts[:size])
    unused, _ = build(groups_of(told), student={"model": MOE})
    assert unused.routed_experts is None


def test_a_replay_without_any_routing_is_refused() -> None:
    with pytest.raises(RecordError, match="no trajectory of the batch holds routed experts"):
        build(groups_of([trajectory("abc", group_id="g")]), **REPLAY)
