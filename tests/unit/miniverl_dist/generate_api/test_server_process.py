"""A server's process group: ready, late, dead, stopped, and orphaned; with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from miniverl_dist.errors import DeadlineError, EngineError
from miniverl_dist.generate_api.process import ServerProcess
from tests.support.processes import are_gone, lives

ROOT = Path(__file__).resolve().parents[4]
WITH_CHILD = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print('up', os.environ.get('MARK'), flush=True)\n"
    "open(sys.argv[1], 'w').write(f'{os.getpid()} {child.pid}')\n"
)
STUBBORN = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "open(sys.argv[1], 'w').write('0 0')\n"
)
SLEEP = "time.sleep(600)\n"


@asynccontextmanager
async def server(code: str, tmp_path: Path, **options: float) -> AsyncIterator[ServerProcess]:
    made = ServerProcess(
        [sys.executable, "-c", code, str(tmp_path / "pids")],
        name="server",
        log_path=tmp_path / "logs" / "server.log",
        env={"MARK": "marked"},
        poll_s=0.01,
        **options,
    )
    try:
        yield made
    finally:
        await made.stop()


async def never() -> bool:
    return False


def is_up(tmp_path: Path) -> bool:
    return (tmp_path / "pids").exists() and bool((tmp_path / "pids").read_text())


async def start(made: ServerProcess, tmp_path: Path) -> list[int]:
    async def ready() -> bool:
        return is_up(tmp_path)

    await made.start(ready, deadline_s=20)
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


async def gone(*pids: int) -> None:
    assert await asyncio.to_thread(are_gone, *pids)


async def test_stopping_ends_the_command_and_its_children(tmp_path: Path) -> None:
    async with server(WITH_CHILD + SLEEP, tmp_path) as made:
        assert (made.pid, made.is_alive) == (None, False)
        pids = await start(made, tmp_path)
        assert made.is_alive
        assert {os.getpgid(pid) for pid in pids} == {made.pid}
        assert made.pid != os.getpgid(0)
        with pytest.raises(EngineError, match="runs already"):
            await made.start(never, deadline_s=1)
        await made.stop()
        assert not made.is_alive
        await gone(*pids)
        await made.stop()
    assert made.log_tail() == "up marked"


async def test_it_can_be_started_again_and_the_log_goes_on(tmp_path: Path) -> None:
    async with server(WITH_CHILD + SLEEP, tmp_path) as made:
        first = await start(made, tmp_path)
        assert made.pid is not None
        os.killpg(made.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await made.ended()
        await gone(*first)
        (tmp_path / "pids").unlink()
        second = await start(made, tmp_path)
        assert set(first).isdisjoint(second)
    assert made.log_tail() == "up marked\nup marked"


async def test_the_children_of_a_command_that_crashed_are_ended(tmp_path: Path) -> None:
    async with server(WITH_CHILD, tmp_path) as made:
        with pytest.raises(EngineError, match="ended with status 0 before it was ready") as caught:
            await made.start(never, deadline_s=20)
        assert "up marked" in str(caught.value)
        await gone(int((tmp_path / "pids").read_text().split()[1]))


async def test_a_command_that_dies_while_it_serves_leaves_no_children(tmp_path: Path) -> None:
    async with server(WITH_CHILD + SLEEP, tmp_path) as made:
        command, child = await start(made, tmp_path)
        os.kill(command, signal.SIGKILL)
        async with asyncio.timeout(60):
            await made.ended()
        await gone(child)  # before anybody stops anything


async def test_a_command_that_fails_or_does_not_exist_shows_its_log(tmp_path: Path) -> None:
    async with server("raise SystemExit('no such model')", tmp_path) as made:
        with pytest.raises(EngineError, match=r"(?s)status 1 before.*server.log:.*no such model"):
            await made.start(never, deadline_s=20)
    missing = ServerProcess(
        [str(tmp_path / "nothing")], name="missing", log_path=tmp_path / "log", poll_s=0.01
    )
    with pytest.raises(EngineError, match=r"(?s)missing ended with status 127.*No such file"):
        await missing.start(never, deadline_s=20)


async def test_a_command_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    async with server(SLEEP.join(["import time\n", ""]), tmp_path) as made:
        with pytest.raises(DeadlineError, match=r"server is not ready after 0.05 s.*\n\(empty\)"):
            await made.start(never, deadline_s=0.05)
        assert not made.is_alive


async def test_a_start_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    async with server(WITH_CHILD + SLEEP, tmp_path) as made:
        starting = asyncio.create_task(made.start(never, deadline_s=20))
        async with asyncio.timeout(10):
            while not is_up(tmp_path):  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not made.is_alive
        await gone(*(int(pid) for pid in (tmp_path / "pids").read_text().split()))


async def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async with server(STUBBORN + SLEEP, tmp_path, stop_deadline_s=0.05) as made:
        await start(made, tmp_path)
        await made.stop()
        assert not made.is_alive


PARENT = (
    "import asyncio, os, sys, time\n"
    "from pathlib import Path\n"
    "from miniverl_dist.generate_api.process import ServerProcess\n"
    "file = Path(sys.argv[2])\n"
    "async def ready(): return file.exists() and bool(file.read_text())\n"
    "async def main():\n"
    "    made = ServerProcess([sys.executable, '-c', *sys.argv[1:3]], name='x',\n"
    "        log_path=Path(sys.argv[2] + '.log'), poll_s=0.01)\n"
    "    await made.start(ready, deadline_s=20)\n"
    "    if sys.argv[3] == 'fork' and (child := os.fork()) == 0:\n"
    "        time.sleep(600)\n"
    "    print(child if sys.argv[3] == 'fork' else 'started', flush=True)\n"
    "    await asyncio.sleep(600)\n"
    "asyncio.run(main())\n"
)


@pytest.mark.parametrize("how", ["alone", "as Ray does", "fork"])
async def test_it_ends_with_the_process_that_started_it(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", PARENT, WITH_CHILD + SLEEP, str(tmp_path / "pids"), how]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)  # noqa: ASYNC220
    forked = 0
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(lives(pid) for pid in pids)
        if how == "as Ray does":
            process.send_signal(signal.SIGSTOP)  # it must not notice, and end the group itself
            os.kill(os.getpgid(pids[0]), signal.SIGKILL)
        elif how == "fork":
            forked = int(line)  # it has inherited the pipe, and outlives its parent
        process.kill()
        process.wait()
        await gone(*pids)
        assert not forked or lives(forked)
    finally:
        process.kill()
        if forked:
            os.kill(forked, signal.SIGKILL)
        process.communicate()
