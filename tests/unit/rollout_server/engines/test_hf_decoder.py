"""Rows of the batch: who holds memory, and what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rollout_server.engines.hf_decoder import BatchDecoder
from rollout_server.engines.jobs import Job, accept
from tests.support.tiny_hf import (
    ARCHITECTURES,
    VOCABULARY,
    hf_prompts,
    plain_logits,
    plain_model,
)
from tests.support.toy import request

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def jobs(*lengths: int) -> list[Job]:
    return [
        accept(
            request(prompt),
            VOCABULARY,
            Job,
            max_context_tokens=150,
            engine="e",
            default_rid=str(index),
        )
        for index, prompt in enumerate(hf_prompts(0, lengths))
    ]


def decoder(architecture: str = "qwen3") -> BatchDecoder:
    return BatchDecoder(plain_model(architecture), len(VOCABULARY), num_kept=4)


def advance(made: BatchDecoder, running: Sequence[Job], architecture: str) -> None:
    """One step, compared with plain logits; each job then takes its likeliest token."""
    logits = made.step(running)
    for job, row in zip(running, logits, strict=True):
        ids = VOCABULARY.ids[np.array([*job.prompt, *job.output])].tolist()
        expected = plain_logits(plain_model(architecture), ids)[-1]
        np.testing.assert_allclose(row, expected, rtol=0, atol=2e-5)
        job.take(int(row.argmax()), 0.0)


@each_architecture
async def test_the_longest_row_may_leave_and_a_longer_one_come(architecture: str) -> None:
    made = decoder(architecture)
    short, long, longer = jobs(3, 40, 90)
    for running in ([short, long], [short, long], [short], [short], [short, longer], [longer]):
        advance(made, running, architecture)
        assert made.num_rows == len(running)
    made.step([])
    assert made.num_rows == 0


async def test_the_order_of_the_jobs_is_the_callers() -> None:
    made = decoder()
    first, second, third = jobs(5, 9, 7)
    for running in ([first, second], [second, first], [third, second, first], [first, third]):
        advance(made, running, "qwen3")


@each_architecture
async def test_a_failure_in_the_middle_leaves_no_half_fed_cache(architecture: str) -> None:
    made = decoder(architecture)
    [job, fresh] = jobs(6, 8)
    advance(made, [job], architecture)
    right, job.output[-1] = job.output[-1], 10**6  # no such row: the embedding raises
    with pytest.raises((IndexError, RuntimeError)):
        made.step([job])
    assert made.num_rows == 0
    assert right < len(VOCABULARY)
    advance(made, [fresh], architecture)
