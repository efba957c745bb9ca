"""Draw only what changed in a panel: Textual draws it with its children whenever its title is set, changed or not."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.geometry import Region
from textual.widget import Widget

from engine.text.printable import printable


def set_title(panel: Widget, title: Content | str) -> None:
    """The title above. A string is no markup."""
    shown = Content(printable(title)) if isinstance(title, str) else title
    if panel.border_title != shown.markup:
        panel.border_title = shown


def set_subtitle(panel: Widget, words: Content | str) -> None:
    """The title below. A string is no markup."""
    shown = Content(printable(words)) if isinstance(words, str) else words
    if panel.border_subtitle != shown.markup:
        panel.border_subtitle = shown


def refresh_rows(panel: Widget, before: Sequence[Content], after: Sequence[Content]) -> None:
    """Draw the rows of a panel that are others than before; all of it where there are more or fewer."""
    if len(before) != len(after):
        panel.refresh(layout=True)
    elif changed := [y for y, (was, now) in enumerate(zip(before, after, strict=True)) if not now.is_same(was)]:
        panel.refresh(*(Region(0, y, panel.size.width, 1) for y in changed))
