"""A headless Chromium that a test talks to: what a page draws, logs and asks the network for."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

START_DEADLINE_S = 60.0
CALL_DEADLINE_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browser_path() -> str | None:
    """The first browser on the path that speaks the DevTools protocol."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab, driven over the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.logs: list[str] = []
        """Console messages, exceptions, and complaints of the browser itself."""
        self.requests: list[str] = []
        """Addresses asked for."""

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        """One command; events that arrive meanwhile are noted."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        async with asyncio.timeout(CALL_DEADLINE_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == self._number:
                    assert "error" not in message, message
                    result: dict[str, Any] = message["result"]
                    return result
                self._note(message)

    async def evaluate(self, expression: str) -> Any:
        """Value of a script expression."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def open(self, address: str, is_ready: str) -> None:
        """Load a page and wait until the expression ``is_ready`` holds."""
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=address)
        async with asyncio.timeout(CALL_DEADLINE_S):
            while not await self.evaluate(is_ready):  # noqa: ASYNC110 - nothing in here could tell
                await asyncio.sleep(0.02)

    async def point_at(self, selector: str) -> None:
        """Scroll to the first such element and move the mouse onto it."""
        at = await self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView();"
            " const r = e.getBoundingClientRect();"
            " return [r.left + r.width / 2, r.top + r.height / 2]; })()"
        )
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.logs.append(str([argument.get("value") for argument in params["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.logs.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.logs.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@asynccontextmanager
async def open_page(executable: str, profile: Path) -> AsyncIterator[Page]:
    """A new tab in a browser of its own, which ends with the block."""
    process = await asyncio.create_subprocess_exec(
        executable,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1300,1000",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert process.stderr is not None
    drain: asyncio.Task[bytes] | None = None
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            port = None
            while port is None:
                line = await process.stderr.readline()
                assert line, "the browser ended before it listened"
                port = re.search(rb"DevTools listening on ws://[^:]+:(\d+)/", line)
        drain = asyncio.create_task(process.stderr.read())  # a full pipe would stop the browser
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port[1].decode()}/json/list") as answer:
                targets = await answer.json()
            address = next(t for t in targets if t["type"] == "page")["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10.0)
        except TimeoutError:
            process.kill()
            await process.wait()
        if drain is not None:
            await drain
