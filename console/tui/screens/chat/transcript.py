"""The transcript: one branch of a conversation, kept at its end unless the operator scrolled away. Of a long one only
a window of turns is mounted, which moves along with the scrolling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from console.chats import Turn
from console.text import plural
from console.tui.screens.chat.turn import Answer, BranchPosition, Question, ThinkingLine, TurnWidget
from console.tui.widgets.glyphs import for_terminal

# Which turns of a long conversation are mounted: a bounded number, by turns and by length. Pure.

SPARE_TURNS = 2
MIN_TURNS = 24
MIN_CHARACTERS = 6_000
SCREENS = 3


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """How much a window may hold: turns, and characters of all of them; of one turn alone any number."""

    turns: int = MIN_TURNS
    characters: int = MIN_CHARACTERS


@dataclass(frozen=True, slots=True)
class TurnWindow:
    """Turns first .. last - 1 of a conversation."""

    first: int = 0
    last: int = 0


def limits_for(columns: int, rows: int) -> WindowLimits:
    """A few times what a panel of that size can show, so that it can always be scrolled in."""
    return WindowLimits(max(MIN_TURNS, rows), max(MIN_CHARACTERS, SCREENS * columns * rows))


def window_ending(lengths: Sequence[int], last: int, limits: WindowLimits) -> TurnWindow:
    """The window whose turns end before `last`: as many as may be, one at least. lengths: characters of each turn."""
    last = max(0, min(last, len(lengths)))
    return _up(lengths, TurnWindow(max(0, last - 1), last), limits, at_least=0)


def window_beginning(lengths: Sequence[int], first: int, limits: WindowLimits) -> TurnWindow:
    """The window that begins with turn `first`: as many as may be, one at least."""
    first = max(0, min(first, len(lengths) - 1))
    return _down(lengths, TurnWindow(first, min(first + 1, len(lengths))), limits, at_least=0)


def window_before(lengths: Sequence[int], seen: TurnWindow, limits: WindowLimits) -> TurnWindow:
    """The window of the turns that are seen and as many before them as may be; a few always, and a few after them."""
    window = _up(lengths, seen, limits, at_least=SPARE_TURNS)
    return TurnWindow(window.first, min(len(lengths), seen.last + SPARE_TURNS))


def window_after(lengths: Sequence[int], seen: TurnWindow, limits: WindowLimits) -> TurnWindow:
    """The window of the turns that are seen and as many after them as may be; a few always, and a few before them."""
    window = _down(lengths, seen, limits, at_least=SPARE_TURNS)
    return TurnWindow(max(0, seen.first - SPARE_TURNS), window.last)


def _up(lengths: Sequence[int], window: TurnWindow, limits: WindowLimits, *, at_least: int) -> TurnWindow:
    first, last = window.first, window.last
    characters = sum(lengths[first:last])
    while first and (
        window.first - first < at_least
        or (last - first < limits.turns and characters + lengths[first - 1] <= limits.characters)
    ):
        first -= 1
        characters += lengths[first]
    return TurnWindow(first, last)


def _down(lengths: Sequence[int], window: TurnWindow, limits: WindowLimits, *, at_least: int) -> TurnWindow:
    mirrored = TurnWindow(len(lengths) - window.last, len(lengths) - window.first)
    found = _up(lengths[::-1], mirrored, limits, at_least=at_least)
    return TurnWindow(len(lengths) - found.last, len(lengths) - found.first)


PlaceOf = Callable[[Turn], BranchPosition]


class More(Static):
    """Says how many turns lie beyond the window; a click goes there."""

    DEFAULT_CSS = """
    More { height: 1; color: $muted; text-align: center; &:hover { color: $primary; } }
    """

    @dataclass
    class Wanted(Message):
        """earlier: of the two ends."""

        earlier: bool

    def __init__(self, *, earlier: bool) -> None:
        super().__init__(classes="more")
        self.earlier = earlier
        self._turns = 0

    def show(self, turns: int) -> None:
        """How many there are; nothing is said of none."""
        if turns != self._turns:
            self._turns = turns
            words = f"↑ {plural(turns, 'earlier turn')}" if self.earlier else f"↓ {plural(turns, 'later turn')}"
            self.update(for_terminal(self.app, Content(words if turns else "")))

    def on_click(self) -> None:
        """Go there."""
        self.post_message(self.Wanted(self.earlier))


class ChatTranscript(VerticalScroll, can_focus=True):
    """Shows a path of turns; `show` may be called at any time with another one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "top", "Top", id="chat.top", tooltip="Go to the first turn", show=False, system=True),
        Binding("end", "bottom", "End", id="chat.end", tooltip="Go to the last turn", show=False, system=True),
        Binding("left", "screen.branch(-1)", "‹", id="chat.left", tooltip="Show the previous branch", show=False),
        Binding("right", "screen.branch(1)", "›", id="chat.right", tooltip="Show the next branch", show=False),
        Binding("shift+up", "screen.move(-1)", "Up", id="chat.turn.up", tooltip="Select the previous turn", show=False),
        Binding(
            "shift+down", "screen.move(1)", "Down", id="chat.turn.down", tooltip="Select the next turn", show=False
        ),
        Binding(
            "delete",
            "screen.delete",
            "Delete",
            id="chat.turn.delete.here",
            tooltip="Delete a turn, or the last question, and all that follows",
            show=False,
        ),
    ]
    DEFAULT_CSS = """
    ChatTranscript {
        layout: stream;
        width: 1fr;
        height: 1fr;
        padding: 0 1;
        scrollbar-size-vertical: 1;
        & > .empty { padding: 1 2; color: $text-muted; }
    }
    """

    def __init__(self) -> None:
        super().__init__(classes="panel")
        self._path: Sequence[Turn] = ()
        self._window = TurnWindow()
        self._place_of: PlaceOf = lambda turn: BranchPosition()
        self._sliding = False
        self._unfolded: set[int] = set()
        self.selected: int | None = None
        self.border_title = "Chat"

    # -- content -----------------------------------------------------------------------------------------------------

    async def show(self, path: Sequence[Turn], place_of: PlaceOf, *, hint: str = "") -> None:
        """Show these turns, the last ones first of all; what is shown already stays as it is.

        hint: what is said where there is nothing yet.
        """
        self._path, self._place_of = path, place_of
        if all(turn.id != self.selected for turn in path):
            self.selected = None
        await self._mount_window(self._ending(len(path)), hint)
        self.follow()

    def remark(self) -> None:
        """Branches and selection changed, the turns did not."""
        last = self._path[-1].id if self._path else None
        for widget in self.turn_widgets():
            turn_id = widget.turn.id
            chosen = turn_id == self.selected
            widget.mark(self._place_of(widget.turn), selected=chosen, is_last=turn_id == last)

    def turn_widgets(self) -> list[TurnWidget]:
        """The turns that are mounted, in order."""
        return [child for child in self.children if isinstance(child, TurnWidget)]

    def answer(self, turn_id: int) -> Answer | None:
        """The answer of that id, where it is mounted."""
        found = (each for each in self.turn_widgets() if isinstance(each, Answer) and each.turn.id == turn_id)
        return next(found, None)

    def replace(self, turn: Turn) -> None:
        """An answer came further: what is mounted later shows that."""
        self._path = [turn if each.id == turn.id else each for each in self._path]

    @property
    def _lengths(self) -> list[int]:
        return [len(turn.content) + (len(turn.thinking) if turn.id in self._unfolded else 0) for turn in self._path]

    @property
    def _limits(self) -> WindowLimits:
        return limits_for(*self.size)

    def _ending(self, last: int) -> TurnWindow:
        return window_ending(self._lengths, last, self._limits)

    async def _mount_window(self, window: TurnWindow, hint: str = "") -> None:
        """Mount the turns of a window, and unmount what is not in it."""
        self._window = window
        wanted = list(self._path[window.first : window.last])
        ids = {turn.id for turn in wanted}
        with self.app.batch_update():
            removed = [w for w in self.children if not isinstance(w, TurnWidget) or w.turn.id not in ids]
            await self.remove_children([w for w in removed if not isinstance(w, More)])
            await self._mount_turns(wanted)
            if not wanted:
                await self.mount(Static(hint, classes="empty", markup=False))
            await self._tell_of_more()
        self.remark()

    async def _mount_turns(self, wanted: Sequence[Turn]) -> None:
        """Turns that are there already stand in their order: the new ones go between them, run by run."""
        there = {widget.turn.id: widget for widget in self.turn_widgets()}
        after = next((child for child in self.children if isinstance(child, More) and not child.earlier), None)
        run: list[Widget] = []
        for turn in wanted:
            if (widget := there.get(turn.id)) is None:
                run.append(self._widget(turn))
            elif run:
                await self.mount_all(run, before=widget)
                run = []
        if run:
            await self.mount_all(run, before=after)

    async def _tell_of_more(self) -> None:
        marks = [child for child in self.children if isinstance(child, More)]
        if self._window == TurnWindow(0, len(self._path)):
            await self.remove_children(marks)
            return
        if not marks:
            marks = [More(earlier=True), More(earlier=False)]
            await self.mount(marks[0], before=0)
            await self.mount(marks[1])
        for mark in marks:
            mark.show(self._window.first if mark.earlier else len(self._path) - self._window.last)

    def _widget(self, turn: Turn) -> TurnWidget:
        if turn.role == "user":
            return Question(turn, self._place_of(turn))
        return Answer(turn, self._place_of(turn), self)

    # -- thinking ----------------------------------------------------------------------------------------------------

    def is_unfolded(self, turn_id: int) -> bool:
        """Return whether the thinking of an answer is shown."""
        return turn_id in self._unfolded

    async def toggle_thinking(self, turn_id: int) -> None:
        """Unfold the thinking of an answer, from its beginning where no more of it comes, or fold it."""
        self._unfolded ^= {turn_id}
        if (answer := self.answer(turn_id)) is not None:
            answer.show_thinking()
            if turn_id in self._unfolded and not answer.turn.unfinished:
                await self.go_to(turn_id)

    async def on_thinking_line_clicked(self, event: ThinkingLine.Clicked) -> None:
        """A click on the line about the thinking."""
        event.stop()
        await self.toggle_thinking(event.turn_id)

    # -- scrolling ---------------------------------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """True while the end of the conversation is in view."""
        at_end = not self.is_anchored or self.scroll_y >= self.max_scroll_y - 1
        return at_end and self._window.last == len(self._path)

    def follow(self) -> None:
        """Keep the end in sight from now on."""
        self.anchor(False)
        self._keep_end()

    def watch_virtual_size(self) -> None:
        """The text grew: once it is longer than the panel, its end is what is shown."""
        self._keep_end()

    def _keep_end(self) -> None:
        """Anchoring text that is shorter than its panel would hang it from the bottom."""
        if not self.is_anchored and self.virtual_size.height > self.size.height > 0 and not self._sliding:
            self.anchor()

    def watch_scroll_y(self, old: float, new: float) -> None:
        """At an end of the window, the window moves."""
        super().watch_scroll_y(old, new)
        if self._sliding or not self._path or old == new:
            return
        if new <= 0 and self._window.first > 0:
            self.call_later(self._slide, earlier=True)
        elif new > old and new >= self.max_scroll_y and self._window.last < len(self._path):
            self.call_later(self._slide, earlier=False)

    async def on_more_wanted(self, event: More.Wanted) -> None:
        """A click on the line about more turns."""
        event.stop()
        await self._slide(earlier=event.earlier)

    async def _slide(self, *, earlier: bool) -> None:
        """Move the window so that what is in sight stays in it, and where it is."""
        top, bottom = self.scroll_y, self.scroll_y + self.scrollable_content_region.height
        turns = self.turn_widgets()
        seen = [each for each in turns if each.virtual_region.y < bottom and each.virtual_region.bottom > top]
        if self._sliding or not seen:
            return
        self._sliding = True
        at = {turn.id: index for index, turn in enumerate(self._path)}
        fixed = seen[0] if earlier else seen[-1]
        height = fixed.virtual_region.y - self.scroll_y
        in_sight = TurnWindow(at[seen[0].turn.id], at[seen[-1].turn.id] + 1)
        towards = window_before if earlier else window_after
        window = towards(self._lengths, in_sight, self._limits)
        self.release_anchor()
        await self._mount_window(window)

        def settle() -> None:
            self.scroll_to(y=fixed.virtual_region.y - height, animate=False, immediate=True, force=True)
            self._sliding = False

        self.call_after_refresh(settle)

    async def action_top(self) -> None:
        """The first turn of all."""
        if self._window.first > 0:
            await self._jump(window_beginning(self._lengths, 0, self._limits))
        self.release_anchor()
        self.scroll_home(animate=False)

    async def action_bottom(self) -> None:
        """The last turn of all."""
        if self._window.last < len(self._path):
            await self._jump(self._ending(len(self._path)))
        self.follow()
        self.scroll_end(animate=False)

    async def _jump(self, window: TurnWindow) -> None:
        self._sliding = True
        await self._mount_window(window)
        self._sliding = False

    # -- selection ---------------------------------------------------------------------------------------------------

    def select(self, turn_id: int | None) -> None:
        """Mark a turn as the one that keys are about."""
        self.selected = turn_id
        self.remark()

    async def move(self, by: int) -> None:
        """Select the previous turn (-1) or after (1) the selected one; the last one where none is."""
        ids = [turn.id for turn in self._path]
        if not ids:
            return
        at = ids.index(self.selected) + by if self.selected in ids else len(ids) - 1
        chosen = ids[min(max(0, at), len(ids) - 1)]
        self.select(chosen)
        await self.go_to(chosen)

    async def go_to(self, turn_id: int) -> None:
        """Bring a turn of the path into sight; its beginning, where not all of it fits."""
        at = next(index for index, turn in enumerate(self._path) if turn.id == turn_id)
        if not self._window.first <= at < self._window.last:
            await self._jump(self._ending(at + 1 + SPARE_TURNS))
        widget = next(each for each in self.turn_widgets() if each.turn.id == turn_id)

        def scroll() -> None:
            self.release_anchor()
            self.scroll_to_widget(widget, animate=False, top=widget.size.height > self.size.height)

        self.call_after_refresh(scroll)

    def on_click(self, event: events.Click) -> None:
        """A click selects a turn."""
        if event.widget is not None:
            turn = next((each for each in event.widget.ancestors_with_self if isinstance(each, TurnWidget)), None)
            if turn is not None:
                self.select(turn.turn.id)
