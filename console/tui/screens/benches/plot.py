"""One number of a bench as bars, a row each: full to the least of the repeats, shaded to the most."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from console.bench.result import BenchResult, Column, Row, columns_with_numbers
from console.bench.text import cell as figure
from console.bench.text import column_title, key_text
from console.tui.widgets.glyphs import ROWS, for_terminal
from console.tui.widgets.panel import set_title

_EIGHTHS = 8
_MIN_CELLS = 8
_GAP = "  "
NO_NUMBERS = "No number to plot."


class BenchPlot(VerticalScroll, can_focus=False):
    """Scrolls where there are more rows than lines."""

    DEFAULT_CSS = """
    BenchPlot { scrollbar-size-vertical: 1; }
    BenchPlot Static { height: auto; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._shown: tuple[BenchResult, Column | None] | None = None

    def compose(self) -> ComposeResult:
        """The bars."""
        yield Static(id="bars", markup=False)

    def show(self, result: BenchResult, column: Column | None, about: str = "") -> None:
        """Draw a column of a result; None where it has none. about: the end of the title."""
        self._shown = result, column
        set_title(self, f"{column_title(column)}{about}" if column is not None else "Plot")
        self._draw()

    def clear(self, words: str) -> None:
        """Nothing is drawn; say why."""
        self._shown = None
        set_title(self, "Plot")
        self.query_one("#bars", Static).update(for_terminal(self.app, Content.styled(words, "$muted")))

    def on_resize(self) -> None:
        """Bars are as long as there is room."""
        self._draw()

    def _draw(self) -> None:
        if self._shown is None:
            return
        result, column = self._shown
        width = self.scrollable_content_region.width
        lines = bars(result, column, width) if column is not None else [Content.styled(NO_NUMBERS, "$muted")]
        self.query_one("#bars", Static).update(for_terminal(self.app, Content("\n").join(lines)))


def plottable_columns(result: BenchResult) -> list[Column]:
    """The columns that can be drawn: those of the table in its order, then all others that have a number."""
    return sorted(columns_with_numbers(result.columns, result.rows), key=lambda each: not each.shown)


def bars(result: BenchResult, column: Column, width: int) -> list[Content]:
    """A title for what rows were measured for, then a line for each row."""
    titles = [key.title for key in result.keys]
    names = [[key_text(row.keys.get(key.name, "")) for key in result.keys] for row in result.rows]
    rooms = [max(map(len, each)) for each in zip(titles, *names, strict=True)]
    figures = [figure(row, column) for row in result.rows]
    room = max(map(len, figures), default=0)
    cells = max(_MIN_CELLS, width - sum(rooms) - len(_GAP) * (len(rooms) + 1) - room)
    most = max((spread[1] for row in result.rows if (spread := row.spread(column.name))), default=0.0)
    style = "$graph-ttft" if column.better == "lower" else "$graph-tokens"
    return [
        Content.styled(_aligned(titles, rooms), "bold $muted"),
        *(
            Content.assemble(
                (_aligned(name, rooms), "$muted"),
                _GAP,
                _bar(row, column.name, most, cells).stylize(style),
                (f"{_GAP}{label:>{room}}", "bold"),
            )
            for row, name, label in zip(result.rows, names, figures, strict=True)
        ),
    ]


def _aligned(words: Sequence[str], rooms: Sequence[int]) -> str:
    return _GAP.join(f"{word:>{room}}" for word, room in zip(words, rooms, strict=True))


def _bar(row: Row, column: str, most: float, cells: int) -> Content:
    spread = row.spread(column)
    if spread is None or most <= 0:
        return Content(" " * cells)
    least, highest = (max(0.0, value) / most * cells for value in spread)
    if highest - least < 1:
        whole, part = divmod(round((least + highest) / 2 * _EIGHTHS), _EIGHTHS)
        full = ROWS[-1] * whole + (ROWS[part] if part else "" if whole else ROWS[1])
        return Content(f"{full:<{cells}}")
    return Content(f"{ROWS[-1] * round(least)}{'░' * (round(highest) - round(least))}".ljust(cells))
