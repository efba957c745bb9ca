"""GET /chat in a real browser: Debian's Chromium (apt-get install -y --no-install-recommends chromium)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from console.api.settings import ApiSettings
from tests.api.harness import Served, serving, until
from tests.fakes.backend import FakeBackend, Gate, saying
from tests.fakes.saying import Script
from tests.integration.browser import Page, browser, browsing, chromium

pytestmark = pytest.mark.slow

IDLE = "!document.querySelector('[aria-busy]')"
LAST = "[...document.querySelectorAll('.turn')].at(-1)"
HOSTILE = (
    "<img src=x onerror=window.hacked=1> <script>window.hacked=1</script> "
    "[press](javascript:window.hacked=1) [data](data:text/html,<script>window.hacked=1</script>) "
    "<a href='javascript:window.hacked=1'>x</a> <svg onload=window.hacked=1> "
    "<iframe src='http://elsewhere.invalid'></iframe> "
    "![see](http://elsewhere.invalid/x.png) <style>body{display:none}</style>\n\n"
    "```html\n<img src=x onerror=window.hacked=1>\n```\n\n"
    "| <script>window.hacked=1</script> | `</code><script>` |\n|---|---|\n| x | y |\n"
)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One browser for all of these."""
    with browser(tmp_path_factory.mktemp("chrome")) as address:
        yield address


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

    async def press_in_last(self, label: str) -> None:
        """Press a button of the last turn."""
        await self.page.run(f"{LAST}.querySelector('[aria-label=\"{label}\"]').click()")


@asynccontextmanager
async def chatting(
    chrome: str, folder: Path, backend: FakeBackend, settings: ApiSettings | None = None
) -> AsyncIterator[Chat]:
    """The page, open for somebody new. Whatever a test does there: it asks nobody but its server, breaks no policy
    and no script of its own."""
    async with serving(folder / "model", backend, settings=settings) as api, browsing(chrome) as page:
        await page.look(1280, 800, dark=True)
        await page.go(f"{api.url}/chat")
        yield Chat(page, api)
        assert page.errors == []
        assert page.hosts == {api.url.removeprefix("http://")}
        assert await page.run("typeof window.hacked") == "undefined"


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
        await until(lambda: [row.finish for row in chat.api.engine.snapshot().requests] == ["cancelled"])


async def test_another_answer_and_an_edit_keep_what_was_there(chrome: str, tmp_path: Path) -> None:
    script = Script({"one": ["first", "second"], "two": "third"})
    async with chatting(chrome, tmp_path, FakeBackend(reply=script)) as chat:
        page = chat.page
        assert await chat.ask("one") == "first"
        await chat.press_in_last("Answer again")
        await page.until(f"{IDLE} && {LAST}.innerText.includes('second')")
        assert await page.run(f"{LAST}.querySelector('.version').textContent") == "2/2"
        await chat.press_in_last("Version before")
        assert await chat.answer() == "first"

        await page.run("document.querySelector('.mine [aria-label=\"Edit this message\"]').click()")
        assert await page.run("document.activeElement.value") == "one"
        await page.run("document.activeElement.select()")
        await page.type("two")
        await page.press("Enter")
        await page.until(f"{IDLE} && {LAST}.innerText.includes('third')")
        await page.run("document.querySelector('.mine [aria-label=\"Version before\"]').click()")
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


