"""`miniverl-dist serve teacher`: the teacher as a process of its own, in the foreground.

Once it answers, one JSON line is printed: ``{"url": ..., "port": ..., "model": ...}``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from miniverl_dist.config.serve import (
    LocalTeacherService,
    SglangLaunch,
    SglangTeacherService,
    TeacherServiceConfig,
)
from miniverl_dist.errors import ConfigError, EngineError
from miniverl_dist.generate_api.bearer import read_secret
from teacher_server.launch_sglang import attached_model, sglang_teacher
from teacher_server.service import announcement, serve_local

Tell = Callable[[str], None]


def serve_teacher(config: TeacherServiceConfig, tell: Tell, note: Tell = lambda line: None) -> None:
    """Serve until SIGTERM or SIGINT; an attached server is only checked.

    Args:
        config: What to serve.
        tell: Takes the line with the URL.
        note: Takes what a person should know besides.

    Raises:
        MiniverlError: it cannot start; SGLang has ended by itself.
        ConfigError: the port is taken, too.
    """

    def announce(url: str, model: str) -> None:
        tell(announcement(url, model))

    if isinstance(config, LocalTeacherService):
        _require_secret("token_file", config.token_file)
        _require_folder(config.model)
        _require_free(config.host, config.port, "port")

        def stopping() -> None:
            left_s = config.drain_deadline_s
            note(f"stopping: requests at work have {left_s:g} s (drain_deadline_s)")

        asyncio.run(serve_local(config, announce, stopping))
        return
    if config.launch is not None:
        _require_secret("launch.token_file", config.launch.token_file)
        _require_free(config.launch.host, config.launch.port, "launch.port")
    asyncio.run(_serve_sglang(config, announce))


def _require_secret(field: str, path: Path | None) -> None:
    if path is None:
        return
    try:
        read_secret(path)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None


def _require_folder(model: Path) -> None:
    if not model.is_dir():
        raise ConfigError(
            f"model: {model} is no model folder: name one with `-o model=FOLDER`, a Hugging Face "
            "folder or the toy teacher of a finished run (RUN/teacher)"
        )


def _require_free(host: str, port: int, field: str) -> None:
    """Raise unless a server may listen there; another one's answers would pass for ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        other = " (0 picks a free one)" if field == "port" else ""
        raise ConfigError(
            f"{host}:{port}: {why or error}: choose another port with `-o {field}=PORT`{other}"
        ) from None


async def _serve_sglang(config: SglangTeacherService, announce: Callable[[str, str], None]) -> None:
    if config.launch is not None:
        await _until_signal(config.launch, config.name, announce)
    elif config.url is not None:
        model = await attached_model(config.url, deadline_s=config.attach_deadline_s)
        announce(config.url, model.model_path)


async def _until_signal(
    launch: SglangLaunch, name: str, announce: Callable[[str, str], None]
) -> None:
    serving = asyncio.current_task()
    assert serving is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Also while SGLang is still loading: the block below ends it whichever way it is left.
        loop.add_signal_handler(number, serving.cancel)
    with suppress(asyncio.CancelledError):
        async with sglang_teacher(launch, name) as teacher:
            announce(teacher.url, name)
            await teacher.ended()
            raise EngineError(
                f"SGLang ({name}) has ended; the end of {launch.log_file}:\n{teacher.log_tail()}"
            )
