"""Markdown that grows: shown as it would be at once, without a new layout for every word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.geometry import Offset
from textual.highlight import HighlightTheme
from textual.screen import Screen
from textual.selection import Selection

from console.tui.screens.chat.markdown import lay_out
from console.tui.screens.chat.prose import GROWN_LINES, Prose, highlight_code
from console.tui.theme import variable_defaults
from tests.fakes.bounds import within_bounds
from tests.ui.seen import screen_text

pytestmark = pytest.mark.long

TEXT = """The **queue** holds what waits, and `max_prompts` says how many requests a worker works on at once.

* **One worker** is best where memory is short.
* More workers are best where cores wait for each other, or cards lie idle.

1. Load a model.
2. Turn a knob and see
   what it did.

```python
print("done")
```

And so on.
"""


class Reader(App[None]):
    """One piece of Markdown."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.pressed: list[str] = []

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return variable_defaults(self.current_theme)

    def on_prose_link_pressed(self, event: Prose.LinkPressed) -> None:
        self.pressed.append(event.href)

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Prose(self._text)


async def shown_at_once(text: str) -> str:
    app = Reader(text)
    async with app.run_test(size=(60, 30)) as pilot:
        await pilot.pause()
        return screen_text(app)


async def lines(text: str) -> list[str]:
    return [line.rstrip() for line in (await shown_at_once(text)).rstrip().splitlines()]


def plain(prose: Prose) -> list[str]:
    return [
        line.plain
        for block in prose._blocks
        for piece in block.pieces
        for line in lay_out(piece, 40, lambda code, language: Content(code))
    ]


@pytest.mark.parametrize("words_at_once", [1, 4])
async def test_text_that_comes_in_pieces_looks_as_it_does_at_once(words_at_once: int) -> None:
    words = TEXT.split(" ")
    app = Reader("")
    async with app.run_test(size=(60, 30)) as pilot:
        markdown = app.query_one(Prose)
        for at in range(0, len(words), words_at_once):
            piece = " ".join(words[at : at + words_at_once])
            markdown.append(piece if at + words_at_once >= len(words) else f"{piece} ")
            await pilot.pause()
        assert screen_text(app) == await shown_at_once(TEXT)


async def test_a_word_that_needs_no_new_line_needs_no_new_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: list[bool] = []
    lay_out = Screen._refresh_layout

    def counting(screen: Screen[object], *arguments: object, **options: object) -> None:
        layouts.append(True)
        lay_out(screen, *arguments, **options)  # type: ignore[arg-type]

    for begun in ("The queue", "* The queue", "1. one\n2. two"):
        app = Reader(begun)
        async with app.run_test(size=(60, 30)) as pilot:
            await pilot.pause()
            monkeypatch.setattr(Screen, "_refresh_layout", counting)
            for _ in range(4):
                app.query_one(Prose).append(" word")
                await pilot.pause()
            assert "word word word word" in screen_text(app)
            assert len(layouts) < 4, begun
            layouts.clear()
            monkeypatch.undo()


async def test_all_of_markdown_is_shown() -> None:
    text = """# Title

> quoted *text*
> goes on

* one
  * two
    1. three

   And its second paragraph, which is long enough to need another line.

| a | b |
|---|---|
| 1 | **two** |

---

<think>hm</think> See [the page](http://host/page), ~~not~~ ![a picture](x.png).

```python
a = 1
```
"""
    assert await lines(text) == [
        "Title",
        "",
        "▌ quoted text goes on",
        "",
        "• one",
        "  ◦ two",
        "    1. three",
        "",
        "  And its second paragraph, which is long enough to need",
        "  another line.",
        "",
        "a  b",
        "─  ───",
        "1  two",
        "",
        "─" * 60,
        "",
        "<think>hm</think> See the page (http://host/page), not a",
        "picture.",
        "",
        " a = 1",
    ]


async def test_cells_wrap_where_a_table_is_wider_than_its_room() -> None:
    table = f"| name | what |\n|---|---|\n| a | {'word ' * 20}|\n"
    shown = await lines(table)
    assert shown[0] == "name  what" and shown[2].startswith("a     word word")
    assert " ".join(shown[2:]).split().count("word") == 20 and all(len(line) <= 60 for line in shown)


async def test_text_that_is_being_written_grows_by_several_lines_at_once_and_is_as_high_as_it_must_in_the_end() -> None:
    app = Reader("")
    async with app.run_test(size=(60, 30)) as pilot:
        prose = app.query_one(Prose)
        prose.update("one\n", grows=True)
        heights = []
        for line in range(2 * GROWN_LINES):
            await pilot.pause()
            heights.append(prose.size.height)
            prose.append(f"\nline {line}\n")
        assert set(heights) == {n * GROWN_LINES for n in range(1, 1 + max(heights) // GROWN_LINES)}
        prose.update(prose.source)
        await pilot.pause()
        assert prose.size.height == len(await lines(prose.source))


async def test_what_is_selected_is_copied_as_it_is_shown_and_a_link_tells_its_address() -> None:
    app = Reader("one **two**\n\n[three](http://host)")
    async with app.run_test(size=(60, 30)) as pilot:
        await pilot.pause()
        prose = app.query_one(Prose)
        assert prose.get_selection(Selection(Offset(4, 0), Offset(5, 2))) == ("two\n\nthree", "\n")
        await pilot.click(Prose, offset=(1, 2))
        await pilot.pause()
        assert app.pressed == ["http://host"]


SLOW = ("\n", "\n ", " ", "/a", "<a ", "x = '''", "a.", "a(", "1", "${", "a ", "/a\n", "x\n\n\n\n")
"""What regular expressions of lexers go over again and again."""


@pytest.mark.parametrize(
    "language", ["autohotkey", "C", "csharp", "java", "perl", "html", "makefile", "scala", "python"]
)
def test_code_costs_little_whatever_it_is_and_is_called(language: str) -> None:
    for slow in SLOW:
        code = "if x:\n" + slow * (16_000 // len(slow)) + "\n\nreturn"
        with within_bounds():
            shown = highlight_code(code, language, HighlightTheme)
        assert shown.plain == code


def test_code_has_the_colours_of_its_language_wherever_it_stands() -> None:
    code = "\n".join(f"def name_{number}() -> None:\n    return {number}  # why\n" for number in range(90))
    spans = highlight_code(code, "Python", HighlightTheme).spans
    assert sum(code[span.start : span.end] == "def" for span in spans) == 90
    assert highlight_code(code, "no language", HighlightTheme).spans == []


@given(
    st.lists(
        st.sampled_from(
            [
                "# h\n",
                "* a\n",
                "  * b\n",
                "1. c\n",
                "\r\n",
                "\n",
                "> q\n",
                "```\n",
                "x ",
                "| a |\n",
                "|---|\n",
                "***",
                "`",
                "<b>",
                "[l](u)",
                "---\n",
                "\t",
                "\f",
            ]
        ),
        max_size=30,
    )
)
def test_text_in_pieces_gives_the_blocks_that_it_gives_at_once(pieces: list[str]) -> None:
    grown, whole = Prose(), Prose("".join(pieces))
    for piece in pieces:
        grown.append(piece)
    assert plain(grown) == plain(whole)
