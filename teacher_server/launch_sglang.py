"""SGLang as the teacher: a server of our own launch, or one that runs already."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from miniverl_dist.config.serve import SglangLaunch
from miniverl_dist.errors import DeadlineError, GenerateApiError
from miniverl_dist.generate_api.bearer import read_secret
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.generate_api.process import ServerProcess
from miniverl_dist.generate_api.wire import ModelInfo

PROBE_DEADLINE_S = 5.0
"""For one question whether a server answers."""
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_POLL_S = 0.5


def sglang_command(launch: SglangLaunch, name: str, config_file: Path | None) -> list[str]:
    """The command line of ``sglang.launch_server``; secrets stand in ``config_file``."""
    command = [str(launch.python), "-m", "sglang.launch_server"]
    if config_file is not None:
        command += ["--config", str(config_file)]
    options: dict[str, str | int | float | bool | None] = {
        "model-path": launch.model,
        "served-model-name": name,
        "host": launch.host,
        "port": launch.port,
        "device": launch.device,
        "dtype": launch.dtype,
        "tp-size": launch.tensor_parallel,
        "dp-size": launch.data_parallel,
        "ep-size": launch.expert_parallel,
        "context-length": launch.context_length,
        "mem-fraction-static": launch.mem_fraction_static,
        "chunked-prefill-size": launch.chunked_prefill_size,
        "max-running-requests": launch.max_running_requests,
        "max-queued-requests": launch.max_queued_requests,
        "max-total-tokens": launch.max_total_tokens,
        "enable-metrics": launch.enable_metrics,
    }
    for option, value in (options | launch.extra_args).items():
        if value is True:
            command.append(f"--{option.lstrip('-')}")
        elif value is not None and value is not False:
            command += [f"--{option.lstrip('-')}", str(value)]
    return command


@contextmanager
def _secret_config(secret: str | None) -> Iterator[Path | None]:
    """A file that only this user can read, for what must not stand in the process list."""
    if secret is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="teacher-") as folder:  # made with mode 700
        path = Path(folder) / "secrets.yaml"
        path.touch(mode=0o600)
        path.write_text(f"api-key: {json.dumps(secret)}\n")
        yield path


class SglangTeacher:
    """A launched server.

    Args:
        launch: How.
        name: What it says its model is called.
        process: Its process.
    """

    def __init__(self, launch: SglangLaunch, name: str, process: ServerProcess) -> None:
        self._process = process
        self.name = name
        host = _ANY_HOST.get(launch.host, launch.host)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{launch.port}"

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process.is_alive

    @property
    def pid(self) -> int | None:
        """Its process group."""
        return self._process.pid

    def log_tail(self) -> str:
        """The end of what it printed."""
        return self._process.log_tail()

    async def ended(self) -> None:
        """Wait until the process is gone."""
        await self._process.ended()


@asynccontextmanager
async def sglang_teacher(launch: SglangLaunch, name: str) -> AsyncIterator[SglangTeacher]:
    """Launch a server and yield it once it answers; ended with its children after the block.

    Raises:
        ConfigError: the token file is unusable.
        EngineError: the server ended while it started; with the end of its log.
        DeadlineError: it does not answer in time; with the end of its log.
    """
    secret = None if launch.token_file is None else read_secret(launch.token_file)
    with _secret_config(secret) as config_file:
        process = ServerProcess(
            sglang_command(launch, name, config_file),
            name=f"SGLang ({name})",
            log_path=launch.log_file,
            env=launch.env,
            secret=secret,
            stop_deadline_s=launch.stop_deadline_s,
        )
        teacher = SglangTeacher(launch, name, process)
        limits = ClientLimits(request_deadline_s=PROBE_DEADLINE_S, max_retries=0)
        try:
            async with GenerateClient(teacher.url, limits=limits) as client:
                await process.start(client.health, deadline_s=launch.start_deadline_s)
            yield teacher
        finally:
            await process.stop()


async def attached_model(url: str, *, deadline_s: float) -> ModelInfo:
    """What the model behind a running server is.

    Raises:
        DeadlineError: nothing that speaks the contract answers there in time.
    """
    limits = ClientLimits(
        deadline_s=min(deadline_s, PROBE_DEADLINE_S),
        request_deadline_s=PROBE_DEADLINE_S,
        max_retries=0,
    )
    last = "the first request is still without a reply"
    try:
        async with asyncio.timeout(deadline_s), GenerateClient(url, limits=limits) as client:
            while True:
                try:
                    return await client.model_info()
                except (GenerateApiError, DeadlineError) as exc:
                    last = str(exc)
                # Waits for the server to come up; the timeout above ends it.
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise DeadlineError(f"{url} does not answer after {deadline_s:.3g} s: {last}") from None
