"""A page in a real Chromium without a window, driven over its DevTools protocol."""

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


class Page:
    """`errors` are what the page's console and its scripts complained about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = json.loads((await self._socket.receive(timeout=30)).data)
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression."""
        result = (await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True))[
            "result"
        ]
        assert result.get("subtype") != "error", result
        return result.get("value")

    async def wait_for(self, script: str, timeout_s: float = 30.0) -> Any:
        """The value of an expression, once it is true."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not (value := await self.run(script)):
            assert asyncio.get_running_loop().time() < deadline_s, f"it did not come true: {script}"
            await asyncio.sleep(0.05)
        return value

    async def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def look(self, width: int, height: int, scheme: str) -> None:
        """Give the window a size, and the user a liking for "light" or "dark"."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"]))


@contextlib.asynccontextmanager
async def page_at(url: str) -> AsyncIterator[Page]:
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [PROGRAM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            async with aiohttp.ClientSession() as http:
                port = await _port(Path(folder) / "DevToolsActivePort", browser)
                async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    target = next(one for one in await answer.json(content_type=None) if one["type"] == "page")
                async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    await page.call("Page.navigate", url=url)
                    yield page
        finally:
            browser.kill()
            browser.wait()


async def _port(path: Path, browser: subprocess.Popen[bytes]) -> int:
    for _ in range(600):
        if path.exists() and path.read_text():
            return int(path.read_text().split()[0])
        assert browser.poll() is None, "the browser has ended"
        await asyncio.sleep(0.05)
    raise AssertionError("the browser does not answer")
