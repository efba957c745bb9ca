"""Before a server without a key is reached from other machines: refused, or where --no-auth was said, asked once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.app import App

from console.link.protocol import ApiStatus
from console.settings.addresses import is_loopback
from console.tui.screens.dialogs import ConfirmScreen

_QUESTION = (
    "Every machine that reaches this one could use the model without a key.\n"
    "A key is made on the API screen (6, then w). Listen without one?"
)
_REFUSAL = (
    "{host} is open to other machines, and there is no key. Make one on the API screen (6, then "
    "w), or start with --no-auth."
)


def confirm_exposure(app: App[Any], host: str, status: ApiStatus, *, go: Callable[[], None]) -> None:
    """Call `go`, after a question where `host` is more than this machine and no key is needed there; or say why that
    would be refused."""
    if is_loopback(host) or status.key_required:
        go()
        return
    if not status.no_auth:
        app.notify(_REFUSAL.format(host=host), severity="error", markup=False, timeout=12)
        return
    question = ConfirmScreen(
        f"{host} is open to other machines, and there is no key.", _QUESTION, yes="Listen", no="Cancel"
    )
    app.push_screen(question, lambda sure: go() if sure else None)
