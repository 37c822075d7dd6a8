"""A real SGLang server for the length of a block, in a thread's own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miniverl_dist.config.serve import SglangLaunch
from teacher_server.launch_sglang import sglang_teacher
from tests.support.ports import free_ports
from tests.support.sglang_engine import OVERLAY, sglang_python

START_S = 300
ENV = {"PYTHONPATH": str(OVERLAY), "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}


@contextmanager
def sglang_server(model: Path, log_file: Path, name: str, **options: Any) -> Iterator[str]:
    """The URL of a server on a CPU.

    Args:
        model: Folder.
        log_file: Gets what it prints.
        name: What it says its model is called.
        options: Of SGLang, beside those of a CPU.
    """
    [port] = free_ports(1)
    launch = SglangLaunch.model_validate(
        {
            "python": sglang_python(),
            "model": str(model),
            "port": port,
            "device": "cpu",
            "dtype": "float32",
            "max_total_tokens": 8000,
            "max_running_requests": 8,
            "log_file": log_file,
            "env": ENV,
            "extra_args": {"attention-backend": "torch_native"} | options,
        }
    )
    started, ended, found = threading.Event(), asyncio.Event(), list[str | BaseException]()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with sglang_teacher(launch, name) as server:
            found.append(server.url)
            started.set()
            await ended.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            found.append(error)
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(START_S)
        if isinstance(found[0], BaseException):
            raise found[0]
        yield found[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(60)
