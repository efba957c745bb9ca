"""Screens made before anybody opens them, so that a key that does shows one at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from console.stylesheet import StyledApp

PAUSE_S = 0.2
"""Between two screens: what keys ask for meanwhile comes first."""


def make_ahead(app: StyledApp, modes: Iterable[str]) -> None:
    """Make the screens of those modes of an app, one after another."""
    unmade = deque(modes)

    def make_next() -> None:
        if unmade:
            app.make_screen(unmade.popleft())
            app.set_timer(PAUSE_S, make_next)

    make_next()
