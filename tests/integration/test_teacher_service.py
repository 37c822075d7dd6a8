"""`miniverl-dist serve teacher CONFIG` as its users run it: processes, ports, signals, files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from typer.testing import CliRunner

from actors.cli import app
from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.backends.vocabulary import FullVocabulary
from miniverl_dist.backends.weights_io import TokenizerIdentity, save_toy_folder
from miniverl_dist.config.load import load_teacher_service
from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.config.serve import LocalTeacherService
from miniverl_dist.generate_api.app import serving
from miniverl_dist.generate_api.client import GenerateClient
from miniverl_dist.generate_api.wire import decode_input_logprobs, scoring_request
from teacher_server.app import build_teacher_app
from teacher_server.service import load_local, service_limits
from tests.support.ports import free_ports
from tests.support.processes import are_gone
from tests.support.sglang_stand_in import sglang_stand_in
from tests.support.tiny_hf import model_folder, plain_logits, plain_model
from tests.support.toy_server import gated

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ToyModelConfig(kind="toy", hidden_size=32, num_heads=2, ffn_size=48)
IDS = list(range(0, 1000, 5))
TOKEN = "a-token-of-enough-length"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A service around a toy model that asks for a token."""
    folder = tmp_path_factory.mktemp("service")
    tokenizer = TokenizerIdentity("some", "a" * 64)
    save_toy_folder(folder / "toy", CONFIG, IDS, tokenizer, ToyModel(CONFIG, IDS).arrays())
    (folder / "token").write_text(TOKEN)
    path = folder / "service.yaml"
    path.write_text(
        f"kind: local\nname: service\nmodel: {folder / 'toy'}\ntoken_file: {folder / 'token'}\n"
        "num_threads: 1\ndrain_deadline_s: 20.0\nmax_queued_tokens: 40000\n"
    )
    return path


@contextmanager
def served(
    config: Path, *overrides: str, program: Sequence[str] = ("-m", "actors.cli")
) -> Iterator[subprocess.Popen[str]]:
    options = [word for override in overrides for word in ("-o", override)]
    process = subprocess.Popen(
        [sys.executable, *program, "serve", "teacher", str(config), *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def announced(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line: dict[str, Any] = json.loads(process.stdout.readline())
    return line


def body(num_texts: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "input_ids": rng.choice(IDS, (num_texts, 500)).tolist(),
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


async def status(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url) as response:
        return response.status


async def test_a_local_service_asks_for_its_token_sheds_load_and_drains(
    config: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with served(config, program=gated(gate, "actors.cli", "main()")) as process:
        line = announced(process)
        assert line["model"] == "toy"
        url = line["url"]
        async with aiohttp.ClientSession() as session:
            async with session.post(url + "/generate", json=body(1)) as response:
                assert response.status == 401
            assert await status(session, url + "/ready") == 200
            session.headers.update(AUTHORIZED)

            async def post(num_texts: int) -> tuple[int, int]:
                async with session.post(url + "/generate", json=body(num_texts)) as response:
                    return response.status, int(response.headers.get("Retry-After", 0))

            asked = asyncio.create_task(post(64))  # 32,000 tokens, at work until the gate opens
            for _ in range(3):  # afterwards the server has taken up what was sent before
                assert await status(session, url + "/health") == 200
            assert (await post(64))[0] == 429
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                while await status(session, url + "/ready") != 503:
                    pass
            assert await post(1) == (503, 1)
            assert not asked.done()
            gate.touch()
            assert await asked == (200, 0)
        _, errors = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == 0
        assert errors == "stopping: requests at work have 20 s (drain_deadline_s)\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=nowhere", "no model folder"),
        ("max_queued_tokens=100", "one text may have 512 tokens"),
        ("token_file=nowhere", "token_file: token file nowhere: No such file"),
        ("port=taken", "in use"),
    ],
)
def test_a_service_that_cannot_start_is_one_clear_line(
    config: Path, override: str, message: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        override = override.replace("taken", str(taken.getsockname()[1]))
        result = CliRunner().invoke(app, ["serve", "teacher", str(config), "-o", override])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert message in result.output


@pytest.fixture
def launched(tmp_path: Path) -> tuple[Path, Path]:
    """A service that launches a stand-in for SGLang, and the file that it writes."""
    program, record = sglang_stand_in(tmp_path)
    [port] = free_ports(1)
    path = tmp_path / "sglang.yaml"
    path.write_text(
        f"kind: sglang\nname: big\nlaunch: {{python: {program}, model: m, port: {port}, "
        f"log_file: {tmp_path / 'log'}, start_deadline_s: 30.0}}\n"
    )
    return path, record


def test_sigterm_ends_sglang_with_its_children(launched: tuple[Path, Path]) -> None:
    path, record = launched
    with served(path) as process:
        assert announced(process)["model"] == "big"
        pids = json.loads(record.read_text())["pids"]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
    assert are_gone(*pids)


def test_an_sglang_that_dies_ends_the_command_with_its_log(launched: tuple[Path, Path]) -> None:
    path, record = launched
    with served(path) as process:
        announced(process)
        os.kill(json.loads(record.read_text())["pids"][0], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "SGLang (big) has ended" in errors


def test_a_running_server_is_checked_and_named(config: Path, tmp_path: Path) -> None:
    attach = tmp_path / "attach.yaml"
    with served(config, "token_file=null") as running:
        url = announced(running)["url"]
        attach.write_text(f"kind: sglang\nname: there\nurl: {url}\n")
        with served(attach) as process:
            output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert json.loads(output)["url"] == url
    assert json.loads(output)["model"] == "toy"
    with served(attach, "attach_deadline_s=0.3") as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "does not answer after 0.3 s" in errors


async def test_siblings_through_the_service_have_the_scores_of_full_logits(tmp_path: Path) -> None:
    folder = model_folder("qwen3")
    path = tmp_path / "hf.yaml"
    path.write_text(f"kind: local\nname: hf\nmodel: {folder}\n")
    config = load_teacher_service(path)
    assert isinstance(config, LocalTeacherService)
    app = build_teacher_app(load_local(config), limits=service_limits(config))
    prompts = list(siblings(120, (9, 12, 1, 30)))
    async with serving(app) as url, GenerateClient(url) as client:
        replies = await asyncio.gather(
            *(client.generate(scoring_request(ids, 120)) for ids in prompts)
        )
    cached = [reply.meta_info.cached_tokens for reply in replies]
    assert sorted(cached) == [0, 119, 119, 119]
    for ids, reply in zip(prompts, replies, strict=True):
        scores = decode_input_logprobs(reply, input_ids=ids, start=120)
        logits = plain_logits(plain_model("qwen3"), ids, FullVocabulary(304)).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        expected = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[119:-1]
        expected = expected[np.arange(len(expected)), list(ids[120:])]
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)


def siblings(prefix: int, tails: Sequence[int]) -> Iterator[tuple[int, ...]]:
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 290, prefix).tolist()
    for tail in tails:
        yield (*shared, *rng.integers(0, 290, tail).tolist())
