"""`miniverl-dist serve teacher`: the teacher as a process of its own, in the foreground.

Once it answers, one JSON line is printed: ``{"url": ..., "port": ..., "model": ...}``.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress

from miniverl_dist.config.serve import (
    LocalTeacherService,
    SglangLaunch,
    SglangTeacherService,
    TeacherServiceConfig,
)
from miniverl_dist.errors import ConfigError, EngineError
from teacher_server.launch_sglang import attached_model, sglang_teacher
from teacher_server.service import announcement, serve_local

Tell = Callable[[str], None]


def serve_teacher(config: TeacherServiceConfig, tell: Tell) -> None:
    """Serve until SIGTERM or SIGINT; an attached server is only checked.

    Raises:
        MiniverlError: it cannot start; SGLang has ended by itself.
        ConfigError: the port is taken, too.
    """

    def announce(url: str, model: str) -> None:
        tell(announcement(url, model))

    if isinstance(config, LocalTeacherService):
        try:
            asyncio.run(serve_local(config, announce))
        except OSError as error:
            raise ConfigError(f"{config.host}:{config.port}: {error}") from None
    else:
        asyncio.run(_serve_sglang(config, announce))


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
