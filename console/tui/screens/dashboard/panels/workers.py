"""Workers: one row for each copy of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from textual.app import ComposeResult
from textual.content import Content
from textual.message import Message

from console import text
from console.link.status import LinkStatus
from console.text import devices_name
from console.tui.load_pace import LoadPaces, Pace
from console.tui.screens.dashboard.panels import DashboardPanel
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.panel import set_title
from console.tui.widgets.states import is_dead, worker_state
from console.tui.widgets.table import Cell, Column, OpeningTable, Row, Table, cell
from console.tui.widgets.worker_text import failure_text, kv_tokens_text, num_slots, time_left
from engine.snapshot import Snapshot, WorkerReading, WorkerState

_URGENCY: Mapping[WorkerState, int] = MappingProxyType(
    {"failed": 0, "restarting": 1, "loading": 2, "starting": 2, "draining": 3, "stopping": 3, "ready": 4}
)
_ALWAYS_SEEN = 3
_MODEL_CELLS = 8
_OTHER_CELLS = 40


class WorkersPanel(DashboardPanel):
    """The worker table; says what to do where there is none."""

    NAME = "workers"
    TITLE = "Workers"
    PLACE = "left"
    ORDER = 20

    @dataclass
    class Opened(Message):
        """A worker is to be looked at."""

        worker: str

    def __init__(self) -> None:
        super().__init__()
        self._paces = LoadPaces()

    def compose(self) -> ComposeResult:
        """The table alone."""
        yield OpeningTable(columns(()), id="worker-table")

    @property
    def table(self) -> Table:
        """The table."""
        return self.query_one(Table)

    def show(self, view: View) -> None:
        """Show the workers of `view`, with their models where there are several."""
        snapshot = view.snapshot
        workers, several, medium = snapshot.workers, len(snapshot.models) > 1, self.screen.has_class("-medium")
        loads = {worker.id: worker.progress for worker in workers if worker.progress is not None}
        paces = self._paces.observe(snapshot.at, loads)
        rows = [
            worker_row(
                worker, brief=medium and (several or worker.id in paces), model=several, pace=paces.get(worker.id)
            )
            for worker in in_order(workers)
        ]
        shown = columns(workers, room=self.size.width - _OTHER_CELLS if several else None)
        self.table.show(rows, empty=_empty(snapshot, view.link_status), columns=shown)
        awake = [model for model in snapshot.models if model.status.state != "idle"]
        wanted = sum(model.target_workers for model in awake) or snapshot.target_workers
        summary = (f" · {workers_text(workers, wanted)}", "$muted") if workers else ""
        set_title(self, for_terminal(self.app, Content.assemble(self.TITLE, summary)))

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Enter, or two clicks."""
        event.stop()
        self.post_message(self.Opened(event.key))


def in_order(workers: Sequence[WorkerReading]) -> Sequence[WorkerReading]:
    """Those that are not ready first, where there are more than are seen at once."""
    if len(workers) <= _ALWAYS_SEEN:
        return workers
    return sorted(workers, key=lambda worker: (_URGENCY[worker.state], not is_dead(worker)))


def workers_text(workers: Sequence[WorkerReading], wanted: int) -> str:
    """ "61 of 64 ready, 2 loading, 1 dead"."""
    ready = sum(worker.state == "ready" for worker in workers)
    others = Counter(worker_state(worker).word for worker in workers if worker.state != "ready")
    return ", ".join([f"{ready} of {wanted} ready", *(f"{count} {word}" for word, count in others.most_common())])


def columns(workers: tuple[WorkerReading, ...], *, room: int | None = None) -> tuple[Column, ...]:
    """Wide enough for the names of where `workers` are. room: cells that there are for the names of their models, None
    where these are not shown."""
    device = max((len(devices_name(worker.devices)) for worker in workers), default=0)
    return (
        Column("id", max((len(worker.id) for worker in workers), default=2)),
        Column("device", min(15, max(6, device))),
        *((_model_column(workers, room),) if room is not None else ()),
        Column("state", 9, grow=60),
        Column("active", 6, "right"),
        Column("tok/s", 5, "right"),
        Column("KV tokens", 11, "right", drop=2),
        Column("KV", 4, "right", drop=1),
    )


def _model_column(workers: tuple[WorkerReading, ...], room: int) -> Column:
    longest = max((len(worker.model) for worker in workers), default=0)
    return Column("model", max(_MODEL_CELLS, min(longest, room)), grow=16)


def worker_row(worker: WorkerReading, *, brief: bool = False, model: bool = False, pace: Pace | None = None) -> Row:
    """One worker's cells; the state of one that does not serve takes the room of the numbers that it has not.

    brief: a load in per cent instead of phase and bytes.  pace: of its load, where it is measurable.
    """
    pages = worker.stats.pages_total
    usage = 1 - worker.stats.pages_free / pages if pages else None
    cells: tuple[Cell, ...] = (
        cell(worker.id, "bold"),
        cell(devices_name(worker.devices)),
        *((cell(worker.model or "–", "$muted"),) if model else ()),
        _state(worker, brief, pace),
    )
    if worker.state in ("ready", "draining"):
        cells += (
            cell(f"{worker.active}/{num_slots(worker)}"),
            cell(text.rate(worker.tokens_per_s), "bold"),
            cell(kv_tokens_text((worker,))),
            cell(text.percent(usage)),
        )
    return Row(worker.id, cells)


def _state(worker: WorkerReading, brief: bool, pace: Pace | None) -> Cell:
    """Glyph and word, what there is to say about it, and how often it was restarted."""
    state = worker_state(worker)
    pieces = [(f"{state.glyph} {state.word}", state.style)]
    if worker.state == "loading" and worker.progress is not None:
        has_total = worker.progress.total > 0
        done = text.percent(text.fraction(worker.progress)) if brief and has_total else text.progress(worker.progress)
        pieces.append((f" {done}{time_left(pace)}", state.style))
    if failure := failure_text(worker):
        pieces.append((failure, "$foreground"))
    if worker.restarts:
        pieces.append((f" ↻{worker.restarts}", "$worker-failed"))
    return tuple(pieces)


def _empty(snapshot: Snapshot, standing: LinkStatus) -> str:
    status = snapshot.status
    if status.state == "failed" and status.error is not None:
        choose = "" if standing.read_only else " Press 2 to choose another model."
        return f"Loading failed: {text.clip(status.error.message, 300).rstrip('.')}.{choose}"
    if status.state == "loading":
        name = status.spec.name if status.spec is not None else ""
        return f"Loading {name}…" if name else "Loading…"
    if status.state == "idle":
        return "Unloaded while idle; the next request loads the model again."
    if standing.reach == "starting":
        return standing.starting_text
    return "No model loaded." if standing.read_only else "No model loaded. Press 2 to choose one."