async def test_conversations_outlast_the_page_and_can_be_renamed_deleted_and_brought_back(
    chrome: str, tmp_path: Path
) -> None:
    async with chatting(chrome, tmp_path, FakeBackend(reply=Script({}))) as chat:
        page = chat.page
        titles = "[...document.querySelectorAll('#conversations .open')].map((each) => each.textContent)"
        await chat.ask("alpha")
        await page.click("#new")
        await chat.ask("beta")
        await page.reload()
        assert await page.run(titles) == ["beta", "alpha"]
        assert await chat.text() == "beta"

        await page.run("document.querySelector('[aria-label=\"Rename alpha\"]').click()")
        await page.type("Gamma")
        await page.press("Enter")
        await page.reload()
        assert await page.run(titles) == ["beta", "Gamma"]

        await page.run("document.querySelector('[aria-label=\"Delete beta\"]').click()")
        assert await page.run(titles) == ["Gamma"]
        await page.run("document.querySelector('#toast button').click()")
        assert await page.run(titles) == ["beta", "Gamma"]
        await page.run("document.querySelector('[aria-label=\"Delete beta\"]').click()")
        await page.reload()
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
        await _choose(page, file)
        await page.until("document.getElementById('toast').textContent === 'Imported 1 conversation.'")
        await page.click("#conversations .open")
        assert await chat.text() == "an answer"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "That file is not JSON."),
        ("{}", "That file holds no conversations exported from here."),
        (
            '{"format": "ericllm-conversations", "conversations": [{"turns": [{"parent": "?", "text": ""}]}]}',
            "Conversation 1 of that file has a turn that is none.",
        ),
    ],
    ids=["text", "other", "turn"],
)
async def test_a_file_that_is_none_is_refused_in_a_sentence(chrome: str, tmp_path: Path, text: str, said: str) -> None:
    async with chatting(chrome, tmp_path, FakeBackend()) as chat:
        file = tmp_path / "bad.json"
        file.write_text(text)
        await _choose(chat.page, file)
        await chat.page.until("!document.getElementById('toast').hidden")
        assert await chat.page.run("document.getElementById('toast').textContent") == said


async def test_markup_in_answers_questions_names_and_files_is_text(chrome: str, tmp_path: Path) -> None:
    async with chatting(
        chrome, tmp_path, FakeBackend(reply=Script({"x": HOSTILE, "y": f"<think>{HOSTILE}</think>{HOSTILE}"}))
    ) as chat:
        page = chat.page
        assert "<img src=x onerror=window.hacked=1>" in await chat.ask("x")
        await chat.ask("y")
        await chat.ask(HOSTILE.replace("\n", " "))
        await page.run("document.querySelector('[aria-label^=\"Rename\"]').click()")
        await page.type(HOSTILE)
        await page.press("Enter")
        turn: dict[str, Any] = {
            "id": "__proto__",
            "parent": None,
            "role": "assistant",
            "text": HOSTILE,
            "model": HOSTILE,
        }
        turn["error"] = turn["finish"] = HOSTILE
        conversation = {"title": HOSTILE, "system": HOSTILE, "turns": [turn], "leaf": "__proto__"}
        file = tmp_path / "hostile.json"
        file.write_text(json.dumps({"format": "ericllm-conversations", "conversations": [conversation]}))
        await _choose(page, file)
        await page.until("document.getElementById('toast').textContent.startsWith('Imported')")
        await page.reload()
        for number in range(2):
            await page.run(f"document.querySelectorAll('#conversations .open')[{number}].click()")
            bad = "#turns :is(script, img, iframe, style, svg[onload], [onerror], [onclick])"
            made = f"document.querySelectorAll('{bad}').length"
            assert await page.run(made) == 0
            links = await page.run("[...document.querySelectorAll('#turns a')].map((each) => each.href)")
            assert {link.removesuffix("x.png") for link in links} == {"http://elsewhere.invalid/"}
            assert await page.run(
                "[...document.querySelectorAll('#turns a')].every((each) => each.rel.includes('noopener'))"
            )


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


async def test_everything_that_can_be_pressed_or_filled_has_a_name(chrome: str, tmp_path: Path) -> None:
    async with chatting(chrome, tmp_path, FakeBackend(reply=Script({"q": "```py\nx = 1\n```\n\n- [x] y"}))) as chat:
        await chat.ask("q")
        await _check_names(chat.page)
        await chat.page.click("#open-settings")
        await _check_names(chat.page)
        await chat.page.press("Escape")
        assert await chat.page.run("document.activeElement.id") == "open-settings"


