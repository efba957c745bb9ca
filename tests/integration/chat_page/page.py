"""The chat page in a real browser (Debian's Chromium), as a person uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from console.api.settings import ApiSettings
from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend
from tests.fakes.model import fake_spec
from tests.fakes.tool_templates import write_tool_model
from tests.integration.browser import Page, browsing

IDLE = "!document.querySelector('[aria-busy]')"
_KEPT = """new Promise((resolve) => {
  const opening = indexedDB.open("ericllm-chat");
  opening.onsuccess = () => {
    const looking = opening.result.transaction("conversations");
    looking.objectStore("conversations").count();
    looking.oncomplete = () => { opening.result.close(); resolve(); };
  };
})"""
"""Settled once all that was begun before is kept: looks and changes take their turns."""
LAST = "[...document.querySelectorAll('.turn')].at(-1)"


@dataclass
class Chat:
    """The page, and the server that it talks to."""

    page: Page
    api: Served

    async def ask(self, question: str) -> str:
        """Ask as a person does, and wait for the answer's end; what it says."""
        await self.send(question)
        return await self.answer()

    async def send(self, question: str) -> None:
        """Ask, without waiting."""
        await self.page.click("#message")
        await self.page.type(question)
        await self.page.press("Enter")
        await self.page.until(f"{LAST}?.classList.contains('turn')")

    async def answer(self) -> str:
        """The text of the last answer, once it has ended."""
        await self.page.until(f"{IDLE} && !!{LAST}?.querySelector('footer')")
        return await self.text()

    async def text(self) -> str:
        """The text of the last answer so far."""
        found: str = await self.page.run(f"{LAST}.querySelector('.said')?.innerText ?? ''")
        return found

    async def reload(self) -> None:
        """The page anew, once what was done on it is kept."""
        await self.page.run(_KEPT)
        await self.page.reload()

    async def press_in_last(self, label: str) -> None:
        """Press a button of the last turn."""
        await self.page.run(f"{LAST}.querySelector('[aria-label=\"{label}\"]').click()")


@asynccontextmanager
async def chatting(
    chrome: str, folder: Path, backend: FakeBackend, settings: ApiSettings | None = None, *, template: str = ""
) -> AsyncIterator[Chat]:
    """The page, open for somebody new. Whatever a test does there: it asks nobody but its server, breaks no policy
    and no script of its own. template: the model's, where it is another than the fake model's."""
    spec = fake_spec(write_tool_model(folder / "model", template)) if template else None
    async with serving(folder / "model", backend, settings=settings, spec=spec) as api, browsing(chrome) as page:
        await page.look(1280, 800, dark=True)
        await page.go(f"{api.url}/chat")
        yield Chat(page, api)
        assert page.errors == []
        assert page.hosts == {api.url.removeprefix("http://")}
        assert await page.run("typeof window.hacked") == "undefined"


async def choose(page: Page, file: Path) -> None:
    """Choose a file to import."""
    root = await page.send("DOM.getDocument")
    found = await page.send("DOM.querySelector", nodeId=root["root"]["nodeId"], selector="#file")
    await page.send("DOM.setFileInputFiles", files=[str(file)], nodeId=found["nodeId"])
