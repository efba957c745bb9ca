"""Words that can be clicked."""

from __future__ import annotations

from textual.content import Content
from textual.style import Style


def clickable(label: str, action: str, style: str = "$primary") -> Content:
    """A label that runs an action: "screen.load_model(False)", or one of the widget that shows it."""
    return Content.styled(label, style).stylize(Style.from_meta({"@click": action}))
