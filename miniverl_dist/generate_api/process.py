"""A server in a process group of its own: started, waited for, and ended with its children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from miniverl_dist.errors import DeadlineError, EngineError
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.ports import Clock

IsReady = Callable[[], Awaitable[bool]]
"""Whether the server answers; False where it cannot be reached yet."""

TAIL_BYTES = 4000
_KEEPER = Path(__file__).with_name("keeper.py")


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class ServerProcess:
    """One server and all processes that it starts; ends with this process, however that ends.

    Args:
        command: Program and arguments.
        name: For messages.
        log_path: Gets stdout and stderr, readable for this user only, since servers print their
            arguments; appended to, so that a restart keeps the former end.
        env: Variables on top of this process's own.
        secret: Never shown when the end of the log is.
        stop_deadline_s: From SIGTERM to SIGKILL.
        poll_s: Between two looks at the process or its readiness.
        clock: For deadlines and pauses.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        secret: str | None = None,
        stop_deadline_s: float = 10.0,
        poll_s: float = 0.1,
        clock: Clock | None = None,
    ) -> None:
        self.command, self.name, self.log_path = tuple(command), name, log_path
        self._env, self._secret = dict(env or {}), secret
        self._stop_deadline_s, self._poll_s = stop_deadline_s, poll_s
        self._clock: Clock = clock or SystemClock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Leader of the process group, whose id it is; None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the command still runs; what a dead one has left behind is ended."""
        return self._process is not None and self._exit_status(self._process) is None

    def log_tail(self, max_bytes: int = TAIL_BYTES) -> str:
        """The end of the log."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
                text = file.read().decode("utf-8", errors="replace").strip()
        except FileNotFoundError:
            return ""
        return text if self._secret is None else text.replace(self._secret, "(secret)")

    async def start(self, is_ready: IsReady, *, deadline_s: float) -> None:
        """Start the command and wait until it is ready; ended again where it does not get there.

        Raises:
            EngineError: it runs already, cannot be started, or has ended; with the log's tail.
            DeadlineError: it is not ready in time; with the log's tail.
        """
        if self.is_alive:
            raise EngineError(f"{self.name} runs already (process group {self.pid})")
        process = self._process = self._spawn()
        try:
            # Waits for the server to load; freed by its readiness, its end, or the deadline.
            async with asyncio.timeout(deadline_s):
                await self._until_ready(process, is_ready)
        except TimeoutError:
            await self.stop()
            raise DeadlineError(
                f"{self.name} is not ready after {deadline_s:.3g} s; {self._log_message()}"
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def ended(self) -> None:
        """Wait until the command has ended."""
        # Waits for as long as the server lives: whoever wants less cancels this.
        while self.is_alive:
            await self._clock.sleep(self._poll_s)

    async def stop(self) -> None:
        """End the whole group: SIGTERM, after the deadline SIGKILL. May be repeated."""
        process = self._process
        if process is None:
            return
        if self._exit_status(process) is None:
            self._signal_group(process, signal.SIGTERM)
            await self._exited(process, self._stop_deadline_s)
        # Also where the leader has ended by itself: its children may not have.
        self._signal_group(process, signal.SIGKILL)
        await self._exited(process, self._stop_deadline_s)
        if process.stdin is not None:
            process.stdin.close()

    def _spawn(self) -> subprocess.Popen[bytes]:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # The keeper's own interpreter ignores the environment, which is the command's.
        keeper = [sys.executable, "-I", str(_KEEPER), str(os.getpid()), *self.command]
        with open(self.log_path, "ab", opener=_for_this_user) as log:
            try:
                return subprocess.Popen(
                    keeper,
                    env=os.environ | self._env,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as exc:
                raise EngineError(f"{self.name} cannot be started: {exc}") from exc

    async def _until_ready(self, process: subprocess.Popen[bytes], is_ready: IsReady) -> None:
        while True:
            status = self._exit_status(process)
            if status is not None:
                raise EngineError(
                    f"{self.name} ended with status {status} before it was ready; "
                    f"{self._log_message()}"
                )
            if await is_ready():
                return
            await self._clock.sleep(self._poll_s)

    async def _exited(self, process: subprocess.Popen[bytes], deadline_s: float) -> None:
        end = self._clock.now() + deadline_s
        # Waits for the process to obey the signal it got.
        while self._exit_status(process) is None and self._clock.now() < end:
            await self._clock.sleep(self._poll_s)

    def _exit_status(self, process: subprocess.Popen[bytes]) -> int | None:
        had_ended = process.returncode is not None
        status = process.poll()
        if status is not None and not had_ended:
            self._signal_group(process, signal.SIGKILL)
        return status

    def _signal_group(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        # The group outlives its leader as long as it has members; without any there is none.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    def _log_message(self) -> str:
        return f"the end of {self.log_path}:\n{self.log_tail() or '(empty)'}"
