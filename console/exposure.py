"""Asking once before a server without a key can be reached from other machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.app import App

from console.addresses import is_loopback
from console.screens.confirm import ConfirmScreen

_QUESTION = (
    "Every machine that reaches this one could ask the model then, and nobody would need a key.\n"
    "A key is made on the API screen (6, then w). Listen without one?"
)


def before_exposing(app: App[Any], host: str, *, key_required: bool, go: Callable[[], None]) -> None:
    """Call `go`, after a question where `host` is more than this machine and no key is needed there."""
    if is_loopback(host) or key_required:
        go()
        return
    question = ConfirmScreen(
        f"{host} is open to other machines, and there is no key.", _QUESTION, yes="Listen", no="Stay"
    )
    app.push_screen(question, lambda sure: go() if sure else None)
