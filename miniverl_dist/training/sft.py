"""Supervised steps on scripted traces: the student's warm-up and the toy teacher's fit.

Without a warm-up a toy student emits no call at all and GRPO has nothing to compare. What it
learned here is recorded apart (events ``warmup_step``, evaluation tag ``warm``), so that nobody
credits it to reinforcement learning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from miniverl_dist.config.roles import SftConfig
from miniverl_dist.errors import BatchError
from miniverl_dist.packing import sequence_starts
from miniverl_dist.schemas.batch import BoolArray, IntArray, SftBatch
from miniverl_dist.schemas.seeds import derive_seed


@dataclass(frozen=True)
class SftExample:
    """One sequence. Shapes: T tokens."""

    token_ids: IntArray
    """[T]"""
    loss_mask: BoolArray
    """[T] True on tokens to learn."""
    written: BoolArray
    """[T] True on model-written tokens; input dropout may replace those."""


def sft_batches(
    examples: Sequence[SftExample],
    config: SftConfig,
    *,
    seed: int,
    replacement_ids: Sequence[int] = (),
) -> Iterator[SftBatch]:
    """``config.num_steps`` batches; each epoch visits every example once in a seeded order.

    Args:
        examples: The traces.
        config: Steps, sizes and input dropout.
        seed: Of order and dropout.
        replacement_ids: What input dropout may put in place of a written token.

    Raises:
        BatchError: no examples, or dropout without ids to put in.
    """
    if not examples:
        raise BatchError("supervised steps need at least one trace")
    if config.input_dropout and not len(replacement_ids):
        raise BatchError("input dropout needs ids to put in place of the dropped ones")
    generator = np.random.Generator(np.random.Philox(derive_seed(seed, "sft")))
    order: list[int] = []
    for _ in range(config.num_steps):
        while len(order) < config.batch_size:
            order.extend(generator.permutation(len(examples)).tolist())
        chosen, order = order[: config.batch_size], order[config.batch_size :]
        yield _batch(
            [examples[i] for i in chosen], config.input_dropout, replacement_ids, generator
        )


def _batch(
    examples: Sequence[SftExample],
    input_dropout: float,
    replacement_ids: Sequence[int],
    generator: np.random.Generator,
) -> SftBatch:
    token_ids = np.concatenate([example.token_ids for example in examples])
    loss_mask = np.concatenate([example.loss_mask for example in examples])
    if input_dropout:
        written = np.concatenate([example.written for example in examples])
        replaced = written & (generator.random(len(token_ids)) < input_dropout)
        token_ids = token_ids.copy()
        token_ids[replaced] = generator.choice(np.asarray(replacement_ids), int(replaced.sum()))
        # A replaced token is input only: learning to write it would be learning noise.
        loss_mask = loss_mask & ~replaced
    return SftBatch(
        token_ids=token_ids,
        sequence_starts=sequence_starts([len(example.token_ids) for example in examples]),
        loss_mask=loss_mask,
    )


async def run_sft(
    batches: Iterator[SftBatch],
    update: Callable[[SftBatch, float], Awaitable[dict[str, float]]],
    learning_rate: float,
    on_step: Callable[[int, dict[str, float]], None],
) -> None:
    """Feed every batch to ``update``; ``on_step`` gets the step's number and its metrics."""
    for step, batch in enumerate(batches):
        on_step(step, await update(batch, learning_rate))
        await asyncio.sleep(0)  # an update in this process never yields; a stop must get a word in
