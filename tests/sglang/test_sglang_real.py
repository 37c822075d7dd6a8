"""A real SGLang keeps the contract of our own engines, and is caught where it does not.

One server for each way that weights are loaded is shared by all tests; those at the end kill it.
Logprobs are transformers' to 2e-5 nats.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from miniverl_dist.errors import EngineLostError, PublishError
from miniverl_dist.generate_api.client import GenerateClient
from miniverl_dist.generate_api.wire import decode_input_logprobs, scoring_request
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import weights_checksum
from rollout_server.engines.sglang import SGLangEngine
from rollout_server.engines.sglang_layout import check_exactly, exact_digests
from tests.support import engine_contract
from tests.support.engine_contract import Subject
from tests.support.sglang_engine import IDS, TinyModels

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"), "qwen3")


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["disk", "distributed"])
async def subject(
    request: pytest.FixtureRequest, models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    work_dir = tmp_path_factory.mktemp(request.param)
    engine = models.engine(work_dir, f"by-{request.param}", load_weights_by=request.param)
    made = models.subject(engine)
    try:
        await engine.start()
        await engine_contract.refuses_to_sample_without_weights(made)
        yield made
        await engine_contract.closing_ends_requests_as_abort(made)
    finally:
        await engine.close()


@pytest.mark.parametrize("check", engine_contract.SHARED, ids=engine_contract.name_of)
async def test_shared(subject: Subject, check: engine_contract.Check) -> None:
    await check(subject)


def engine_of(subject: Subject) -> SGLangEngine:
    assert isinstance(subject.engine, SGLangEngine)
    return subject.engine


async def score(subject: Subject, rows: list[int], start: int) -> np.ndarray[Any, Any]:
    """[len(rows) - start] nats, asked at the server itself, which speaks rows."""
    async with GenerateClient(engine_of(subject).server.control.url) as client:
        reply = await client.generate(scoring_request(rows, start))
    return decode_input_logprobs(reply, input_ids=rows, start=start)


async def test_scores_of_a_text_are_the_plain_models(subject: Subject) -> None:
    await subject.load(0)
    rows = np.random.default_rng(3).integers(0, len(IDS), 90).tolist()
    ids = [IDS[row] for row in rows]
    for start in (1, 40, 89):
        expected = subject.expected(0, ids[:start], ids[start:], 1.0)
        assert np.abs(await score(subject, rows, start) - expected).max() < subject.tolerance
        assert (await score(subject, rows, start) == await score(subject, rows, start)).all()


async def test_weights_without_a_flush_would_be_stale(subject: Subject, models: TinyModels) -> None:
    """What the engine's flush prevents does happen without it."""
    await subject.load(0)
    rows = np.random.default_rng(4).integers(0, len(IDS), 120).tolist()
    ids = [IDS[row] for row in rows]
    control = engine_of(subject).server.control
    fresh = subject.expected(1, ids[:119], ids[119:], 1.0)

    async def error() -> float:
        return float(np.abs(await score(subject, rows, 119) - fresh).max())

    await score(subject, rows, 119)  # into the cache
    held = await control.held_weights()
    await subject.load(1)
    assert await error() < subject.tolerance
    assert await control.held_weights() != held
    # The same load by hand, without the flush.
    await subject.load(0)
    await score(subject, rows, 119)
    await control.load_folder(models.folder(1))
    assert await error() > 100 * subject.tolerance
    await control.flush()
    assert await error() < subject.tolerance


async def test_the_digests_show_one_wrong_value(subject: Subject) -> None:
    await subject.load(0)
    engine = engine_of(subject)
    held = await engine.server.control.held_weights()
    tensors = subject.tensors(0)
    check_exactly(held, exact_digests(engine._arch, tensors), engine.name)
    for name, array in tensors.items():
        spoilt = array.copy()
        spoilt.reshape(-1)[-1] += np.float32(1e-3)
        with pytest.raises(PublishError, match="1 of"):
            check_exactly(held, exact_digests(engine._arch, tensors | {name: spoilt}), engine.name)


async def test_a_tensor_that_the_server_leaves_out_ends_it(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers 200 to a load that lacks a tensor: only the digests tell."""
    await subject.load(0)
    engine = engine_of(subject)
    loader = engine._publisher._loader
    load = loader.load

    async def lossy(control: Any, snapshot: WeightSnapshot) -> None:
        kept = {n: a for n, a in snapshot.tensors.items() if "layers.2.mlp.up" not in n}
        await load(control, WeightSnapshot(snapshot.policy_version, kept, snapshot.checksum))

    monkeypatch.setattr(loader, "load", lossy)
    tensors = subject.tensors(1)
    with pytest.raises(PublishError, match=r"1 of .*layers\.2\.mlp\.gate_up_proj"):
        await engine.load_weights(WeightSnapshot(77, tensors, weights_checksum(tensors)))
    assert engine.weight_version == -1
    assert not engine.server.is_alive
    monkeypatch.undo()


async def test_killed_in_mid_request_it_comes_back_with_the_current_weights(
    subject: Subject,
) -> None:
    version = await subject.load(0)  # starts the server that the former test has ended
    engine = engine_of(subject)
    running = [
        asyncio.create_task(subject.ask(subject.prompt(5, seed), max_new_tokens=190))
        for seed in range(4)
    ]
    await subject.until_running()
    await asyncio.sleep(0.3)
    assert engine.server.pid is not None
    os.killpg(engine.server.pid, signal.SIGKILL)
    for request in running:
        with pytest.raises(EngineLostError, match="log"):
            await request
    tensors = subject.tensors(0)
    snapshot = WeightSnapshot(version, tensors, weights_checksum(tensors))
    assert await engine.restart(snapshot) == snapshot.checksum
    prompt = subject.prompt(9)
    reply = await subject.ask(prompt, max_new_tokens=8)
    assert reply.meta_info.weight_version == str(version)
    assert subject.error(0, prompt, reply) < subject.tolerance


async def test_in_flight_requests_can_go_on_under_new_weights(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(subject)
    former = await subject.load(0)
    changed = engine._config.model_copy(update={"in_flight": "continue"})
    monkeypatch.setattr(engine, "_config", changed)
    prompt = subject.prompt(7)
    running = asyncio.create_task(subject.ask(prompt, max_new_tokens=150))
    await subject.until_running()
    await asyncio.sleep(0.3)
    version = await subject.load(1)
    reply = await running
    spans = reply.meta_info.weight_versions
    assert [span.version for span in spans] == [str(former), str(version)]
    assert len(reply.output_ids) == spans[-1].end == 150
    entries = reply.meta_info.output_token_logprobs
    assert entries is not None
    found = np.array([entry[0] for entry in entries], dtype=np.float64)
    for seed, span in zip((0, 1), spans, strict=True):
        text = [*prompt, *reply.output_ids]
        start, end = (len(prompt) + place for place in (span.start, span.end))
        expected = subject.expected(seed, text[:start], text[start:end], 1.0)
        assert np.abs(found[span.start : span.end] - expected).max() < subject.tolerance
