"""GET /chat in a real browser: answers, conversations, and what goes wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from console.api.settings import ApiSettings
from tests.api.harness import until
from tests.api.test_api_thinking import THINKS
from tests.fakes.backend import FakeBackend, Gate, saying
from tests.fakes.saying import Script
from tests.integration.browser import chromium
from tests.integration.chat_page.page import IDLE, LAST, chatting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_without_a_browser_it_is_said_how_to_get_one_and_ci_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match="apt-get install -y --no-install-recommends chromium"):
        chromium()


async def test_an_answer_is_shown_while_it_comes_and_how_fast_it_was(chrome: str, tmp_path: Path) -> None:
    gate = Gate()
    backend = FakeBackend(reply=saying("**Hello** there, you.", then=256), gate=gate)
    async with chatting(chrome, tmp_path, backend) as chat:
        await chat.send("hi")
        gate.allow(9)
        await chat.page.until(f"{LAST}.querySelector('strong')?.textContent === 'Hello'")
        assert await chat.page.run(f"{LAST}.querySelector('article').ariaBusy") == "true"
        assert await chat.page.run("!document.getElementById('stop').hidden")
        gate.open()
        assert await chat.answer() == "Hello there, you."
        stats = await chat.page.run(f"{LAST}.querySelector('.stats').textContent")
        assert "tok/s" in stats and "first token" in stats and "22 tokens" in stats
        assert await chat.page.run("document.getElementById('said').textContent") == "Answered: **Hello** there, you."
        assert await chat.page.run("document.activeElement.id") == "message"


async def test_thinking_is_folded_above_the_answer_with_how_long_it_took(chrome: str, tmp_path: Path) -> None:
    gate = Gate()
    backend = FakeBackend(reply=Script({"when": ["<think>Is it *noon*?</think>Yes.", "Now."]}), gate=gate)
    summary, thoughts = f"{LAST}.querySelector('summary').textContent", f"{LAST}.querySelector('details > div')"
    async with chatting(chrome, tmp_path, backend, template=THINKS) as chat:
        page = chat.page
        await chat.send("when")
        gate.allow(20)
        await page.until(f"{thoughts}?.textContent.startsWith('Is it')")
        assert await page.run(summary) == "Thinking…"
        gate.open()
        assert await chat.answer() == "Yes."
        took = await page.run(summary)
        assert re.fullmatch(r"Thought for \d+ s", took)
        assert not await page.run(f"{LAST}.querySelector('details').open")
        assert await page.run(f"{thoughts}.innerHTML") == "<p>Is it <em>noon</em>?</p>"
        await chat.reload()
        assert await page.run(summary) == took
        await chat.press_in_last("Regenerate")
        await page.until(f"{IDLE} && {LAST}.innerText.includes('Now')")
        assert await page.run(f"{LAST}.querySelector('details').hidden")


@pytest.mark.parametrize("by_key", [True, False], ids=["escape", "button"])
async def test_stop_keeps_what_came_and_frees_the_worker(chrome: str, tmp_path: Path, by_key: bool) -> None:
    gate = Gate()
    backend = FakeBackend(reply=saying("on and on "), gate=gate)
    async with chatting(chrome, tmp_path, backend) as chat:
        await chat.send("talk")
        gate.allow(6)
        await chat.page.until(f"{LAST}.innerText.includes('on and')")
        if by_key:
            await chat.page.press("Escape")
        else:
            await chat.page.click("#stop")
        assert (await chat.answer()).startswith("on and")
        assert await chat.page.run(f"{LAST}.querySelector('.note').textContent") == "Stopped"
        gate.open()
        await until(lambda: not backend.has_work())
        await until(lambda: [row.finish for row in chat.api.engine.publish().requests] == ["cancelled"])


async def test_another_answer_and_an_edit_keep_what_was_there(chrome: str, tmp_path: Path) -> None:
    script = Script({"one": ["first", "second"], "two": "third"})
    async with chatting(chrome, tmp_path, FakeBackend(reply=script)) as chat:
        page = chat.page
        assert await chat.ask("one") == "first"
        await chat.press_in_last("Regenerate")
        await page.until(f"{IDLE} && {LAST}.innerText.includes('second')")
        assert await page.run(f"{LAST}.querySelector('.version').textContent") == "2/2"
        await chat.press_in_last("Previous version")
        assert await chat.answer() == "first"

        await page.run("document.querySelector('.mine [aria-label=\"Edit this message\"]').click()")
        assert await page.run("document.activeElement.value") == "one"
        await page.run("document.activeElement.select()")
        await page.type("two")
        await page.press("Enter")
        await page.until(f"{IDLE} && {LAST}.innerText.includes('third')")
        await page.run("document.querySelector('.mine [aria-label=\"Previous version\"]').click()")
        await page.until(f"{LAST}.innerText.includes('second')")
        assert script.prompts == ["user: one\nassistant: "] * 2 + ["user: two\nassistant: "]


async def test_the_whole_conversation_is_sent_with_its_system_prompt_and_sampling(chrome: str, tmp_path: Path) -> None:
    backend = FakeBackend(reply=Script({"a": "b", "c": "d"}))
    async with chatting(chrome, tmp_path, backend) as chat:
        page = chat.page
        await page.click("#open-settings")
        await page.type("Be brief.")
        for name, value in {"temperature": "0.25", "top_k": "7", "seed": "5", "max_tokens": "40"}.items():
            await page.click(f"[name={name}]")
            await page.type(value)
        await page.click("[name=stop]")
        await page.type("END\\n")
        await page.press("Escape")
        await chat.ask("a")
        await chat.ask("c")
        sent = backend.submitted[-1]
    assert bytes(sent.prompt_ids).decode() == "system: Be brief.\nuser: a\nassistant: b\nuser: c\nassistant: "
    assert (sent.params.temperature, sent.params.top_k, sent.params.seed, sent.params.max_tokens) == (0.25, 7, 5, 40)
    assert sent.params.stop == ("END\n",)


async def test_a_wrong_key_is_said_and_a_right_one_is_kept_only_where_that_is_asked_for(
    chrome: str, tmp_path: Path
) -> None:
    settings = ApiSettings(port=0, api_key="eric_right")
    kept = "Object.values(localStorage).some((each) => each.includes('eric_right'))"
    async with chatting(chrome, tmp_path, FakeBackend(reply=Script({})), settings) as chat:
        page = chat.page
        assert "key" in await page.run("document.getElementById('notice').innerText")
        await page.click("#notice button")
        await page.type("eric_wrong")
        await page.until("document.getElementById('notice').innerText.includes('not valid')")
        await page.run("document.activeElement.select()")
        await page.type("eric_right")
        await page.until("document.getElementById('notice').hidden")
        await page.press("Escape")
        assert await chat.ask("let me in") == "let me in"
        assert not await page.run(kept)

        await page.reload()
        assert "key" in await page.run("document.getElementById('notice').innerText")
        await chat.send("and now")
        await page.until("document.getElementById('settings').open")
        await page.type("eric_right")
        await page.run("document.querySelector('[name=keepKey]').click()")
        await page.until("document.getElementById('notice').hidden")
        await page.press("Escape")
        await page.run(f"{LAST}.querySelector('.failure button').click()")
        await page.until(f"{IDLE} && {LAST}.innerText.includes('and now')")
        await page.reload()
        assert await page.run(kept)
        assert await page.run("document.getElementById('notice').hidden")


async def test_an_answer_that_fails_says_why_and_can_be_asked_for_again(chrome: str, tmp_path: Path) -> None:
    backend = FakeBackend(reply=Script({}), max_model_len=64)
    async with chatting(chrome, tmp_path, backend) as chat:
        await chat.send("long " * 40)
        await chat.page.until(f"!!{LAST}.querySelector('.failure')")
        assert "64" in await chat.page.run(f"{LAST}.querySelector('.failure').innerText")
        assert await chat.page.run(f"{LAST}.querySelector('.failure button').textContent") == "Try again"
