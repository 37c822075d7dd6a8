"""``python -m teacher_server`` as its users run it: a process, a port, a signal."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch

from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.backends.weights_io import TokenizerIdentity, save_toy_folder
from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.generate_api.wire import decode_input_logprobs, scoring_request
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal, TeacherScore
from miniverl_dist.schemas.trajectory import Trajectory
from teacher_server.__main__ import main
from teacher_server.client import HttpTeacher, LocalTeacher, TeacherIdentity
from teacher_server.rendering import TeacherRendering
from teacher_server.scorer import load_scorer
from tests.support.teachers import rendering, trajectory
from tests.support.toy_server import gated

CONFIG = ToyModelConfig(kind="toy", hidden_size=32, num_heads=2, ffn_size=48)
IDS = list(range(0, 1000, 5))
IDENTITY = TeacherIdentity("teacher", "a" * 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "teacher"
    tokenizer = TokenizerIdentity("some", IDENTITY.tokenizer_fingerprint)
    save_toy_folder(path, CONFIG, IDS, tokenizer, ToyModel(CONFIG, IDS, seed=1).arrays())
    return path


@contextmanager
def teacher_process(
    *arguments: str, program: Sequence[str] = ("-m", "teacher_server")
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def announced(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    line: dict[str, object] = json.loads(process.stdout.readline())
    return line


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with teacher_process(str(folder), "--num-threads", "1") as process:
        line = announced(process)
        assert line["model"] == "teacher"
        assert str(line["url"]) == f"http://127.0.0.1:{line['port']}"
        yield str(line["url"])


def text(length: int, seed: int) -> tuple[int, ...]:
    return tuple(IDS[i] for i in np.random.default_rng(seed).integers(0, len(IDS), length))


@asynccontextmanager
async def both_teachers(
    url: str, folder: Path, rendered: TeacherRendering
) -> AsyncIterator[Sequence[LocalTeacher | HttpTeacher]]:
    torch.set_num_threads(1)

    def renderer(asked: Trajectory) -> TeacherRendering:
        del asked
        return rendered

    local = LocalTeacher(
        load_scorer(folder), renderer, IDENTITY, max_prefill_tokens=1000, deadline_s=30
    )
    http = HttpTeacher(
        GenerateClient(url), renderer, IDENTITY, max_prefill_tokens=1000, deadline_s=30
    )
    try:
        yield local, http
    finally:
        await local.close()
        await http.close()


async def test_both_teachers_give_the_same_bits(url: str, folder: Path) -> None:
    rendered = rendering(text(200, 0), (20, 60), (70, 71), (90, 180))
    async with both_teachers(url, folder, rendered) as (local, http):
        assert isinstance(http, HttpTeacher)
        await http.require_same_tokenizer()
        first, second = await local.score(trajectory()), await http.score(trajectory())
    assert isinstance(first, TeacherScore)
    assert isinstance(second, TeacherScore)
    assert first.spans == second.spans
    assert [len(span.logprobs) for span in first.spans] == [40, 1, 90]
    assert first.num_prefill_tokens == second.num_prefill_tokens == 180


async def test_both_teachers_reject_what_the_model_does_not_know(url: str, folder: Path) -> None:
    async with both_teachers(url, folder, rendering((0, 5, 6), (1, 3))) as teachers:
        for teacher in teachers:
            result = await teacher.score(trajectory())
            assert isinstance(result, TeacherRefusal)
            assert result.reason == RefusalReason.REJECTED
            assert "token id 6 at position 2 is not among the 200 ids" in result.detail
    async with both_teachers(url, folder, rendering(text(600, 3), (1, 600))) as teachers:
        for teacher in teachers:
            result = await teacher.score(trajectory())
            assert isinstance(result, TeacherRefusal)
            assert result.reason == RefusalReason.REJECTED
            assert "512" in result.detail


async def test_scores_are_the_same_bits_alone_and_in_company(url: str) -> None:
    texts = [text(length, length) for length in (3, 20, 128, 129, 300, 500, 64, 65)]

    async with GenerateClient(url, limits=ClientLimits(max_inflight_tokens=1500)) as client:

        async def score(ids: tuple[int, ...]) -> list[float]:
            reply = await client.generate(scoring_request(ids, 1))
            return decode_input_logprobs(reply, input_ids=ids, start=1).tolist()

        alone = [await score(ids) for ids in texts]
        together = await asyncio.gather(*(score(ids) for ids in [*texts, *reversed(texts)]))
    assert together == [*alone, *reversed(alone)]


async def test_sigterm_ends_in_order_and_lets_a_request_finish(
    folder: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    program = gated(gate, "teacher_server.__main__", "main(sys.argv[1:])")
    with teacher_process(str(folder), "--num-threads", "1", program=program) as process:
        url = str(announced(process)["url"])
        body = {
            "input_ids": [list(text(500, seed)) for seed in range(64)],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        async with aiohttp.ClientSession() as session, GenerateClient(url) as client:

            async def post() -> tuple[int, int]:
                async with session.post(url + "/generate", json=body) as response:
                    return response.status, len(await response.json())

            asked = asyncio.create_task(post())
            for _ in range(3):  # afterwards the server has taken up what was sent before
                assert await client.health()
            assert not asked.done()
            process.send_signal(signal.SIGTERM)
            gate.touch()
            assert await asked == (200, 64)
            assert not await client.health()
        _, errors = await asyncio.to_thread(process.communicate, timeout=60)
        assert (process.returncode, errors) == (0, "")


def test_a_folder_that_is_no_model_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert "no model folder" in errors


def test_a_port_that_is_taken_is_one_clear_line(
    url: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), "--port", url.rsplit(":", 1)[1]]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert "address already in use" in errors
