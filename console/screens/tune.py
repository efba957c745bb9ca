"""Tune: the knobs and what each change did."""

from __future__ import annotations

from console.screens.base import ConsoleScreen


class TuneScreen(ConsoleScreen):
    """Tune: the knobs and what each change did."""

    MODE = "tune"
