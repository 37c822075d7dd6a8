"""Defects of the tutorial and of peers that only show where several real parts meet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from miniverl_dist.backends.toy import OPTIMIZER_FILE
from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.config.recipe import OptimConfig
from miniverl_dist.errors import ChecksumError
from miniverl_dist.generate_api.wire import GenerateReply
from miniverl_dist.ports import Assignment, ScoredGroup, ScoredTrajectory, WeightSnapshot
from miniverl_dist.schemas.batch import FloatArray, TrainBatch
from miniverl_dist.schemas.run_state import RunState
from miniverl_dist.schemas.teacher import SpanScore, TeacherScore
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.schemas.weights import weights_checksum
from miniverl_dist.training import checkpoint
from miniverl_dist.training.batch_builder import build_batch
from miniverl_dist.training.weight_sync import DirectWeightStore
from rollout_server.engines.toy import ToyEngine
from tests.fakes import run_config
from tests.support.teachers import trajectory
from tests.support.toy import (
    TOKENIZER,
    VOCABULARY_IDS,
    random_batch,
    random_ids,
    request,
    tiny_backend,
    tiny_config,
)

NUM_PROMPT, NUM_SAMPLED = 2, 12


def one_byte_each(ids: object) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[S] byte ends where every token is one byte: units are tokens."""
    return np.arange(1, len(ids) + 1)  # type: ignore[arg-type]


def told(member: int, token_ids: tuple[int, ...], logprobs: FloatArray) -> Trajectory:
    """A prompt and one sampled span; siblings earn the same, so that only the teacher speaks."""
    episode = trajectory(f"g.{member}", num_tokens=len(token_ids), versions=(0,))
    known = np.concatenate([np.full(NUM_PROMPT, np.nan), logprobs])
    return episode.model_copy(update={"token_ids": token_ids, "rollout_logprobs": known})


def scored(episode: Trajectory, reverse_kl: FloatArray) -> ScoredTrajectory:
    """The episode with a teacher whose logprob is the student's less ``reverse_kl`` per token."""
    span = episode.spans[1]
    ids = episode.token_ids[span.start :]
    teacher = episode.rollout_logprobs[span.start :] - reverse_kl
    score = TeacherScore(
        trajectory_id=episode.trajectory_id,
        teacher_id="t",
        tokenizer_fingerprint=TOKENIZER.fingerprint,
        policy_version=0,
        spans=(
            SpanScore(
                span_index=1,
                token_ids=ids,
                byte_ends=tuple(one_byte_each(ids).tolist()),
                logprobs=tuple(teacher.tolist()),
            ),
        ),
        num_prefill_tokens=len(episode.token_ids),
        seconds=0.0,
    )
    return ScoredTrajectory(trajectory=episode, teacher=score)


