"""Headless Chromium, driven over the DevTools protocol: load a page, ask it, take its picture."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",  # needed by root, in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
SECONDS = 60.0


def find_chromium() -> str | None:
    """Return the path of Chromium, or None where there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Tab:
    """One page of the browser.

    Args:
        socket: The connection to its DevTools.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls = 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol, and return its result."""
        self._calls += 1
        await self._socket.send_json({"id": self._calls, "method": method, "params": params})
        message = await self._receive(lambda event: event.get("id") == self._calls)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        result: dict[str, Any] = message["result"]
        return result

    async def open(self, url: str, width: int, height: int = 900) -> None:
        """Load a page in a window of this size, and wait until it and its images are there."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await self.call("Page.enable")
        await self.call("Page.navigate", url=url)
        await self._receive(lambda event: event.get("method") == "Page.loadEventFired")

    async def ask(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"in the page: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def picture(self, path: Path) -> None:
        """Write the whole page as a PNG file."""
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def _receive(self, wanted: Any) -> dict[str, Any]:
        while True:
            message: dict[str, Any] = await self._socket.receive_json(timeout=SECONDS)
            if wanted(message):
                return message


@contextlib.asynccontextmanager
async def browser(program: str, profile: Path) -> AsyncIterator[Tab]:
    """Start Chromium with an empty profile, and end it again.

    Args:
        program: What `find_chromium` returned.
        profile: A folder that does not exist, or is empty.
    """
    command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    try:
        port = await _port(profile / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                tabs = await answer.json()
            address = next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        process.wait(SECONDS)


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    """Wait until Chromium has written the port it listens on."""
    for _ in range(int(SECONDS / 0.1)):
        if file.is_file() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        if process.poll() is not None:
            raise RuntimeError(f"Chromium ended with status {process.returncode}")
        await asyncio.sleep(0.1)
    raise RuntimeError("Chromium opened no port for its DevTools")
