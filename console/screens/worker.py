"""One worker, looked at closely while it lives, dies and comes back."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from console.load_pace import LoadPaces
from console.screens.base import ConsolePage
from console.screens.confirm import ConfirmScreen
from console.widgets import text
from console.widgets.glyphs import fitted, is_lettered
from console.widgets.hints import hint
from console.widgets.redraw import entitle
from console.widgets.worker_card import card
from engine.snapshot import LogEntry, WorkerReading

_FRAME_CELLS = 6
_LOG_LINES = 8
_ACTIONS = (("restart", "screen.restart"), ("drain", "screen.drain"), ("close", "screen.dismiss"))


class WorkerScreen(ConsolePage[None]):
    """worker: its id. What was last known of a worker that is gone stays to be read."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "restart", "Restart", id="worker.restart", tooltip="Restart this worker"),
        Binding("d", "drain", "Drain", id="worker.drain", tooltip="Let this worker finish what it has, then go"),
        Binding("escape,q", "dismiss", "Close", id="worker.close", tooltip="Close the worker", show=False),
    ]

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker
        self._shown: Content | None = None
        self._paces = LoadPaces()
        self._logged = 0
        self._log: deque[LogEntry] = deque(maxlen=_LOG_LINES)

    def compose(self) -> ComposeResult:
        """One page that scrolls where it is long."""
        with VerticalScroll(classes="dialog worker") as page:
            entitle(page, f"Worker {self._worker}")
            yield Static(id="card", markup=False)

    def on_mount(self) -> None:
        """Never empty."""
        self.query_one(VerticalScroll).border_subtitle = self._hints(*_ACTIONS)
        self.refresh_view()

    def on_resize(self) -> None:
        """Bars and lines are cut to the width."""
        self.call_after_refresh(self.refresh_view)

    @property
    def reading(self) -> WorkerReading | None:
        """The worker now; None once it is gone."""
        workers = self.console.link.snapshot().workers
        return next((worker for worker in workers if worker.id == self._worker), None)

    def refresh_view(self) -> None:
        """Show the worker as it is now."""
        worker = self.reading
        page = self.query_one(VerticalScroll)
        if worker is None:
            page.border_subtitle = Content.assemble("it is gone  ", self._hints(_ACTIONS[-1]))
            return
        width = max(40, page.scrollable_content_region.width or self.app.size.width - _FRAME_CELLS)
        snapshot = self.console.link.snapshot()
        paces = self._paces.observe(snapshot.at, {worker.id: worker.progress} if worker.progress else {})
        self._read_log()
        shown = card(
            worker, snapshot, width, pace=paces.get(worker.id), log=tuple(self._log), ascii_only=is_lettered(self.app)
        )
        if self._shown is None or not shown.is_same(self._shown):
            self._shown = shown
            self.query_one("#card", Static).update(fitted(self.app, shown))

    def _hints(self, *actions: tuple[str, str]) -> Content:
        return Content("  ").join(hint(self, f"worker.{name}", name, action) for name, action in actions)

    def _read_log(self) -> None:
        """What was logged of the worker since the last time."""
        self._logged, lines = self.console.link.logs(self._logged)
        self._log.extend(line for line in lines if line.source == self._worker)

    def action_restart(self) -> None:
        """Start it again; ask first where requests would have to move."""
        worker = self.reading
        if worker is None:
            self.notify(f"{self._worker} is gone.", severity="warning", markup=False)
        elif worker.active:
            works = f"{worker.id} works on {text.plural(worker.active, 'request')}."
            moved = "They go on where they are, on another worker or on this one when it is back. Restart it?"
            question = ConfirmScreen(works, moved, yes="Restart", no="Leave it")
            self.app.push_screen(question, lambda yes: self._restart() if yes else None)
        else:
            self._restart()

    def _restart(self) -> None:
        self.console.perform(self.console.link.restart_worker(self._worker), done=f"{self._worker} is started again")

    def action_drain(self) -> None:
        """Let it finish and go; ask first: there is one worker less then."""
        worker = self.reading
        if worker is None:
            self.notify(f"{self._worker} is gone.", severity="warning", markup=False)
        elif worker.state in ("draining", "stopping"):
            self.notify(f"{worker.id} is on its way out already.", markup=False)
        else:
            works = f" finishes {text.plural(worker.active, 'request')}," if worker.active else ""
            question = ConfirmScreen(
                f"Drain {worker.id}?",
                f"It{works} takes nothing new and goes: one worker less.",
                yes="Drain",
                no="Keep it",
            )
            self.app.push_screen(question, lambda yes: self._drain() if yes else None)

    def _drain(self) -> None:
        self.console.perform(self.console.link.drain_worker(self._worker), done=f"{self._worker} is drained, then goes")
