"""Conversations in a real browser: kept, renamed, brought back, exported, imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.harness import until
from tests.fakes.backend import FakeBackend
from tests.fakes.saying import Script
from tests.integration.chat_page.page import chatting, choose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_conversations_outlast_the_page_and_can_be_renamed_deleted_and_brought_back(
    chrome: str, tmp_path: Path
) -> None:
    async with chatting(chrome, tmp_path, FakeBackend(reply=Script({}))) as chat:
        page = chat.page
        titles = "[...document.querySelectorAll('#conversations .open')].map((each) => each.textContent)"
        await chat.ask("alpha")
        await page.click("#new")
        await chat.ask("beta")
        await chat.reload()
        assert await page.run(titles) == ["beta", "alpha"]
        assert await chat.text() == "beta"

        await page.run("document.querySelector('[aria-label=\"Rename alpha\"]').click()")
        await page.type("Gamma")
        await page.press("Enter")
        await chat.reload()
        assert await page.run(titles) == ["beta", "Gamma"]

        await page.run("document.querySelector('[aria-label=\"Delete beta\"]').click()")
        assert await page.run(titles) == ["Gamma"]
        await page.run("document.querySelector('#toast button').click()")
        assert await page.run(titles) == ["beta", "Gamma"]
        await page.run("document.querySelector('[aria-label=\"Delete beta\"]').click()")
        await chat.reload()
        assert await page.run(titles) == ["Gamma"]


async def test_conversations_go_to_a_file_and_come_back_from_it(chrome: str, tmp_path: Path) -> None:
    async with chatting(chrome, tmp_path, FakeBackend(reply=Script({"q": "an answer"}))) as chat:
        page = chat.page
        await chat.ask("q")
        await page.send("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        await page.run("document.getElementById('export').click()")
        await until(lambda: _exported(tmp_path) != [])
        file = _exported(tmp_path)[0]
        await page.run("document.querySelector('[aria-label=\"Delete q\"]').click()")
        await choose(page, file)
        await page.until("document.getElementById('toast').textContent === 'Imported 1 conversation.'")
        await page.click("#conversations .open")
        assert await chat.text() == "an answer"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "That file is not JSON."),
        ("{}", "That file has no conversations exported from this page."),
        (
            '{"format": "ericllm-conversations", "conversations": [{"turns": [{"parent": "?", "text": ""}]}]}',
            "Conversation 1 of that file has an invalid turn.",
        ),
    ],
    ids=["text", "other", "turn"],
)
async def test_a_file_that_is_none_is_refused_in_a_sentence(chrome: str, tmp_path: Path, text: str, said: str) -> None:
    async with chatting(chrome, tmp_path, FakeBackend()) as chat:
        file = tmp_path / "bad.json"
        file.write_text(text)
        await choose(chat.page, file)
        await chat.page.until("!document.getElementById('toast').hidden")
        assert await chat.page.run("document.getElementById('toast').textContent") == said


def _exported(folder: Path) -> list[Path]:
    return list(folder.glob("conversations-*.json"))
