"""Keys named outside the last row, as they are bound now."""

from __future__ import annotations

from typing import Any

from textual.content import Content
from textual.screen import Screen
from textual.style import Style

# Words that can be clicked.


def clickable(label: str, action: str, style: str = "$primary") -> Content:
    """A label that runs an action: "screen.load_model(False)", or one of the widget that shows it."""
    return Content.styled(label, style).stylize(Style.from_meta({"@click": action}))


def key_of(screen: Screen[Any], binding: str) -> str:
    """The key of a binding, by its id, as it is shown; "" where it does not work here and now."""
    for active in screen.active_bindings.values():
        if active.binding.id == binding and active.enabled:
            return screen.app.get_key_display(active.binding)
    return ""


def key_hint(screen: Screen[Any], binding: str, words: str, action: str) -> Content:
    """A key and what it does, to be clicked too."""
    key = key_of(screen, binding)
    return Content.assemble(
        clickable(f"{key} ", action, "bold $primary") if key else "", clickable(words, action, "not bold $muted")
    )
