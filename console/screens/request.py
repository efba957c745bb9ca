"""One request, looked at closely while it lives and after it ended."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from console.screens.base import ConsolePage
from console.widgets.glyphs import fitted, is_ascii
from console.widgets.request_card import card, told
from engine.errors import EngineError
from engine.records import RequestDetail
from engine.snapshot import RequestRow

_FRAME_CELLS = 6


class RequestScreen(ConsolePage[None]):
    """row: the request as it was in the table. What was last known of it stays to be read."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x,delete", "cancel", "Cancel", id="request.cancel.this", tooltip="Cancel this request"),
        Binding("escape,q", "dismiss", "Close", id="request.close", tooltip="Close the request", show=False),
    ]

    def __init__(self, row: RequestRow) -> None:
        super().__init__()
        self._row = row
        self._detail: RequestDetail | None = None
        self._looking = False
        self._gone = ""
        self._shown: tuple[Content, Content] | None = None

    def compose(self) -> ComposeResult:
        """One page that scrolls where it is long."""
        with VerticalScroll(classes="dialog request") as page:
            page.border_title = Content(f"Request {self._row.id}")
            yield Static(id="request-card", markup=False)
            yield Static(id="request-text", markup=False)

    def on_mount(self) -> None:
        """Never empty for long."""
        self.refresh_view()

    def on_resize(self) -> None:
        """The chart is drawn to the width."""
        self.call_after_refresh(self._show)

    def refresh_view(self) -> None:
        """Ask how it is now, until it has ended and all of that is known."""
        known = self._detail is not None and self._detail.row.state == "finished"
        if not (known or self._looking or self._gone):
            self._looking = True
            self.run_worker(self._look(), group="look", exit_on_error=False)

    async def _look(self) -> None:
        try:
            self._detail = await self.console.link.requests.detail(self._row.id, self._row.order)
        except EngineError as error:
            self._gone = error.message
        finally:
            self._looking = False
        self._show()

    def _show(self) -> None:
        page, detail = self.query_one(VerticalScroll), self._detail
        if detail is None:
            self.query_one("#request-card", Static).update(self._gone)
            return
        ended = detail.row.state == "finished"
        page.border_subtitle = "it ended; esc closes" if ended else "x cancels it, esc closes"
        width = max(40, page.scrollable_content_region.width or self.app.size.width - _FRAME_CELLS)
        shown = (card(detail, width, ascii_only=is_ascii(self.app)), told(detail))
        before = self._shown
        self._shown = shown
        for at, name in enumerate(("#request-card", "#request-text")):
            if before is None or not shown[at].is_same(before[at]):
                margin = Content("\n") if at else Content("")
                self.query_one(name, Static).update(fitted(self.app, margin + shown[at]))

    def action_cancel(self) -> None:
        """End it, after a question."""
        self.cancel_request(self._row if self._detail is None else self._detail.row)
