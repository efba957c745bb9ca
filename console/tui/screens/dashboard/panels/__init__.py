"""The panels of the dashboard: one file each, found by itself. A file added here is a panel more on the screen."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from typing import ClassVar, Literal

from textual.content import Content
from textual.strip import Strip
from textual.visual import Visual
from textual.widget import Widget

from console.tui.view import View
from console.tui.widgets.panel import refresh_rows

Place = Literal["top", "left", "right", "bottom"]
"""Two columns, with rows over and under them; where it is narrow, the right column is under the left one."""


class DashboardPanel(Widget):
    """A panel. Its size and colours are its own `DEFAULT_CSS`: give it a height of few rows, or `auto`.

    NAME: its CSS id.  TITLE: in its frame; "" for a panel without one.
    PLACE, ORDER: where it is, and after which other panels there.
    """

    NAME: ClassVar[str] = ""
    TITLE: ClassVar[str] = ""
    PLACE: ClassVar[Place] = "bottom"
    ORDER: ClassVar[int] = 50

    DEFAULT_CSS = """
    DashboardPanel { height: auto; width: 1fr; overflow: hidden hidden; }
    """

    def __init__(self) -> None:
        super().__init__(id=self.NAME or None, classes="panel" if self.TITLE else None)
        self.border_title = self.TITLE or None

    def show(self, view: View) -> None:
        """Draw `view`; called with each frame while the dashboard is seen, and when it comes up."""
        raise NotImplementedError

    def point(self, at: float | None) -> None:
        """Show the values of a moment (unix time) in the graphs of this panel; None: those of now."""


class RowsPanel(DashboardPanel):
    """A panel of rows of text, of which those are drawn that changed: Textual would make all of them again for one."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: Sequence[Content] = ()

    def show_rows(self, rows: Sequence[Content]) -> None:
        """Draw the rows that are others than before."""
        before, self._rows = self._rows, rows
        refresh_rows(self, before, rows)

    def rows(self) -> Sequence[Content]:
        """Return the rows; for panels whose rows differ by width and that are not shown again with another, to fit."""
        return self._rows

    def render(self) -> Content:
        """All rows, as far as there is room."""
        return Content("\n").join(self.rows()[: max(1, self.size.height)])

    def render_line(self, y: int) -> Strip:
        """Return row `y` as the terminal takes it; where some of the text is selected, out of all of it."""
        if self.text_selection is not None:
            return super().render_line(y)
        rows = self.rows()
        row = rows[y] if y < len(rows) else Content("")
        strips = Visual.to_strips(self, row, self.size.width, 1, self.visual_style)
        return strips[0].apply_offsets(0, y) if strips else Strip.blank(0)


def discover() -> list[type[DashboardPanel]]:
    """Import the modules of this package, and return the panels that they define, in the order of each place."""
    modules = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    panels = [
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, DashboardPanel) and each.__module__ == module.__name__
    ]
    return sorted(panels, key=lambda panel: (panel.ORDER, panel.__name__))
