"""Requests: live and finished."""

from __future__ import annotations

from console.screens.base import ConsoleScreen


class RequestsScreen(ConsoleScreen):
    """Requests: live and finished."""

    MODE = "requests"
