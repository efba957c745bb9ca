"""Before a server without a key is reached from other machines: refused, or where --no-auth was said, asked once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.app import App

from console.link.protocol import ApiStatus
from console.settings.addresses import is_loopback
from console.tui.screens.dialogs import ConfirmScreen

_QUESTION = (
    "Anyone on the network could use this server without a key.\n"
    "Create a key on the API screen (6, w), or listen without one?"
)
_REFUSAL = (
    "{host} is reachable from the network, and no key is set. Create one on the API screen (6, w), "
    "or start with --no-auth."
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
        f"{host} is reachable from the network, and no key is set.", _QUESTION, yes="Listen", no="Cancel"
    )
    app.push_screen(question, lambda sure: go() if sure else None)
