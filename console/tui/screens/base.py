"""ConsoleScreen: the frame around every screen (status line, tabs with the knobs, footer) and its clock."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Input

from console.link.protocol import EngineLink
from console.tui.binding_index import bindings_with_calls
from console.tui.keymap import DRAIN, HELP, KNOB_IDS, ConsoleBinding
from console.tui.view import View
from console.tui.widgets.footer import KeyRow
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.panel import after_layout
from console.tui.widgets.status_line import StatusLine
from console.tui.widgets.tab_row import TabRow
from console.tui.widgets.table import Table
from engine.snapshot import RequestRow

if TYPE_CHECKING:
    from console.tui.app import EricApp

T = TypeVar("T")


class ConsoleRow(Widget):
    """A row that an app adds to every screen, above the footer."""

    DEFAULT_CSS = """
    ConsoleRow { height: 1; width: 1fr; padding: 0 1; dock: bottom; margin-bottom: 1; background: $panel; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._content = Content("")

    def draw(self, width: int) -> Content:
        """Return the row in `width` cells."""
        raise NotImplementedError

    def show(self) -> None:
        """Draw the row again, where anything changed."""
        content = for_terminal(self.app, self.draw(self.size.width))
        if not content.is_same(self._content):
            self._content = content
            self.refresh()

    def on_resize(self) -> None:
        """Fit the row into the width."""
        self.show()

    def render(self) -> Content:
        """The row as it was last shown."""
        return self._content


class AppScreen(Screen[T]):
    """A screen of ours: the header is its first row. It knows the app by its own type, and which keys give orders.

    idle_s: seconds between two frames while the engine is idle and nothing changes; the header's clock goes on.
    """

    idle_s: ClassVar[int] = 1

    def __init__(self, name: str | None = None, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(name, id, classes)
        self._header = StatusLine()
        self._key_states: Mapping[str, bool | str] = {}
        self._allowed: object = None

    @property
    def console(self) -> EricApp:
        """The app, by its own type."""
        from console.tui.app import EricApp

        assert isinstance(self.app, EricApp)
        return self.app

    def show_view(self, view: View) -> None:
        """Draw `view`, and nothing that was read otherwise; called four times a second while the screen can be seen."""

    def before_key(self, event: events.Key) -> None:
        """Move the focus, where a key is for another widget; called before the key goes to the one with the focus."""

    def draw(self, view: View) -> None:
        """Draw `view` and the header."""
        with self.app.batch_update():
            self.show_view(view)
            self.draw_header(view)
        self._show_keys(view)

    def draw_header(self, view: View) -> None:
        """Draw the header alone."""
        if self._header.is_attached:
            alerts = self.console.alerts.unseen(view)
            self._header.show(view.snapshot, view.api, view.link_status, alerts=alerts)

    def redraw(self) -> None:
        """Draw the app's current view again, after a change on this side."""
        self.draw(self.console.view)

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        """The bindings here and now, those disabled that are not offered, each with its label."""
        return {key: self._as_offered(active) for key, active in super().active_bindings.items()}

    def _as_offered(self, active: ActiveBinding) -> ActiveBinding:
        node, binding = active.node, active.binding
        enabled = active.enabled and self.offers(node, binding)
        if isinstance(label := self._key_states.get(binding.id or ""), str):
            binding = replace(binding, description=label)
        return active._replace(binding=binding, enabled=enabled)

    def offers(self, node: DOMNode, binding: Binding) -> bool:
        """Return whether footer, help and palette have the binding of a node now. A key that is not offered says why it
        does nothing. None is offered that the other end would refuse."""
        if self._key_states.get(binding.id or "") is False:
            return False
        declared = bindings_with_calls(type(node)).get(binding.id or "")
        return declared is None or not self.console.view.refusal(declared)

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Return by ids of bindings whether they have something to work on now, or their label now."""
        states: dict[str, bool | str] = dict.fromkeys(KNOB_IDS, view.snapshot.status.spec is not None)
        return states | {"model.next": len(view.published.models) > 1}

    def offer_keys(self) -> None:
        """Show the keys again where the state of one changed; not before the first draw, which sets the states."""
        if self.is_mounted:
            self._show_keys(self.console.view)

    def _show_keys(self, view: View) -> None:
        states, allowed = self.key_states(view), (view.is_read_only, view.link_status.calls)
        if (states, allowed) != (self._key_states, self._allowed):
            self._key_states, self._allowed = states, allowed
            self.refresh_bindings()

    def cancel_request(self, row: RequestRow | None) -> None:
        """Cancel a request after a question, or say why there is nothing to cancel."""
        from console.tui.screens.dialogs import ConfirmScreen

        if row is None:
            self.notify("Select a request first.", severity="warning")
        elif row.state == "finished":
            self.notify(f"{row.id} has already ended.", markup=False)
        else:
            question = ConfirmScreen(
                f"Cancel {row.id}?",
                "Its client gets an error, after what has been streamed.",
                yes="Cancel it",
                no="Keep it",
            )
            self.app.push_screen(question, lambda sure: self._cancel(row) if sure else None)

    def _cancel(self, row: RequestRow) -> None:
        self.console.perform(self.console.link.cancel_request(row.id), done=f"Cancelled {row.id}")


class Dialog(ModalScreen[T], AppScreen[T]):
    """A question, a form or a page over a screen, below the header. The last row has its keys, and no others.

    One with a field declares `accept_key` and `action_accept`: Enter accepts from a field; on a button it presses that,
    in a text it is a new line.
    """

    BINDINGS: ClassVar[list[BindingType]] = [HELP]

    def on_mount(self) -> None:
        """Show the header and the keys."""
        self.mount(self._header, KeyRow())
        self.redraw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether Enter accepts where the focus is."""
        return action != "accept_typed" or isinstance(self.focused, Input)

    def action_accept_typed(self) -> None:
        """Accept, once the field has the keys before this one: its binding has priority, which they have not."""
        (self.focused or self).call_later(self.action_accept)

    def action_accept(self) -> None:
        """Accept the form."""


class TableForm(Dialog[bool | None]):
    """A form with a table; True once what it starts has begun. Enter starts it from the table as well, and so do two
    clicks on a row."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether Enter accepts where the focus is."""
        return isinstance(self.focused, Table) or super().check_action(action, parameters)

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Start, after two clicks on a row."""
        event.stop()
        self.action_start()

    def action_accept(self) -> None:
        """Start, from a field or the table."""
        self.action_start()

    def action_start(self) -> None:
        """Start; where that is refused, say why and stay."""
        raise NotImplementedError


def accept_key(words: str) -> ConsoleBinding:
    """Return the key that accepts a form. words: what that does."""
    return ConsoleBinding(
        "enter", "accept_typed", words, id="form.accept", tooltip="Accept", priority=True, primary=True
    )


class ConsoleScreen(AppScreen[None]):
    """A mode's screen: subclasses give `compose_body` and `update_body`, and call the engine through `perform`."""

    MODE: ClassVar[str] = ""
    BINDINGS: ClassVar[list[BindingType]] = [DRAIN]
    _link: EngineLink | None = None
    _look: tuple[object, ...] = ()
    _drawn: View | None = None
    _console_rows: Sequence[ConsoleRow] = ()

    def compose(self) -> ComposeResult:
        """The frame, with the body in it."""
        yield self._header
        yield TabRow(self.MODE)
        yield from self.compose_body()
        self._console_rows = tuple(self.console.extra_rows())
        yield from self._console_rows
        yield KeyRow()

    def compose_body(self) -> ComposeResult:
        """Yield the widgets between the tabs and the footer."""
        yield from ()

    def update_body(self, view: View) -> None:
        """Draw the body of `view`; called four times a second while this screen is seen, and when it comes up."""

    @property
    def link(self) -> EngineLink:
        """The engine, as far as a screen may see it: the one that was in view when the screen came up."""
        if self._link is None:
            self._link = self.console.link
        return self._link

    def perform(self, command: Coroutine[Any, Any, object], *, done: str = "") -> None:
        """Run an engine command in the background; toast `done` afterwards, or why it failed."""
        self.console.perform(command, done=done)

    def show_view(self, view: View) -> None:
        """Draw the frame around the body, and the body."""
        self._drawn = view
        for row in self._console_rows:
            row.show()
        badge = self.console.alerts.has_badge(view)
        self.query_one(TabRow).show(view.snapshot, read_only=view.is_read_only, badge=badge)
        self.update_body(view)

    def on_mount(self) -> None:
        """Never a first frame without numbers."""
        self._look = self.console.look
        self.redraw()

    def on_resize(self) -> None:
        """Panels have other frames on a small terminal."""
        after_layout(self, self.redraw)

    def on_screen_resume(self, event: events.ScreenResume) -> None:
        """Back from another mode: draw what is stale. Textual would also style every widget again, changed or not, and
        it sends this event twice to a screen that was just made."""
        look = self.console.look
        event.refresh_styles = look != self._look
        self._look = look
        if self.is_mounted and self._drawn is not self.console.view:
            self.redraw()
