"""Workers: one row for each copy of the model."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical

from console.widgets import text
from console.widgets.states import worker_state
from console.widgets.table import Cell, Column, Row, Table, cell
from engine.snapshot import Snapshot, WorkerReading

_COLUMNS = (
    Column("id", 3),
    Column("state", 13, grow=60),
    Column("device", 6),
    Column("active", 6, "right"),
    Column("tok/s", 5, "right"),
    Column("KV", 4, "right"),
)


class WorkersPanel(Vertical):
    """The worker table; says what to do where there is none."""

    DEFAULT_CSS = """
    WorkersPanel { height: 1fr; width: 1fr; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, classes="panel")
        self.border_title = "Workers"

    def compose(self) -> ComposeResult:
        """The table alone."""
        yield Table(_COLUMNS, id="worker-table")

    def show(self, snapshot: Snapshot) -> None:
        """The workers now."""
        table = self.query_one(Table)
        brief = self.screen.has_class("-medium")
        table.show([worker_row(worker, brief=brief) for worker in snapshot.workers], empty=_empty(snapshot))
        ready = sum(worker.state == "ready" for worker in snapshot.workers)
        self.border_subtitle = f"{ready} of {snapshot.target_workers} ready" if snapshot.workers else ""


def worker_row(worker: WorkerReading, *, brief: bool = False) -> Row:
    """One worker's cells; `brief`: a load in per cent instead of phase and bytes."""
    serving = worker.state in ("ready", "draining")
    pages = worker.stats.pages_total
    usage = 1 - worker.stats.pages_free / pages if pages else None
    devices = ",".join(device.replace("cuda:", "GPU").replace("cpu", "CPU") for device in worker.devices)
    cells: tuple[Cell, ...] = (
        cell(worker.id, "bold"),
        _state(worker, brief),
        cell(devices or "–"),
        cell(f"{worker.active}/{worker.max_prompts}" if serving else "–"),
        cell(text.rate(worker.tokens_per_s) if serving else "–", "bold"),
        cell(text.percent(usage) if serving else "–"),
    )
    return Row(worker.id, cells)


def _state(worker: WorkerReading, brief: bool) -> Cell:
    """Glyph and word, what there is to say about it, and how often it was restarted."""
    state = worker_state(worker)
    pieces = [(f"{state.glyph} {state.word}", state.style)]
    if worker.state == "loading" and worker.progress is not None:
        done = text.percent(text.fraction(worker.progress)) if brief else text.progress(worker.progress)
        pieces.append((f" {done}", state.style))
    if worker.state in ("failed", "restarting") and worker.last_error is not None:
        pieces.append((f" {text.clip(worker.last_error.message, 120)}", "$muted"))
    if worker.restarts:
        pieces.append((f" ↻{worker.restarts}", "$worker-failed"))
    return tuple(pieces)


def _empty(snapshot: Snapshot) -> str:
    status = snapshot.status
    if status.state == "failed" and status.error is not None:
        return f"Loading failed: {text.clip(status.error.message, 300).rstrip('.')}. Press 2 to choose another model."
    if status.state == "loading":
        return "Starting …"
    return "No model loaded. Press 2 to choose one."
