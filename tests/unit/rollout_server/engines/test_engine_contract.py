"""Our own engines keep the contract that tests/sglang holds a real SGLang to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from miniverl_dist.backends.toy_model import ToyModel
from rollout_server.engines.toy import ToyEngine
from tests.support import engine_contract
from tests.support.engine_contract import Subject
from tests.support.tiny_hf import VOCABULARY, hf_engine, plain_logits, plain_model, snapshot
from tests.support.toy import VOCABULARY_IDS, tiny_config
from tests.support.toy_engine import weights

CONTEXT = 150


def toy_logits(seed: int, ids: Sequence[int]) -> NDArray[np.float32]:
    model = ToyModel(tiny_config(), VOCABULARY_IDS, seed)
    model.load_arrays(weights(1, seed).tensors)
    rows = torch.from_numpy(model.vocabulary.rows(ids))
    with torch.no_grad():
        found: NDArray[np.float32] = (model.hidden(rows[None])[0] @ model.head.T).numpy()
    return found


def toy_subject() -> Subject:
    engine = ToyEngine(tiny_config(max_context_tokens=CONTEXT), VOCABULARY_IDS)
    return Subject(
        engine,
        lambda seed: dict(weights(1, seed).tensors),
        toy_logits,
        sorted(VOCABULARY_IDS),
        CONTEXT,
        tolerance=2e-4,  # these weights' loud layers make rounding louder, too
        is_running=lambda: bool(engine._running),
    )


def hf_subject() -> Subject:
    engine = hf_engine(max_context_tokens=CONTEXT)
    return Subject(
        engine,
        lambda seed: dict(snapshot("qwen3", 1, seed).tensors),
        lambda seed, ids: plain_logits(plain_model("qwen3", seed), ids),
        VOCABULARY.ids.tolist(),
        CONTEXT,
        tolerance=2e-5,
        is_running=lambda: bool(engine._running),
    )


SUBJECTS: dict[str, Callable[[], Subject]] = {"toy": toy_subject, "hf": hf_subject}


@pytest.fixture(params=sorted(SUBJECTS))
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    made = SUBJECTS[request.param]()
    yield made
    await made.engine.close()


@pytest.mark.parametrize("check", engine_contract.SHARED, ids=engine_contract.name_of)
async def test_shared(subject: Subject, check: engine_contract.Check) -> None:
    await check(subject)


async def test_without_weights(subject: Subject) -> None:
    await engine_contract.refuses_to_sample_without_weights(subject)


async def test_closing(subject: Subject) -> None:
    await engine_contract.closing_ends_requests_as_abort(subject)
