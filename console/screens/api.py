"""API: who may ask, and who does."""

from __future__ import annotations

from console.screens.base import ConsoleScreen


class ApiScreen(ConsoleScreen):
    """API: who may ask, and who does."""

    MODE = "api"
