"""Debian's Chromium without a screen, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

PATIENCE_S = 60.0
INSTALL = "apt-get install -y --no-install-recommends chromium"
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers, where its sandbox does not start
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
_LISTENING = re.compile(r"DevTools listening on (ws://\S+)\n")
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


def chromium() -> str:
    """Where Chromium is. Without it a test is skipped here, and fails in CI."""
    found = shutil.which("chromium")
    if found is None:
        said = f"the chat page is tested in a real browser: {INSTALL}"
        pytest.fail(said) if os.environ.get("CI") else pytest.skip(said)
    return found


class Page:
    """One tab. What went wrong in it is kept: `errors` of scripts, of the policy and of the console; `hosts` are those
    that it asked anything of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.downloads: list[str] = []
        self._socket = socket
        self._session: str | None = None
        self._asked = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def open(self) -> None:
        """Make the tab, of a person of its own, who is gone with the connection."""
        context = await self.send("Target.createBrowserContext", disposeOnDetach=True)
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=context["browserContextId"])
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.send(f"{domain}.enable")
        await self.send("Page.addScriptToEvaluateOnNewDocument", source=_WATCH_POLICY)

    async def close(self) -> None:
        """Read no more."""
        self._reading.cancel()

    async def send(self, method: str, **params: object) -> dict[str, Any]:
        """One command, and what it came to."""
        self._asked += 1
        number = self._asked
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        order = {"id": number, "method": method, "params": params}
        await self._socket.send_json(order if self._session is None else {**order, "sessionId": self._session})
        async with asyncio.timeout(PATIENCE_S):
            return await answer

    async def go(self, url: str, ready: str = "document.body?.dataset.ready === 'true'") -> None:
        """Open an address, and wait until the page there says that it is ready."""
        await self.send("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({json.dumps(url)}) && {ready}")

    async def reload(self) -> None:
        """The same again, from the server."""
        await self.run("window.isOld = true")
        await self.send("Page.reload")
        await self.until("!window.isOld && document.body?.dataset.ready === 'true'")

    async def run(self, script: str) -> Any:
        """What an expression of JavaScript is, or comes to."""
        found = await self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true, and return it."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        if found := await self.run(script):
                            return found
                    except RuntimeError:
                        pass  # between two documents there is none to ask
                    await asyncio.sleep(0.02)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"never: {script}\n{self.errors}\n{text}") from None

    async def click(self, selector: str) -> None:
        """Click the first element that `selector` finds, with the mouse, where it can be seen."""
        found = f"document.querySelector({json.dumps(selector)})"
        await self.until(f"!!{found}")
        x, y = await self.run(
            f"(() => {{ const at = {found}; at.scrollIntoView({{block: 'nearest'}});"
            "const box = at.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key. modifiers: 1 Alt, 2 Ctrl, 8 Shift."""
        said = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key], "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **said, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **said)

    async def look(self, width: int, height: int, *, dark: bool, scale: float = 1.0) -> None:
        """Be a window of that size, with light or dark colours."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self) -> bytes:
        """The window as a PNG, with all that moves at its end."""
        await self.run("document.fonts.ready.then(() => new Promise(requestAnimationFrame)).then(() => 1)")
        await self.run(
            "for (const each of document.getAnimations()) { try { each.finish(); } catch { /* endless */ } }"
        )
        found = await self.send("Page.captureScreenshot", format="png")
        return base64.b64decode(found["data"])

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._settle(self._answers.pop(event["id"]), event)
            else:
                self._note(event["method"], event["params"])

    def _settle(self, answer: asyncio.Future[dict[str, Any]], event: dict[str, Any]) -> None:
        if answer.done():
            return
        if "error" in event:
            answer.set_exception(RuntimeError(event["error"]["message"]))
        else:
            answer.set_result(event["result"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                address = urlsplit(params["request"]["url"])
                if address.scheme in ("http", "https", "ws", "wss"):
                    self.hosts.add(address.netloc)
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.errors.append(" ".join(str(each.get("value")) for each in params["args"]))
            case "Log.entryAdded" if params["entry"]["source"] in ("security", "violation", "javascript"):
                self.errors.append(params["entry"]["text"])


_WATCH_POLICY = """
document.addEventListener("securitypolicyviolation",
  ({violatedDirective, blockedURI, sample}) => console.error("policy", violatedDirective, blockedURI, sample));
for (const name of ["alert", "confirm", "prompt"]) window[name] = () => console.error(name);
"""


@contextmanager
def browser(folder: Path) -> Iterator[str]:
    """A browser with its profile in `folder`; the address where it takes orders."""
    said = folder / "browser.log"
    with said.open("wb") as log:
        program = subprocess.Popen(
            [chromium(), *_FLAGS, f"--user-data-dir={folder / 'profile'}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
        )
    try:
        yield _address(program, said)
    finally:
        program.kill()
        program.wait()


def _address(program: subprocess.Popen[bytes], said: Path) -> str:
    """Where the browser takes orders, as it says on stderr."""
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends and program.poll() is None:
        if found := _LISTENING.search(said.read_text(errors="replace")):
            return found[1]
        time.sleep(0.02)
    raise AssertionError(f"the browser did not start: {said.read_text(errors='replace')}")


@asynccontextmanager
async def browsing(address: str) -> AsyncIterator[Page]:
    """A tab of the browser there, which shares nothing with others and is gone afterwards."""
    async with aiohttp.ClientSession() as http, http.ws_connect(address, max_msg_size=0) as socket:
        page = Page(socket)
        await page.open()
        yield page
        await page.send("Runtime.evaluate", expression="1")
        await page.close()