def plain_batch(ids: tuple[int, ...]) -> TrainBatch:
    """One sequence, for asking a backend for logprobs."""
    n = len(ids)
    mask = np.arange(n) > 0
    return TrainBatch(
        token_ids=np.array(ids),
        sequence_starts=np.array([0, n]),
        loss_mask=mask,
        advantages=np.zeros(n),
        rollout_logprobs=np.where(mask, -1.0, np.nan),
        group_ids=("0",),
        minibatch_ids=np.zeros(1, dtype=np.int64),
        num_loss_tokens=(n - 1,),
        num_sequences=(1,),
        policy_version=0,
        temperature=1.0,
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_defect_sign_reaches_the_weights(sign: int) -> None:
    """Score -> align -> credit -> advantage -> loss -> optimizer, all real.

    The teacher likes every other token less than the student does. After one update the student
    likes exactly those less than before; with the sign turned around it is the other way.
    """
    student = tiny_backend(optim=OptimConfig(lr=1e-3))
    reverse_kl = np.where(np.arange(NUM_SAMPLED) % 2, 1.5, -1.5)
    rng = np.random.default_rng(0)
    sequences = [random_ids(rng, NUM_PROMPT + NUM_SAMPLED) for _ in range(4)]

    def logprobs(ids: tuple[int, ...]) -> FloatArray:
        return student.logprobs(plain_batch(ids))[NUM_PROMPT:]

    before = np.stack([logprobs(ids) for ids in sequences])
    members = [told(i, ids, before[i]) for i, ids in enumerate(sequences)]
    config = run_config(
        objective="grpo_opd",
        opd={"coef": 0.3, "lookahead": 0, "stop_after": None, "sign": sign},
    )
    group = ScoredGroup(
        assignment=Assignment(ticket=0, task_id="a", prefix_calls=0, tail_calls=1),
        members=tuple(scored(member, reverse_kl) for member in members),
        num_publishes=1,
    )
    built = build_batch([group], config, one_byte_each)
    assert built.batch is not None
    student.update(built.batch)
    moved = (np.stack([logprobs(ids) for ids in sequences]) - before).mean(axis=0)
    overrated, underrated = moved[reverse_kl > 0], moved[reverse_kl < 0]
    if sign == 1:
        assert overrated.max() < 0 < underrated.min()
    else:
        assert underrated.max() < 0 < overrated.min()


def weights(version: int) -> WeightSnapshot:
    """Weights that differ from version to version, loud enough to look back at the prompt."""
    tensors = ToyModel(tiny_config(), VOCABULARY_IDS, seed=version).arrays()
    for name in tensors:
        if name.endswith(("attn_out", "down", "qkv")):
            tensors[name] = tensors[name] * np.float32(4)
    return WeightSnapshot(version, tensors, weights_checksum(tensors))


def told_by(reply: GenerateReply) -> tuple[object, ...]:
    meta = reply.meta_info
    return reply.output_ids, meta.output_token_logprobs, meta.weight_version


async def test_peer_34_no_cached_prefix_outlives_a_publish() -> None:
    """The same prompt before and after a publish: behind it, as if the engine were new.

    Keys and values of the old weights would not fail; they would give slightly wrong logprobs.
    """
    prompt = random_ids(np.random.default_rng(3), 70)
    engine = ToyEngine(tiny_config(), VOCABULARY_IDS, "used")
    store = DirectWeightStore(weights, [engine], deadline_s=10.0)
    await store.publish(1)
    first = await engine.generate(request(prompt))
    again = await engine.generate(request(prompt))
    assert again.meta_info.cached_tokens > 60, "the prefix cache is at work"
    assert told_by(again) == told_by(first)

    await store.publish(2)
    behind = await engine.generate(request(prompt))
    fresh = ToyEngine(tiny_config(), VOCABULARY_IDS, "fresh")
    await fresh.load_weights(weights(2))
    assert behind.meta_info.cached_tokens == 0
    assert told_by(behind) == told_by(await fresh.generate(request(prompt)))
    assert told_by(behind)[:2] != told_by(first)[:2]
    await engine.close()
    await fresh.close()


def state(version: int) -> RunState:
    return RunState(
        step=version,
        policy_version=version,
        num_publishes=version,
        next_ticket=0,
        curriculum={},
        counters={},
        file_positions={},
        config_digest="d" * 64,
        seed=0,
        warmup_done=True,
    )


async def test_defect_no_optimizer_in_the_checkpoint(tmp_path: Path) -> None:
    """A commit holds the moments: what goes on from it equals what never stopped, bit for bit.

    Weights alone would also train on, with a first step of another size and direction.
    """

    async def save(folder: Path) -> None:
        student.save(folder)

    student = tiny_backend()
    student.update(random_batch(0))
    folder = await checkpoint.commit(tmp_path, "step-000001", state(1), save)
    assert OPTIMIZER_FILE in {file.path for file in checkpoint.verify(folder).files}

    resumed, amnesic = tiny_backend(seed=9), tiny_backend(seed=9)
    resumed.load(folder, 1)
    amnesic.load_weights(student.model.arrays())
    for backend in (student, resumed, amnesic):
        backend.update(random_batch(1))
    expected = student.snapshot().checksum
    assert resumed.snapshot().checksum == expected
    assert amnesic.snapshot().checksum != expected

    damaged = folder / OPTIMIZER_FILE
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ChecksumError, match=OPTIMIZER_FILE):
        checkpoint.verify(folder)
