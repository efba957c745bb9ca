"""Markdown that grows: shown as it would be at once, without a new layout for every word."""

from __future__ import annotations

import pytest
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.screen import Screen

from console.widgets.chat_markdown import ChatMarkdown
from tests.ui.seen import screen_text

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

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield ChatMarkdown(self._text)


async def shown_at_once(text: str) -> str:
    app = Reader(text)
    async with app.run_test(size=(60, 30)) as pilot:
        await pilot.pause()
        return screen_text(app)


@pytest.mark.parametrize("words_at_once", [1, 4])
async def test_text_that_comes_in_pieces_looks_as_it_does_at_once(words_at_once: int) -> None:
    words = TEXT.split(" ")
    app = Reader("")
    async with app.run_test(size=(60, 30)) as pilot:
        markdown = app.query_one(ChatMarkdown)
        for at in range(0, len(words), words_at_once):
            piece = " ".join(words[at : at + words_at_once])
            await markdown.append(piece if at + words_at_once >= len(words) else f"{piece} ")
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
                await app.query_one(ChatMarkdown).append(" word")
                await pilot.pause()
            assert "word word word word" in screen_text(app)
            assert len(layouts) < 4, begun
            layouts.clear()
            monkeypatch.undo()
