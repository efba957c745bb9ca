"""How a part of a widget looks."""

from __future__ import annotations

from textual.style import Style
from textual.widget import Widget


def look(widget: Widget, *components: str) -> Style:
    """The style of a part of a widget, of all of it where none is named; with reversed letters, which
    `get_visual_style` leaves out."""
    if not components:
        return widget.visual_style
    style = widget.get_visual_style(*components)
    is_reversed = any(widget.get_component_styles(name).text_style.reverse for name in components)
    return style + Style(reverse=True) if is_reversed else style
