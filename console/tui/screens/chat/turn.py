"""One turn in the transcript: a question as it was typed, or an answer as Markdown under its folded thinking; beneath,
numbers and what can be done with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from textual.app import ComposeResult
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from console import text
from console.chats import Turn, TurnNote
from console.chats.export import may_have_code, thinking_time
from console.tui.screens.chat.prose import Prose
from console.tui.widgets.glyphs import for_terminal
from engine.text.printable import printable_lines

MIN_INTERVAL_S = 0.1
NUMBERS_INTERVAL_S = 0.5
LOOP_SHARE = 0.2

_FINISH = {"length": "cut off at max tokens", "cancelled": "stopped", "error": "failed"}
_DELETE = ("delete", "delete")
_QUESTION_ACTIONS = (("edit", "edit"), ("copy", "copy"), _DELETE)
_ANSWER_ACTIONS = (("again", "regenerate"), ("go_on", "continue"), ("copy", "copy"), ("copy_code", "code"), _DELETE)
_FAILED_ACTIONS = (("again", "regenerate"), _DELETE)


def note_line(note: TurnNote) -> str:
    """The numbers of an answer in one line: '41.2 tok/s · TTFT 84 ms · 57 tokens', and how it ended if not plainly."""
    parts = []
    if note.tokens_per_s is not None:
        parts.append(f"{text.rate(note.tokens_per_s)} tok/s")
    if note.ttft_s is not None:
        parts.append(f"TTFT {text.seconds(note.ttft_s)}")
    if note.output_tokens:
        parts.append(f"{note.output_tokens} token{'' if note.output_tokens == 1 else 's'}")
    if note.finish in _FINISH:
        parts.append(_FINISH[note.finish])
    if note.model:
        parts.append(note.model)
    return " · ".join(parts)


@dataclass(frozen=True, slots=True)
class BranchPosition:
    """Where a turn stands among the branches that begin there: number 2 of 3."""

    number: int = 1
    of: int = 1


class Foot(Static):
    """The line beneath a turn: numbers, branches, and actions to click."""

    DEFAULT_CSS = """
    Foot {
        height: auto;
        color: $muted;
        link-color: $primary;
        link-style: none;
        &.-failed { color: $text-error; }
        &.-empty { display: none; }
    }
    """

    @dataclass
    class Pressed(Message):
        """An action was clicked. action: "edit", "again", "go_on", "copy", "copy_code", "delete", "back" or
        "on"."""

        foot: Foot
        turn_id: int
        action: str

    def __init__(self, turn_id: int) -> None:
        super().__init__(markup=False)
        self._turn_id = turn_id
        self._shown: tuple[object, ...] = ()
        self._rows = 0

    def show(
        self, words: str, place: BranchPosition, actions: Sequence[tuple[str, str]], *, failed: bool = False
    ) -> None:
        """words: what is said first; actions: (action, how it is called)."""
        shown = words, place, tuple(actions), failed
        if shown == self._shown:
            return
        self._shown = shown
        below = [_link(f"[{label}]", action) for action, label in actions]
        if place.of > 1:
            below.insert(0, Content.assemble(_link("‹", "back"), f" {place.number}/{place.of} ", _link("›", "on")))
        lines = [line for line in (Content(words), Content("  ").join(below)) if line.plain]
        self.set_class(failed, "-failed")
        self.set_class(not lines, "-empty")
        taller, self._rows = len(lines) != self._rows, len(lines)
        self.update(for_terminal(self.app, Content("\n").join(lines)), layout=taller)

    def action_press(self, action: str) -> None:
        """A click on one of them."""
        self.post_message(self.Pressed(self, self._turn_id, action))


def _link(label: str, action: str) -> Content:
    return Content.from_markup(f"[@click=press('{action}')]$label[/]", label=label)


class TurnWidget(Widget):
    """turn: what is shown; place: among its branches. Of the selected and the last turn, actions are to be seen."""

    DEFAULT_CSS = """
    TurnWidget {
        width: 1fr;
        height: auto;
        padding: 0 1;
        &.-selected { background: $boost; }
    }
    """

    def __init__(self, turn: Turn, place: BranchPosition) -> None:
        super().__init__()
        self.turn = turn
        self._place = place
        self._offered = self._is_last = False

    def mark(self, place: BranchPosition, *, selected: bool, is_last: bool) -> None:
        """Where the turn stands now."""
        self.set_class(selected, "-selected")
        offered = selected or is_last
        if (place, offered, is_last) != (self._place, self._offered, self._is_last):
            self._place, self._offered, self._is_last = place, offered, is_last
            self.show_foot()

    def on_mount(self) -> None:
        """Show all of it."""
        self.show_foot()

    def show_foot(self) -> None:
        """Write the line beneath again."""


class Question(TurnWidget):
    """A question of the operator."""

    DEFAULT_CSS = """
    Question {
        margin: 1 0 0 0;
        border-left: outer $primary;
        background: $surface;
        & > .words { height: auto; }
    }
    """

    def compose(self) -> ComposeResult:
        """The words, and what can be done with them."""
        yield Static(printable_lines(self.turn.content), classes="words", markup=False)
        yield Foot(self.turn.id)

    def show_foot(self) -> None:
        """Branches where there are some."""
        self.query_one(Foot).show("", self._place, _QUESTION_ACTIONS if self._offered else ())


class ThinkingLine(Static):
    """Says how long a model thought before an answer; a click shows or hides what."""

    DEFAULT_CSS = """
    ThinkingLine { height: 1; color: $muted; &:hover { color: $primary; } }
    """

    @dataclass
    class Clicked(Message):
        """The line above the answer of that id was clicked."""

        turn_id: int

    def __init__(self, turn_id: int) -> None:
        super().__init__(markup=False)
        self._turn_id = turn_id
        self._shown = ""

    def show(self, turn: Turn, *, unfolded: bool) -> None:
        """Say "▸ Thought for 12 s", or "◌ Thinking… 3 s" while the answer has not begun."""
        under_way = turn.unfinished and turn.is_thinking
        sign = "▾" if unfolded else "◌" if under_way else "▸"
        words = f"Thinking… {text.duration(turn.note.thinking_s)}" if under_way else thinking_time(turn.note)
        if (shown := f"{sign} {words}") != self._shown:
            self._shown = shown
            self.update(for_terminal(self.app, Content(shown)), layout=False)

    def on_click(self) -> None:
        """Post it."""
        self.post_message(self.Clicked(self._turn_id))


class Thought(Widget):
    """The thinking before an answer, folded into a line."""

    DEFAULT_CSS = """
    Thought {
        height: auto;
        & > Prose { color: $muted; margin: 0 0 1 2; }
    }
    """

    def __init__(self, turn: Turn, *, unfolded: bool) -> None:
        super().__init__()
        self._turn = turn
        self._unfolded = unfolded
        self._line, self._prose, self._text = ThinkingLine(turn.id), Prose(), ""

    def compose(self) -> ComposeResult:
        """The line, and room for the text."""
        self.show(self._turn, unfolded=self._unfolded)
        yield self._line
        yield self._prose

    def show(self, turn: Turn, *, unfolded: bool) -> None:
        """Show how far the thinking has come, and its text where it is unfolded."""
        self._turn, self._unfolded = turn, unfolded
        self._line.show(turn, unfolded=unfolded)
        self._prose.display = unfolded
        if unfolded and turn.thinking != self._text:
            if turn.thinking.startswith(self._text):
                self._prose.append(turn.thinking[len(self._text) :])
            else:
                self._prose.update(turn.thinking)
            self._text = turn.thinking


class StreamingText(Protocol):
    """The container of an answer."""

    @property
    def follows(self) -> bool:
        """True while its end is in view."""

    def is_unfolded(self, turn_id: int) -> bool:
        """Return whether the thinking of an answer is shown."""


class Answer(TurnWidget):
    """An answer of the model, while it streams and afterwards.

    While an answer streams, Markdown is parsed at most so often that parsing takes a fifth of the loop's time:
    a long answer never delays a key. Nothing is parsed while the answer is out of sight, or its reader scrolled away.
    """

    DEFAULT_CSS = """
    Answer {
        & > Prose { margin: 0 0 1 0; }
        &.-thinking > Prose { display: none; }
        &.-thinking > Thought { margin: 0 0 1 0; }
    }
    """

    def __init__(self, turn: Turn, place: BranchPosition, streams: StreamingText) -> None:
        super().__init__(turn, place)
        self._streams = streams
        self._shown = turn  # as far as it is on the screen
        self._wake = asyncio.Event()

    def compose(self) -> ComposeResult:
        """Text under its thinking, numbers below."""
        self._shown = self.turn
        if self.turn.thinking:
            yield Thought(self.turn, unfolded=self._streams.is_unfolded(self.turn.id))
        yield Prose(self.turn.content, grows=self.turn.unfinished, classes="answer")
        yield Foot(self.turn.id)

    def on_mount(self) -> None:
        """Only an answer that still grows needs a writer."""
        super().on_mount()
        self.set_class(self.turn.is_thinking, "-thinking")
        if self.turn.unfinished or self._has_ended_unseen:
            self._start()

    def resume(self, turn: Turn) -> None:
        """The answer goes on."""
        self.turn = self._shown = turn
        self._prose.update(turn.content, grows=True)
        self.show_thinking()
        self.show_foot()
        self._start()

    def grow(self, turn: Turn) -> None:
        """There is more of it; shown at the writer's next turn."""
        self.turn = turn
        self._wake.set()

    def finish(self, turn: Turn) -> None:
        """No more text comes. The whole is parsed once more, so that no half-read fence stays behind."""
        self.turn = msgspec.structs.replace(turn, unfinished=False)
        self._wake.set()
        if self.is_mounted:
            self._show_all()

    def _show_all(self) -> None:
        self._shown = self.turn
        self._prose.update(self.turn.content)
        self.show_thinking()
        self.show_foot()

    @property
    def _has_ended_unseen(self) -> bool:
        return self._shown.unfinished and not self.turn.unfinished

    def show_thinking(self) -> None:
        """Show the thinking, as far as there is any."""
        self.set_class(self.turn.is_thinking, "-thinking")
        if not self.turn.thinking:
            return
        unfolded = self._streams.is_unfolded(self.turn.id)
        if found := self.query(Thought):
            found.first().show(self.turn, unfolded=unfolded)
        else:
            self.mount(Thought(self.turn, unfolded=unfolded), before=0)

    @property
    def _prose(self) -> Prose:
        return self.query_one("Prose.answer", Prose)

    def show_foot(self) -> None:
        """Numbers, or why there is no answer."""
        if not self.is_mounted and not self.is_attached:
            return
        waiting = self.turn.unfinished and not (self.turn.content or self.turn.thinking)
        problem = self.turn.note.problem if not self.turn.unfinished else ""
        words = problem or ("waiting for the first token" if waiting else note_line(self.turn.note))
        offered = self._actions() if self._offered and not self.turn.unfinished else ()
        self.query_one(Foot).show(words, self._place, offered, failed=bool(problem))

    def _actions(self) -> Sequence[tuple[str, str]]:
        """Continuing is for the last answer, where the model did not end it itself."""
        if self.turn.failed:
            return _FAILED_ACTIONS
        idle = set() if self._is_last and self.turn.note.finish != "stop" else {"go_on"}
        idle |= set() if may_have_code(self.turn.content) else {"copy_code"}
        return [each for each in _ANSWER_ACTIONS if each[0] not in idle]

    def _start(self) -> None:
        self.run_worker(self._write(), group="writer", exclusive=True, exit_on_error=False)

    async def _write(self) -> None:
        prose, shown_s = self._prose, 0.0
        while self.turn.unfinished:
            await self._wake.wait()
            self._wake.clear()
            text = self.turn.content[len(self._shown.content) :]
            thought_more = len(self.turn.thinking) > len(self._shown.thinking)
            if not self.turn.unfinished or not (text or thought_more):
                continue
            if not (self.is_on_screen and self._streams.follows):
                self.set_timer(MIN_INTERVAL_S * 4, self._wake.set)
                continue
            started = time.perf_counter()
            if thought_more or not self._shown.content:
                self.show_thinking()
            self._shown = self.turn
            if text:
                prose.append(text)
            if started - shown_s >= NUMBERS_INTERVAL_S:
                shown_s = started
                self.show_foot()
            parse_s = time.perf_counter() - started
            await asyncio.sleep(max(MIN_INTERVAL_S, parse_s / LOOP_SHARE))
        if self._has_ended_unseen:  # while this was being mounted
            self._show_all()
