"""What a person sees: the text on the screen."""

from __future__ import annotations

from typing import Any

from textual.app import App


def rows(app: App[Any]) -> list[str]:
    """The rows of the screen as plain text."""
    width, height = app.size
    lines = app.screen._compositor.render_strips(app.size) if (width and height) else []
    return ["".join(segment.text for segment in strip) for strip in lines]


def screen_text(app: App[Any]) -> str:
    """All of it."""
    return "\n".join(rows(app))
