"""Draw only what changed in a panel: Textual draws it with its children whenever its title is set, changed or not; and
only what is still there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.content import Content
from textual.geometry import Region
from textual.widget import Widget

from console.tui.widgets.glyphs import for_terminal
from engine.text.printable import printable


def after_layout(widget: Widget, draw: Callable[[], object]) -> None:
    """Draw once a widget has its new size; not while the console closes, for its parts may be gone by then."""

    def draw_where_open() -> None:
        if widget.app.is_running:
            draw()

    widget.call_after_refresh(draw_where_open)


def set_title(panel: Widget, title: Content | str) -> None:
    """The title above. A string is no markup."""
    shown = _shown(panel, title)
    if panel.border_title != shown.markup:
        panel.border_title = shown


def set_subtitle(panel: Widget, words: Content | str) -> None:
    """The title below. A string is no markup."""
    shown = _shown(panel, words)
    if panel.border_subtitle != shown.markup:
        panel.border_subtitle = shown


def _shown(panel: Widget, words: Content | str) -> Content:
    return for_terminal(panel.app, Content(printable(words)) if isinstance(words, str) else words)


def has_line_below(panel: Widget) -> bool:
    """Return whether a panel has a frame at its bottom, which its subtitle stands in; small terminals leave it out."""
    return panel.styles.border_bottom[0] != ""


def set_frame(panel: Widget, title: Content | str, subtitle: str) -> None:
    """The title above and the subtitle below; both above where there is no line below."""
    below = has_line_below(panel)
    set_title(panel, title if below or not subtitle else Content.assemble(title, f" · {printable(subtitle)}"))
    set_subtitle(panel, subtitle if below else "")


def refresh_rows(panel: Widget, before: Sequence[Content], after: Sequence[Content]) -> None:
    """Draw the rows of a panel that are others than before; all of it where there are more or fewer."""
    if len(before) != len(after):
        panel.refresh(layout=True)
    elif changed := [y for y, (was, now) in enumerate(zip(before, after, strict=True)) if not now.is_same(was)]:
        panel.refresh(*(Region(0, y, panel.size.width, 1) for y in changed))
