"""A page in a real Chromium, driven over its DevTools protocol; tests are skipped where there is none."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed")
DEADLINE_SECONDS = 20.0
_START_SECONDS = 30.0
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")


class Page:
    """One page. `complaints`: what the browser said of it: errors, warnings, refusals by its policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One call of the protocol. An error answer fails the test."""
        number = len(self._answers) + 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(DEADLINE_SECONDS):
            found = await answer
        assert "error" not in found, found
        return dict(found["result"])

    async def open(self, url: str) -> None:
        """Go there. It returns before the page is loaded."""
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, condition: str, seconds: float = DEADLINE_SECONDS) -> None:
        """Wait until an expression is true. One that fails is not true: its page may not be there yet."""
        script = f"(() => {{ try {{ return !!({condition}); }} catch {{ return false; }} }})()"
        try:
            async with asyncio.timeout(seconds):
                while not await self.run(script):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"never: {condition}\n{self.complaints}\n{text[:3000]}") from None

    async def text(self, selector: str = "main") -> str:
        """The text of the first such element."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def click(self, selector: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def type(self, selector: str, text: str) -> None:
        """Put text into a field, as if it were typed."""
        await self.run(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)}); field.value = {json.dumps(text)};"
            " field.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )

    async def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    async def prefer(self, scheme: str) -> None:
        """Prefer the colour scheme `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, file: Path) -> None:
        """Of what can be seen of the page."""
        found = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(_write, file, base64.b64decode(found["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                if not (answer := self._answers[told["id"]]).done():  # it was given up
                    answer.set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                details = told["params"]["exceptionDetails"]
                self.complaints.append(str(details.get("exception", details).get("description", details)))
            elif told["method"] == "Runtime.consoleAPICalled" and told["params"]["type"] in ("error", "warning"):
                self.complaints.append(str([each.get("value") for each in told["params"]["args"]]))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] in ("error", "warning"):
                entry = told["params"]["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")


@asynccontextmanager
async def browser_page(folder: Path) -> AsyncIterator[Page]:
    """A new page of a new browser, whose profile is in the folder."""
    assert BROWSER is not None
    profile = folder / "profile"
    command = [BROWSER, *_FLAGS, f"--user-data-dir={profile}", "--window-size=1360,900", "about:blank"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    try:
        async with aiohttp.ClientSession() as session:
            url = await _page_url(session, profile / "DevToolsActivePort")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                try:
                    yield page
                finally:
                    await page.close()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


async def _page_url(session: aiohttp.ClientSession, port_file: Path) -> str:
    async with asyncio.timeout(_START_SECONDS):
        while True:
            with suppress(OSError, ValueError, IndexError, aiohttp.ClientError):
                port = int((await asyncio.to_thread(port_file.read_text)).splitlines()[0])
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [each for each in await answer.json() if each["type"] == "page"]
                    return str(pages[0]["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)
