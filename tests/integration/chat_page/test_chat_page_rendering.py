"""What /chat and /docs show in a real browser, whoever looks: markup, names, keys, colours, sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.test_api_thinking import THINKS
from tests.fakes.backend import FakeBackend
from tests.fakes.saying import Script
from tests.integration.browser import Page
from tests.integration.chat_page.page import chatting, choose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HOSTILE = (
    "<img src=x onerror=window.hacked=1> <script>window.hacked=1</script> "
    "[press](javascript:window.hacked=1) [data](data:text/html,<script>window.hacked=1</script>) "
    "<a href='javascript:window.hacked=1'>x</a> <svg onload=window.hacked=1> "
    "<iframe src='http://elsewhere.invalid'></iframe> "
    "![see](http://elsewhere.invalid/x.png) <style>body{display:none}</style>\n\n"
    "```html\n<img src=x onerror=window.hacked=1>\n```\n\n"
    "| <script>window.hacked=1</script> | `</code><script>` |\n|---|---|\n| x | y |\n"
)


async def test_markup_in_answers_questions_names_and_files_is_text(chrome: str, tmp_path: Path) -> None:
    backend = FakeBackend(reply=Script({"x": HOSTILE, "y": f"<think>{HOSTILE}</think>{HOSTILE}"}))
    async with chatting(chrome, tmp_path, backend, template=THINKS) as chat:
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
        turn["error"] = turn["finish"] = turn["thinking"] = HOSTILE
        conversation = {"title": HOSTILE, "system": HOSTILE, "turns": [turn], "leaf": "__proto__"}
        file = tmp_path / "hostile.json"
        file.write_text(json.dumps({"format": "ericllm-conversations", "conversations": [conversation]}))
        await choose(page, file)
        await page.until("document.getElementById('toast').textContent.startsWith('Imported')")
        await chat.reload()
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
        assert {"Copy this answer", "Regenerate", "Edit this message", "open-settings", "new"} <= seen | {
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


async def _check_names(page: Page) -> None:
    """Every control has a name that a screen reader tells."""
    controls = {"button", "textbox", "combobox", "checkbox", "spinbutton", "link"}
    tree = await page.send("Accessibility.getFullAXTree")
    found = [node for node in tree["nodes"] if node.get("role", {}).get("value") in controls and not node["ignored"]]
    assert len(found) > 8
    assert [node for node in found if not node.get("name", {}).get("value")] == []
