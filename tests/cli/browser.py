"""A headless Chromium for tests, by its own protocol (CDP) over a websocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
_FLAGS += ("--disable-background-networking", "--no-first-run", "--remote-debugging-port=0")


class Tab:
    """A page that is open.

    Attributes:
        problems: errors and warnings of the console, and exceptions.
        fetched: URLs that it asked for, itself included.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._next = 0
        self.problems: list[str] = []
        self.fetched: list[str] = []
        self.loaded = False

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        await self._socket.send_json({"id": self._next, "method": method, "params": params})
        while True:
            message = await asyncio.wait_for(self._socket.receive_json(), 60)
            if message.get("id") == self._next:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.fetched.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    async def open(self, page: Path | str, width: int = 1000, dark: bool = False) -> None:
        """Open a file, or a URL."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[theme])
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        url = page if isinstance(page, str) else f"file://{page}"
        await self.call("Page.navigate", url=url)
        until = time.monotonic() + 60
        while not self.loaded:
            assert time.monotonic() < until, "the page did not load"
            await self.evaluate("0")
            await asyncio.sleep(0.02)

    async def evaluate(self, code: str) -> Any:
        """The value of an expression; an exception of the page is one here."""
        found = await self.call("Runtime.evaluate", expression=code, returnByValue=True)
        if "exceptionDetails" in found:
            raise AssertionError(json.dumps(found["exceptionDetails"])[:1000])
        return found["result"].get("value")

    async def mouse(self, *steps: tuple[str, float, float]) -> None:
        """("pressed" | "moved" | "released", x, y) in the window, one after the other."""
        for kind, x, y in steps:
            button = {} if kind == "moved" else {"clickCount": 1}
            await self.call(
                "Input.dispatchMouseEvent",
                **{"type": f"mouse{kind.capitalize()}", "x": x, "y": y, "button": "left"},
                **{"buttons": 1, **button},
            )

    async def screenshot(self, path: Path) -> None:
        """The whole page, however long, as a PNG."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        _write(path, base64.b64decode(found["data"]))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _start(profile: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(CHROMIUM), *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@contextlib.asynccontextmanager
async def chromium(profile: Path) -> Any:
    """A browser of our own; yields a function that opens a tab. Ends with the block."""
    process = _start(profile)
    try:
        said = profile / "DevToolsActivePort"
        until = time.monotonic() + 60
        while not (said.exists() and "\n" in said.read_text()):
            assert time.monotonic() < until, "Chromium did not start"
            assert process.poll() is None, "Chromium ended at once"
            await asyncio.sleep(0.05)
        port = said.read_text().splitlines()[0]
        async with aiohttp.ClientSession() as session:
            tabs: list[aiohttp.ClientWebSocketResponse] = []

            async def tab() -> Tab:
                async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as made:
                    url = (await made.json())["webSocketDebuggerUrl"]
                tabs.append(await session.ws_connect(url, max_msg_size=0))
                return Tab(tabs[-1])

            try:
                yield tab
            finally:
                for socket in tabs:
                    await socket.close()
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