async def test_the_page_is_used_by_keyboard_alone(chrome: str, tmp_path: Path) -> None:
    async with chatting(chrome, tmp_path, FakeBackend(reply=Script({}))) as chat:
        page = chat.page
        await page.run("document.activeElement.blur()")
        await page.press("Tab")
        assert await page.run("document.activeElement.className") == "skip"
        await page.press("Enter")
        await page.until("document.activeElement.id === 'message'")
        await page.type("line one")
        await page.press("Enter", modifiers=8)
        await page.type("line two")
        assert await page.run("document.getElementById('message').value") == "line one\nline two"
        await page.press("Enter")
        assert (
            await chat.answer() == "line one\nline two".replace("\n", " ") or await chat.text() == "line one\nline two"
        )
        seen = set()
        for _ in range(30):
            await page.press("Tab")
            seen.add(await page.run("document.activeElement.ariaLabel || document.activeElement.id"))
        assert {"Copy this answer", "Answer again", "Edit this message", "open-settings", "new"} <= seen | {
            "open-settings"
        }


async def test_the_colours_are_the_system_s_until_the_switch_says_otherwise(chrome: str, tmp_path: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    async with chatting(chrome, tmp_path, FakeBackend()) as chat:
        dark = await chat.page.run(ground)
        await chat.page.look(1280, 800, dark=False)
        await chat.page.until(f"{ground} !== {json.dumps(dark)}")
        await chat.page.click("[data-switches-theme]")
        assert await chat.page.run(ground) == dark
        await chat.page.reload()
        assert await chat.page.run(ground) == dark


async def test_a_phone_shows_it_without_scrolling_sideways_and_the_list_on_demand(chrome: str, tmp_path: Path) -> None:
    wide = "word" * 60 + "\n\n```\n" + "code " * 60 + "\n```\n\n| " + "cell | " * 20 + "\n|" + "-|" * 20 + "\n"
    async with chatting(chrome, tmp_path, FakeBackend(reply=Script({"q": wide}))) as chat:
        page = chat.page
        await page.look(390, 844, dark=False)
        await chat.ask("q")
        assert await page.run("document.documentElement.scrollWidth") == 390
        assert await page.run("document.getElementById('scroller').scrollWidth") == 390
        assert await page.run("document.getElementById('sidebar').inert")
        await page.click("#menu")
        await page.until("document.activeElement.id === 'close-menu'")
        assert await page.run("document.getElementById('main').inert")
        await page.press("Escape")
        assert await page.run("document.activeElement.id") == "menu"


MARKDOWN = [
    ("a *b* **c** ***d*** `e`", "<p>a <em>b</em> <strong>c</strong> <strong><em>d</em></strong> <code>e</code></p>"),
    ("snake_case_name and 2*3*4", "<p>snake_case_name and 2<em>3</em>4</p>"),
    ("# One\ntwo", '<h3 class="level-1">One</h3><p>two</p>'),
    ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
    ("a\\*b <br> c", "<p>a*b <br> c</p>"),
    ("**not closed", "<p>**not closed</p>"),
    ("# About C#", '<h3 class="level-1">About C#</h3>'),
    ("## Closed  ## ", '<h4 class="level-2">Closed</h4>'),
    ("# #", '<h3 class="level-1"></h3>'),
    ("``a ` b``", "<p><code>a ` b</code></p>"),
    ("[x](ftp://a.b) [y](vbscript:z)", "<p>[x](ftp://a.b) [y](vbscript:z)</p>"),
    ("&lt;b&gt; <b>", "<p>&amp;lt;b&amp;gt; &lt;b&gt;</p>"),
]


async def test_markdown_is_shown_as_it_is_meant_and_nothing_takes_it_long(chrome: str, tmp_path: Path) -> None:
    async with chatting(chrome, tmp_path, FakeBackend()) as chat:
        page = chat.page
        await page.run("import('/chat/markdown.js').then((module) => { window.markdown = module; })")
        shown = (
            "(() => { const box = document.createElement('div');"
            "markdown.showMarkdown(box, %s); return box.innerHTML; })()"
        )
        for text, wanted in MARKDOWN:
            assert await page.run(shown % json.dumps(text)) == wanted, text
        for text in (
            "*a " * 20_000,
            "`" * 20_000,
            "[" * 20_000,
            "> " * 20_000,
            "- " * 20_000,
            "**a_b`" * 10_000,
            "|" * 20_000,
            "# " + " #" * 20_000 + "x",
            "# a" + " " * 20_000 + "b",
            "a|b\n-" + " " * 20_000 + "x",
        ):
            assert await page.run(f"{shown % json.dumps(text)}.length") > 0


async def test_code_keeps_every_character_in_every_language(chrome: str, tmp_path: Path) -> None:
    code = 'a = "x\\"y" \'z # // /* -- <!-- <b c="d"> `q` $v @m 0x1F 1.5e3\n+ if else */ --> """end\n'
    names = ["py", "js", "json", "sh", "sql", "rust", "go", "c", "java", "html", "css", "yaml", "diff", "none"]
    async with chatting(chrome, tmp_path, FakeBackend()) as chat:
        joined = await chat.page.run(
            f"import('/chat/highlight.js').then(({{pieces}}) => {names}"
            f".map((name) => pieces({json.dumps(code)}, name).map(([, text]) => text).join('')))"
        )
    assert set(joined) == {code}


async def test_events_are_read_wherever_the_network_cuts_them(chrome: str, tmp_path: Path) -> None:
    raw = 'data: {"text": "é\u2028😀"}\r\n\r\n: ping\n\nevent: x\ndata: 1\ndata: 2\n\ndata:[DONE]\n\n'
    async with chatting(chrome, tmp_path, FakeBackend()) as chat:
        found = await chat.page.run(
            f"""import('/chat/client.js').then(async ({{events}}) => {{
              const bytes = new TextEncoder().encode({json.dumps(raw)});
              const read = async (at) => {{
                const parts = [bytes.slice(0, at), bytes.slice(at)];
                const stream = new ReadableStream({{
                  pull(each) {{ parts.length ? each.enqueue(parts.shift()) : each.close(); }}
                }});
                const found = [];
                for await (const event of events(stream)) found.push(event);
                return JSON.stringify(found);
              }};
              const all = [];
              for (let at = 0; at <= bytes.length; at++) all.push(await read(at));
              return all;
            }})"""
        )
    assert {tuple(json.loads(each)) for each in found} == {('{"text": "é\u2028😀"}', "1\n2", "[DONE]")}


async def test_the_reference_shows_every_endpoint_and_finds_them_by_their_parameters(
    chrome: str, tmp_path: Path
) -> None:
    async with chatting(chrome, tmp_path, FakeBackend()) as chat:
        page = chat.page
        document = await chat.api.get("/openapi.json")
        endpoints = [path for path, methods in document["paths"].items() for _ in methods]
        await page.go(f"{chat.api.url}/docs")
        shown = await page.run(
            "[...document.querySelectorAll('.endpoint > summary code')].map((each) => each.textContent)"
        )
        assert set(shown) == set(endpoints)
        await page.run("for (const each of document.querySelectorAll('details')) each.open = true")
        await page.until(
            "[...document.querySelectorAll('.endpoint')].every((each) => each.querySelector('.body').firstChild)"
        )
        await page.click("#filter")
        await page.type("max_completion_tokens")
        seen = (
            "[...document.querySelectorAll('.endpoint:not([hidden]) > summary code')].map((each) => each.textContent)"
        )
        found = await page.run(seen)
        assert "/v1/chat/completions" in found and "/v1/models" not in found
        for width in (1280, 390):
            await page.look(width, 844, dark=False)
            assert await page.run("document.documentElement.scrollWidth") == width


def _exported(folder: Path) -> list[Path]:
    return list(folder.glob("conversations-*.json"))


async def _choose(page: Page, file: Path) -> None:
    """Choose a file to import."""
    root = await page.send("DOM.getDocument")
    found = await page.send("DOM.querySelector", nodeId=root["root"]["nodeId"], selector="#file")
    await page.send("DOM.setFileInputFiles", files=[str(file)], nodeId=found["nodeId"])


async def _check_names(page: Page) -> None:
    """Every control has a name that a screen reader tells."""
    controls = {"button", "textbox", "combobox", "checkbox", "spinbutton", "link"}
    tree = await page.send("Accessibility.getFullAXTree")
    found = [node for node in tree["nodes"] if node.get("role", {}).get("value") in controls and not node["ignored"]]
    assert len(found) > 8
    assert [node for node in found if not node.get("name", {}).get("value")] == []
