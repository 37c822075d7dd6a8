"""Launching one SGLang server: its command, its environment, its readiness; torch-free.

The server starts with dummy weights from a folder that holds nothing but ``config.json``: real ones
come by a publish, and no tokenizer or generation config can add stop tokens of its own.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from miniverl_dist.config.recipe import SGLangEngineConfig
from miniverl_dist.errors import EngineError
from miniverl_dist.generate_api.app import LOOPBACK
from miniverl_dist.generate_api.process import ServerProcess
from rollout_server.engines.sglang_control import SGLangControl

NO_VERSION = "-1"
"""What a server calls its dummy weights."""
CONTEXT_MARGIN = 16
"""Tokens that the server's context is longer than ours: it keeps some back, and cuts outputs short
by as many without a word."""
PORT_TRIES = 3

FIXED_ENV: Final[Mapping[str, str]] = MappingProxyType(
    {
        # Logprobs are those after temperature, whatever the shell that started us has set.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        # /health would sample a token, and answer 503 while paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # The margin may lead beyond the model's own context; no token ever stands there.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Nothing is looked up in the network.
        "HF_HUB_OFFLINE": "1",
    }
)


@dataclass(frozen=True)
class SGLangLaunch:
    """What one server is started with.

    Args:
        config: Of the engine.
        config_file: ``config.json`` of the model.
        work_dir: Local to this machine; gets the log and the folder that is started from.
        max_context_tokens: Of prompt and output.
        dtype: Of weights and cache.
        returns_experts: Whether a mixture-of-experts model says which experts it chose.
    """

    config: SGLangEngineConfig
    config_file: Path
    work_dir: Path
    max_context_tokens: int
    dtype: Literal["float32", "bfloat16"]
    returns_experts: bool = False

    @property
    def model_dir(self) -> Path:
        """What the server takes for the model's folder."""
        return self.work_dir / "model"

    @property
    def env(self) -> dict[str, str]:
        """Variables on top of this process's own."""
        of_device = {"SGLANG_USE_CPU_ENGINE": "1"} if self.config.device == "cpu" else {}
        return {**of_device, **self.config.extra_env, **FIXED_ENV}

    def prepare(self) -> None:
        """Write the folder that the server starts from."""
        self.model_dir.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.config_file, self.model_dir / "config.json")

    def command(self, port: int) -> list[str]:
        """Program and arguments."""
        config = self.config
        options: dict[str, object] = {
            "model-path": self.model_dir,
            "load-format": "dummy",
            "weight-version": NO_VERSION,
            "host": LOOPBACK,
            "port": port,
            "device": config.device,
            "dtype": self.dtype,
            "tensor-parallel-size": config.tensor,
            "context-length": self.max_context_tokens + CONTEXT_MARGIN,
            "max-running-requests": config.max_running_requests,
            "mem-fraction-static": config.mem_fraction_static,
            # Otherwise a model's generation config fills in what a request leaves out.
            "sampling-defaults": "openai",
            # A config.json may name tokens that end a text; those of the request alone do here.
            "json-model-override-args": json.dumps({"eos_token_id": None}),
        }
        if config.attention_backend is not None:
            options["attention-backend"] = config.attention_backend
        if config.max_total_tokens is not None:
            options["max-total-tokens"] = config.max_total_tokens
        flags = {
            "skip-tokenizer-init": True,
            "enable-memory-saver": config.memory_saver,
            "enable-return-routed-experts": self.returns_experts,
        }
        given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        given += [f"--{name}" for name, is_on in flags.items() if is_on]
        python = str(config.python or sys.executable)
        # The last one wins; the config has refused extra arguments that are also given here.
        return [python, "-m", "sglang.launch_server", *config.extra_args, *given]


class SGLangServer:
    """One server process, started again as often as needed.

    Args:
        launch: What to start.
        name: For messages.
    """

    def __init__(self, launch: SGLangLaunch, name: str) -> None:
        self._launch, self._name = launch, name
        self._process: ServerProcess | None = None
        self._control: SGLangControl | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.is_alive

    @property
    def pid(self) -> int | None:
        """Leader of the process group; None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def control(self) -> SGLangControl:
        """Its endpoints.

        Raises:
            EngineError: it has not been started.
        """
        if self._control is None:
            raise EngineError(f"the server of engine {self._name} has not been started")
        return self._control

    async def start(self) -> None:
        """Start it and wait until it is ready.

        Raises:
            EngineError: it ended again; with the end of its log.
            DeadlineError: it is not ready within ``start_deadline_s``.
        """
        self._launch.prepare()
        for tries_left in reversed(range(PORT_TRIES)):
            try:
                return await self._start_at(free_port())
            except EngineError as error:
                # Somebody may have taken the port since it was found free.
                if "already in use" not in str(error).lower() or not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    async def stop(self) -> None:
        """End it with its children; may be repeated."""
        if self._process is not None:
            await self._process.stop()
        if self._control is not None:
            await self._control.close()

    async def has_ended(self, *, within_s: float) -> bool:
        """Whether the process is gone, now or a moment later."""
        if self._process is None:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._process.ended()
        return not self.is_alive

    def log_tail(self) -> str:
        """The end of the log, for an error."""
        return "" if self._process is None else self._process.log_tail()

    async def _start_at(self, port: int) -> None:
        await self.stop()
        config, launch = self._launch.config, self._launch
        self._control = SGLangControl(
            f"http://{LOOPBACK}:{port}",
            deadline_s=config.control_deadline_s,
            load_deadline_s=config.load_deadline_s,
        )
        self._process = ServerProcess(
            launch.command(port),
            name=f"the server of engine {self._name}",
            log_path=launch.work_dir / "server.log",
            env=launch.env,
        )
        await self._process.start(self._is_ready, deadline_s=config.start_deadline_s)

    async def _is_ready(self) -> bool:
        if not await self.control.is_healthy():
            return False
        info = await self.control.model_info()
        if info.model_path != str(self._launch.model_dir):
            raise EngineError(
                f"another server answers at {self.control.url}: address already in use by one of "
                f"{info.model_path}"
            )
        return True


def free_port() -> int:
    """A port that was free a moment ago; the server cannot be handed an open socket."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
