"""Requests: live and finished, in any order, through a filter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.dom import DOMNode
from textual.widgets import Input

from console import text
from console.tui.keymap import ConsoleBinding
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.screens.requests.groups import GROUPINGS
from console.tui.screens.requests.request_list import SHOWS, RequestList
from console.tui.screens.requests.row_actions import RequestActions
from console.tui.screens.requests.table import COLUMN_NAMES, RequestTable, count_text, empty_text
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.panel import set_frame
from console.tui.widgets.table import Table
from engine.snapshot import RequestRow

_OF_REQUESTS = frozenset({"sort", "reverse", "copy_curl", "copy_id", "filter_client"})


class RequestsScreen(RequestActions):
    """Every request there is and the last that ended."""

    MODE = "requests"
    AUTO_FOCUS = "#all-requests"
    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "X",
            "cancel_queued",
            "All queued",
            id="requests.cancel_queued",
            mutates=True,
            tooltip="Cancel every queued request",
        ),
        Binding(
            "slash", "find", "Filter", id="requests.filter", tooltip="Show only matching requests", key_display="/"
        ),
        Binding("v", "states", "States", id="requests.states", tooltip="Filter by state"),
        Binding("g", "group", "Group", id="requests.group", tooltip="Group by client, by API key, or not"),
        Binding("s", "sort(1)", "Sort", id="requests.sort", tooltip="Sort by the next column"),
        Binding("S", "reverse", "Reverse", id="requests.reverse", tooltip="Reverse the order", show=False),
        Binding(
            "escape",
            "leave",
            "Clear",
            id="requests.leave",
            tooltip="Go back to the groups, or show all requests again",
            show=False,
        ),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._requests = RequestList()
        self._seen = 0

    def compose_body(self) -> ComposeResult:
        """The table, and the filter's box under it."""
        with Vertical(id="requests-list", classes="panel"):
            yield RequestTable(self._requests, id="all-requests")
        yield Input(placeholder="/ filters by id, source, client, model or ending; esc clears", id="request-filter")

    @property
    def table(self) -> RequestTable:
        """The table."""
        return self.query_one(RequestTable)

    # -- what is shown ------------------------------------------------------------------------------------------------

    def update_body(self, view: View) -> None:
        """Add what ended since the last frame to what is live."""
        self._seen, ended = self.link.requests.finished(self._seen)
        self._requests.update([row for row in view.snapshot.requests if row.state != "finished"], ended)
        self._show(view)

    def _show(self, view: View) -> None:
        requests, panel = self._requests, self.query_one("#requests-list")
        empty = "" if len(requests) else self._empty_text(view)
        self.table.show_requests(empty)
        by = f"by {requests.grouping}" if requests.shows_groups else requests.group_shown
        kinds = [kind for kind in (requests.show if requests.show != "all" else "", by) if kind]
        counts = for_terminal(self.app, Content(count_text(requests, view.snapshot))).plain
        set_frame(panel, ": ".join(["Requests", *kinds]), counts)

    def _empty_text(self, view: View) -> str:
        if self._requests.filtered:
            return "No request matches. Esc shows all."
        return empty_text(view, lambda: self.example_curl(view))

    def _rearranged(self) -> None:
        self._show(self.console.view)
        self.refresh_bindings()

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer to cancel queued requests while there are any."""
        return super().key_states(view) | {"requests.cancel_queued": view.published.queued > 0}

    @property
    def can_cancel(self) -> bool:
        """True if `x` has something to cancel: a request, or those of a group."""
        if not self._requests.shows_groups:
            return super().can_cancel
        return (group := self.table.cursor_key) is not None and bool(self._requests.live_of(group))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether a key has a meaning now: groups are not sorted."""
        return not (self._requests.shows_groups and action in _OF_REQUESTS)

    def action_group(self) -> None:
        """By client, then by key, then each request again."""
        self._requests.group_by(GROUPINGS[(GROUPINGS.index(self._requests.grouping) + 1) % len(GROUPINGS)])
        self._rearranged()

    # -- order and filter ---------------------------------------------------------------------------------------------

    def action_sort(self, by: int) -> None:
        """By the next column that is seen: the largest first, which is what one looks for."""
        names = [COLUMN_NAMES[at] for at in self.table.shown_columns]
        here = names.index(self._requests.column) if self._requests.column in names else -by
        self._sort(names[(here + by) % len(names)])

    def action_reverse(self) -> None:
        """The other way round."""
        self._sort(self._requests.column)

    def on_table_header_clicked(self, event: Table.HeaderClicked) -> None:
        """By that column; again, the other way round."""
        if not self._requests.shows_groups:
            self._sort(COLUMN_NAMES[event.column])

    def _sort(self, column: str) -> None:
        again = column == self._requests.column
        self._requests.sort(column, descending=not self._requests.descending if again else True)
        self._rearranged()

    def action_states(self) -> None:
        """The next kind of states, then all."""
        self._requests.filter(show=SHOWS[(SHOWS.index(self._requests.show) + 1) % len(SHOWS)])
        self._rearranged()

    def action_find(self) -> None:
        """Type a word."""
        self.query_one("#request-filter", Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter as it is typed."""
        self._requests.filter(text=event.value)
        self._rearranged()

    def on_input_submitted(self) -> None:
        """Back to the table, filter kept."""
        self.table.focus()

    def action_leave(self) -> None:
        """Back to the groups; from there, all requests again."""
        if self._requests.group_shown and self._requests.grouping != "none":
            self._requests.show_group("none", "")
        else:
            self.query_one("#request-filter", Input).value = ""
            self._requests.filter(text="", show="all")
            self._requests.group_by("none")
        self._rearranged()
        self.table.focus()

    # -- what can be done ---------------------------------------------------------------------------------------------

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Look at one closely, or at the requests of a group."""
        if self._requests.shows_groups:
            self._requests.show_group(self._requests.grouping, event.key)
            self._rearranged()
        elif (row := self._requests.get(event.key)) is not None:
            self.open_request(row)

    def opens_request(self, node: DOMNode) -> bool:
        """Return whether Enter there opens a request, and no group."""
        return node is self.table and not self._requests.shows_groups

    @property
    def chosen_request(self) -> RequestRow | None:
        """The request under the cursor."""
        return self.table.chosen

    def show_client(self, client: str) -> None:
        """Show only the requests of that client, until Esc."""
        self._requests.show_group("client", client)
        if self.is_mounted:
            self._rearranged()

    def show_clients(self) -> None:
        """Show the requests grouped by client, until Esc."""
        self._requests.group_by("client")
        if self.is_mounted:
            self._rearranged()

    def action_cancel(self) -> None:
        """Cancel the request under the cursor, or after a question all live ones of the group there."""
        group = self.table.cursor_key
        if not self._requests.shows_groups:
            super().action_cancel()
        elif group is None:
            self.notify(f"Choose a {self._requests.grouping} with the arrow keys first.", severity="warning")
        elif not (rows := self._requests.live_of(group)):
            self.notify(f"{group} has no live requests.", markup=False)
        else:
            question = ConfirmScreen(
                f"Cancel {text.plural(len(rows), 'request')} of {group}?",
                "Clients get an error, after what has been streamed.",
                yes="Cancel them",
                no="Keep them",
            )
            self.app.push_screen(question, lambda yes: self._cancel_all(rows) if yes else None)

    def _cancel_all(self, rows: Sequence[RequestRow]) -> None:
        async def cancel() -> None:
            for row in rows:
                await self.link.cancel_request(row.id)

        self.perform(cancel(), done=f"Cancelled {text.plural(len(rows), 'request')}")

    def action_cancel_queued(self) -> None:
        """Cancel all that waits; ask first."""
        queued = self.console.view.published.queued
        if not queued:
            self.notify("No queued requests.")
            return
        title = f"{text.plural(queued, 'request')} {'waits' if queued == 1 else 'wait'} for a worker."
        question = ConfirmScreen(title, "Their clients get an error. Cancel them?", yes="Cancel them", no="Keep them")
        self.app.push_screen(question, lambda yes: self._cancel_queued() if yes else None)

    def _cancel_queued(self) -> None:
        async def cancel() -> None:
            ended = await self.link.requests.cancel_queued()
            self.notify(f"Cancelled {text.plural(ended, 'request')}")

        self.perform(cancel())
