"""A headless Chromium, driven by its own protocol: opens a file, says what it asked for, takes a picture."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--single-process", "--no-zygote", "--disable-gpu", "--hide-scrollbars",
    "--no-first-run", "--remote-debugging-port=0", "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1400,900",
)  # fmt: skip
START_S, LOAD_S = 120.0, 120.0


def find_browser() -> str | None:
    """VIME_BROWSER, what ./scripts/get_browser.sh brought, or one of the PATH."""
    brought = ROOT / ".browser" / "chromium"
    candidates = [os.environ.get("VIME_BROWSER"), str(brought) if brought.is_file() else None]
    return next(filter(None, [*candidates, *map(shutil.which, NAMES)]), None)


class Tab:
    """One page. `asked` is every address that it wanted, `errors` what its console called an error."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.asked: list[str] = []
        self.errors: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(LOAD_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message
                    return dict(message["result"])
                self._note(message)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression, also of a promise."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def open(self, path: Path) -> None:
        """Load the file and wait until the page says that it is drawn, or that it failed."""
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=path.resolve().as_uri())
        await self.evaluate(
            "new Promise((done) => { const look = () => document.body && (document.body.dataset.drawn || "
            "document.body.dataset.failed) ? done() : setTimeout(look, 20); look(); })"
        )

    async def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        height = await self.evaluate("document.body.scrollHeight")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=1400, height=height, deviceScaleFactor=1, mobile=False
        )
        picture = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(picture["data"]))

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.asked.append(parameters["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])


@contextlib.asynccontextmanager
async def opened_tab(browser: str, profile: Path) -> AsyncIterator[Tab]:
    """A browser with one empty tab; it is ended on the way out."""
    process = subprocess.Popen(
        [browser, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        port = await _port(profile / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:
            target = await _page(session, f"http://127.0.0.1:{port}/json/list")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.kill()
        process.wait(timeout=START_S)


async def _page(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The empty tab, which may come a moment after the port."""
    async with asyncio.timeout(START_S):
        while True:
            async with session.get(url) as answer:
                pages = [entry for entry in await answer.json() if entry["type"] == "page"]
            if pages:
                return dict(pages[0])
            await asyncio.sleep(0.05)


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    async with asyncio.timeout(START_S):
        while not (file.is_file() and file.read_text().strip()):
            assert process.poll() is None, f"the browser ended with {process.returncode}"
            await asyncio.sleep(0.05)
    return int(file.read_text().split()[0])
