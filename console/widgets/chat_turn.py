"""One turn in the transcript: a question as it was typed, or an answer as Markdown with its numbers beneath."""

from __future__ import annotations

import asyncio
import time

from textual.app import ComposeResult
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Markdown, Static

from console.chats import TurnNote
from console.widgets.glyphs import is_ascii, to_ascii

MIN_INTERVAL_S = 0.06
LOOP_SHARE = 0.2

_FINISH = {"length": "cut off at max tokens", "cancelled": "stopped", "error": "failed"}


def note_line(note: TurnNote) -> str:
    """The numbers of an answer in one line: '41.2 tok/s · TTFT 84 ms · 57 tokens', and how it ended if not plainly."""
    parts = []
    if note.tokens_per_s is not None:
        parts.append(f"{note.tokens_per_s:.1f} tok/s")
    if note.ttft_s is not None:
        parts.append(f"TTFT {note.ttft_s * 1000:.0f} ms" if note.ttft_s < 10 else f"TTFT {note.ttft_s:.1f} s")
    if note.output_tokens:
        parts.append(f"{note.output_tokens} token{'' if note.output_tokens == 1 else 's'}")
    if note.finish in _FINISH:
        parts.append(_FINISH[note.finish])
    if note.model:
        parts.append(note.model)
    return " · ".join(parts)


class Question(Static):
    """What the operator asked."""

    DEFAULT_CSS = """
    Question {
        width: 1fr;
        height: auto;
        margin: 1 0 0 0;
        padding: 0 1;
        border-left: outer $primary;
        background: $surface;
    }
    """

    def __init__(self, content: str) -> None:
        super().__init__(content, markup=False)
        self.content_text = content


class Answer(Widget):
    """What the model said, while it says it and afterwards.

    While an answer streams, Markdown is parsed at most so often that parsing takes a fifth of the loop's time:
    a long answer never delays a key. Nothing is parsed while the answer is out of sight.
    """

    DEFAULT_CSS = """
    Answer {
        width: 1fr;
        height: auto;
        padding: 0 1;
        & > Markdown { padding: 0; margin: 0; background: transparent; }
        & > .note { color: $muted; height: auto; }
        & > .note.-failed { color: $text-error; }
    }
    """

    def __init__(self, content: str = "", note: TurnNote | None = None) -> None:
        super().__init__()
        self.content_text = content
        self._pending = ""
        self._note = note
        self._wake = asyncio.Event()
        self._done = content != "" or note is not None

    def compose(self) -> ComposeResult:
        """Text above, numbers below."""
        yield Markdown(self.content_text, open_links=False)
        yield Static(self._note_content(), classes="note", markup=False)

    def on_mount(self) -> None:
        """Only an answer that still grows needs a writer."""
        if not self._done:
            self.run_worker(self._write(), group="writer", exclusive=True, exit_on_error=False)

    def grow(self, text: str, note: TurnNote) -> None:
        """Add text; shown at the writer's next turn."""
        self.content_text += text
        self._pending += text
        self._show_note(note)
        self._wake.set()

    async def finish(self, note: TurnNote, problem: str = "") -> None:
        """No more text comes. The whole is parsed once more, so that no half-read fence stays behind.

        problem: one sentence where the answer failed, shown in place of the numbers.
        """
        self._done = True
        self._pending = ""
        self._wake.set()
        if not self.is_mounted:
            return
        await self.query_one(Markdown).update(self.content_text)
        self._show_note(note)
        if problem:
            line = self.query_one(".note", Static)
            line.update(Content(problem))
            line.add_class("-failed")

    def _show_note(self, note: TurnNote) -> None:
        self._note = note
        if self.is_mounted:
            self.query_one(".note", Static).update(self._note_content())

    def _note_content(self) -> Content:
        line = "waiting for the first token" if self._note is None else note_line(self._note)
        return Content(to_ascii(line) if self.is_attached and is_ascii(self.app) else line)

    async def _write(self) -> None:
        markdown = self.query_one(Markdown)
        while not self._done:
            await self._wake.wait()
            self._wake.clear()
            if self._done or not self._pending:
                continue
            if not self.is_on_screen:
                self.set_timer(MIN_INTERVAL_S * 4, self._wake.set)
                continue
            text, self._pending = self._pending, ""
            started = time.perf_counter()
            await markdown.append(text)
            parse_s = time.perf_counter() - started
            await asyncio.sleep(max(MIN_INTERVAL_S, parse_s / LOOP_SHARE))
