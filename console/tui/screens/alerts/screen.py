"""Alerts: what went wrong lately, the newest first, with what was done and what to do."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from console import text
from console.text import date_and_time
from console.tui.screens.base import Dialog
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal
from engine.snapshot import Alert

_LEVELS = {"error": ("✖", "$error"), "warning": ("▲", "$warning")}


class AlertsScreen(Dialog[None]):
    """A list that scrolls. Looking at it marks the alerts as seen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,A", "dismiss", "Close", id="alerts.close", tooltip="Close the alerts", key_display="esc"),
        Binding("c", "clear", "Clear", id="alerts.clear", tooltip="Clear the list in this console"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._shown = Content("")

    def compose(self) -> ComposeResult:
        """The list."""
        with VerticalScroll(classes="dialog alerts") as page:
            page.border_title = "Alerts"
            yield Static(id="alert-list", markup=False)

    def on_mount(self) -> None:
        """Never a first frame without them."""
        self.redraw()

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer to clear what is listed."""
        return super().key_states(view) | {"alerts.clear": bool(self.console.alerts.listed(view))}

    def show_view(self, view: View) -> None:
        """Draw the list again, where anything changed."""
        self.console.alerts.mark_seen(view)
        shown = for_terminal(self.app, alert_list(self.console.alerts.listed(view), view.snapshot.at))
        if not shown.is_same(self._shown):
            self._shown = shown
            self.query_one("#alert-list", Static).update(shown)

    def action_clear(self) -> None:
        """Take the alerts off the list of this console; the engine and other consoles keep them."""
        view = self.console.view
        cleared = len(self.console.alerts.listed(view))
        self.console.alerts.clear(view)
        self.show_view(view)
        self.offer_keys()
        if not cleared:
            self.notify("No alerts to clear.")
        else:
            self.notify(f"Cleared {text.plural(cleared, 'alert')} in this console. GET /admin/alerts has them.")


def alert_list(alerts: tuple[Alert, ...], now: float) -> Content:
    """All alerts, the last to occur first. now: unix time."""
    if not alerts:
        return Content.styled("No alerts. Crashes, failed loads, slow disks and refused clients appear here.", "$muted")
    newest_first = sorted(alerts, key=lambda alert: (alert.last_at, alert.id), reverse=True)
    return Content("\n\n").join(describe(alert, now) for alert in newest_first)


def describe(alert: Alert, now: float) -> Content:
    """One alert: when, how often and what; then what was done, and what to do. now: unix time."""
    glyph, style = _LEVELS[alert.level]
    often = f" · {alert.count} times since {date_and_time(alert.at, now)}" if alert.count > 1 else ""
    head = Content.assemble(
        (f"{glyph} ", style), (f"{date_and_time(alert.last_at, now)}  {alert.subject}{often}", "bold $foreground")
    )
    lines = [head, Content.styled(alert.text, style)]
    if alert.done:
        lines.append(Content.assemble(("Done: ", "$muted"), (alert.done, "$foreground")))
    if alert.advice:
        lines.append(Content.assemble(("To do: ", "$muted"), (alert.advice, "$foreground")))
    return Content("\n").join(lines)
