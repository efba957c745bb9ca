"""Advice: what the adviser has to say, a line each with the knob to turn; no row at all where it has nothing to say."""

from __future__ import annotations

from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from console.adviser import Advice
from console.widgets import text
from console.widgets.clicks import clickable
from console.widgets.glyphs import fitted
from console.widgets.hints import key_of

_ROWS_A_LINE = 14


class AdvicePanel(Widget):
    """The most urgent first. What can be done is a link, as is the cross that dismisses it; a key does the first."""

    DEFAULT_CSS = """
    AdvicePanel {
        height: auto; width: 1fr; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis;
        link-style: bold; link-color: $primary; link-background: transparent;
        link-style-hover: bold; link-color-hover: $background; link-background-hover: $primary;
    }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._said: tuple[Advice, ...] = ()

    def show(self, said: tuple[Advice, ...]) -> bool:
        """Draw anew, where anything changed; whether it did."""
        if said == self._said:
            return False
        resized = len(said) != len(self._said)
        self._said = said
        self.refresh(layout=resized)
        return True

    @property
    def said(self) -> tuple[Advice, ...]:
        """All of it, shown or not."""
        return self._said

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """A row each, as far as that leaves room for the rest."""
        return min(len(self._said), max(1, viewport.height // _ROWS_A_LINE))

    def render(self) -> Content:
        """All lines."""
        shown, keyed, key = self._said[: self.size.height], first_to_do(self._said), key_of(self.screen, "advice.take")
        lines = []
        for index, advice in enumerate(shown):
            more = len(self._said) - len(shown) if index == len(shown) - 1 else 0
            lines.append(line(advice, index, self.size.width, key=key if index == keyed else "", more=more))
        return fitted(self.app, Content("\n").join(lines))


def first_to_do(said: tuple[Advice, ...]) -> int | None:
    """Which of them the key does: the first of which anything can be done."""
    return next((index for index, advice in enumerate(said) if advice.action is not None), None)


def line(advice: Advice, index: int, width: int, *, key: str = "", more: int = 0) -> Content:
    """One piece of advice in `width` cells: the whole sentence, or the brief one where that does not fit."""
    do = Content("")
    if advice.action is not None:
        label = f" {key} {advice.action.label} " if key else f" {advice.action.label} "
        do = clickable(label, f"screen.take_advice({index})", "bold")
    others = Content.styled(f" +{more}", "$muted") if more else Content("")
    end = Content.assemble(others, " ", do, clickable(" × ", f"screen.dismiss_advice({index})", "bold"))
    room = max(0, width - end.cell_length - 2)
    said = advice.sentence if len(advice.sentence) <= room else text.clip(advice.brief, room)
    return Content.assemble(("▲ ", "$warning"), f"{said:<{room}}", end)
