"""ConsoleScreen: the frame around every screen (status line, tabs with the knobs, footer) and its clock."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

from textual import events
from textual.app import ComposeResult
from textual.binding import ActiveBinding
from textual.screen import ModalScreen, Screen
from textual.widget import Widget

from console.link.protocol import ApiStatus, EngineLink
from console.tui.bindings import without_mutating_actions
from console.tui.widgets.footer import KeyRow
from console.tui.widgets.header import StatusLine, TabRow
from engine.snapshot import RequestRow, Snapshot

if TYPE_CHECKING:
    from console.tui.app import EricApp

T = TypeVar("T")

JUST_S = 0.1
"""What was drawn so long ago at most need not be drawn again, but for another snapshot."""


@runtime_checkable
class LiveScreen(Protocol):
    """A screen that shows the engine as it is now."""

    def refresh_view(self) -> None:
        """Show the latest snapshot; called four times a second while it can be seen."""


class ConsoleRow(Widget):
    """A row that an app adds to every screen."""

    def show(self) -> None:
        """Draw anew, where anything changed."""


class AppScreen(Screen[T]):
    """A screen of ours: it knows the app by its own type, and which keys give orders."""

    @property
    def console(self) -> EricApp:
        """The app, by its own type."""
        from console.tui.app import EricApp

        assert isinstance(self.app, EricApp)
        return self.app

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        """What keys mean now; orders mean nothing where none are taken."""
        active = super().active_bindings
        return without_mutating_actions(active) if self.console.standing.read_only else active

    def cancel_request(self, row: RequestRow | None) -> None:
        """Cancel a request after a question, or say why there is nothing to cancel; where no command is taken, the link
        says so at once."""
        from console.tui.screens.dialogs import ConfirmScreen

        if row is None:
            self.notify("Choose a request with the arrow keys first.", severity="warning")
        elif row.state == "finished":
            self.notify(f"{row.id} has ended already.", markup=False)
        elif self.console.standing.read_only:
            self._cancel(row)
        else:
            question = ConfirmScreen(
                f"Cancel {row.id}?",
                "Its client gets what there is so far, and no more.",
                yes="Cancel it",
                no="Keep it",
            )
            self.app.push_screen(question, lambda sure: self._cancel(row) if sure else None)

    def _cancel(self, row: RequestRow) -> None:
        self.console.perform(self.console.link.cancel_request(row.id), done=f"Cancelled {row.id}")


class ConsolePage(ModalScreen[T], AppScreen[T]):
    """Over a mode's screen; one with `refresh_view` shows the engine as it is now."""


class ConsoleScreen(AppScreen[None]):
    """A mode's screen: subclasses give `compose_body` and `update_body`, and call the engine through `perform`."""

    MODE: ClassVar[str] = ""
    _link: EngineLink | None = None
    _look: tuple[object, ...] = ()
    _drawn: Snapshot | None = None
    _drawn_s = 0.0

    def compose(self) -> ComposeResult:
        """The frame, with the body in it."""
        yield StatusLine()
        yield TabRow(self.MODE)
        yield from self.compose_body()
        yield from self.console.extra_rows()
        yield KeyRow()

    def compose_body(self) -> ComposeResult:
        """What is between the tabs and the footer."""
        yield from ()

    def update_body(self, snapshot: Snapshot, api: ApiStatus) -> None:
        """Show `snapshot`; called four times a second while this screen is seen, and when it comes up."""

    @property
    def link(self) -> EngineLink:
        """The engine, as far as a screen may see it: the one that was in view when the screen came up."""
        if self._link is None:
            self._link = self.console.link
        return self._link

    def perform(self, command: Coroutine[Any, Any, object], *, done: str = "") -> None:
        """Run an engine command in the background; toast `done` afterwards, or why it failed."""
        self.console.perform(command, done=done)

    def refresh_view(self) -> None:
        """Show the latest snapshot now."""
        self._drawn, self._drawn_s = self.link.snapshot(), time.monotonic()
        snapshot, api = self.console.snapshot(), self.link.api_status()
        with self.app.batch_update():
            self.query_one(StatusLine).show(snapshot, api, self.console.standing)
            for row in self.query(ConsoleRow):
                row.show()
            self.query_one(TabRow).show(snapshot, read_only=self.console.standing.read_only)
            self.update_body(snapshot, api)

    def on_mount(self) -> None:
        """Never a first frame without numbers."""
        self._look = self.console.look
        self.refresh_view()

    def on_screen_resume(self, event: events.ScreenResume) -> None:
        """Back from another mode: nothing stale. Textual would style every widget anew, too, where nothing changed, and
        it says so twice of a screen that has just been made."""
        look = self.console.look
        event.refresh_styles = look != self._look
        self._look = look
        just_drawn = self._drawn is self.link.snapshot() and time.monotonic() - self._drawn_s < JUST_S
        if self.is_mounted and not just_drawn:
            self.refresh_view()
