"""The look of states: a glyph and a word besides the colour, so that none is needed alone."""

from __future__ import annotations

from dataclasses import dataclass

from textual.content import Content

from engine.snapshot import ModelState, RequestRow, WorkerReading


@dataclass(frozen=True, slots=True)
class State:
    """style: a CSS variable of the theme."""

    glyph: str
    word: str
    style: str

    @property
    def content(self) -> Content:
        """Glyph and word in the state's colour."""
        return Content.styled(f"{self.glyph} {self.word}", self.style)


_MODEL: dict[ModelState, State] = {
    "unloaded": State("○", "no model", "$worker-draining"),
    "loading": State("◔", "loading", "$worker-loading"),
    "ready": State("●", "ready", "$worker-busy"),
    "idle": State("○", "idle", "$worker-idle"),
    "draining": State("◒", "draining", "$worker-draining"),
    "unloading": State("◒", "unloading", "$worker-draining"),
    "failed": State("✖", "failed", "$worker-failed"),
}
_WORKER = {
    "starting": State("◌", "starting", "$worker-loading"),
    "loading": State("◔", "loading", "$worker-loading"),
    "draining": State("◒", "draining", "$worker-draining"),
    "stopping": State("◌", "stopping", "$worker-draining"),
    "restarting": State("↻", "restarting", "$worker-failed"),
    "failed": State("✖", "failed", "$worker-failed"),
}
_DEAD = State("✖", "dead", "$worker-failed")
_BUSY = State("●", "busy", "$worker-busy")
_IDLE = State("○", "idle", "$worker-idle")
_REQUEST = {
    "queued": State("◌", "queued", "$request-queued"),
    "prefill": State("◔", "prefill", "$request-prefill"),
    "decode": State("●", "decode", "$request-decode"),
}
_FINISH = {
    "stop": State("✓", "done", "$request-done"),
    "length": State("◆", "length", "$request-done"),
    "timeout": State("◇", "timeout", "$request-failed"),
    "cancelled": State("○", "cancelled", "$request-done"),
    "error": State("✖", "error", "$request-failed"),
}


def model_state(state: ModelState) -> State:
    """The model's."""
    return _MODEL[state]


def worker_state(worker: WorkerReading) -> State:
    """A worker's; one that is ready is busy or idle, one that is not tried again is dead."""
    if worker.state == "ready":
        return _BUSY if worker.active else _IDLE
    return _DEAD if is_dead(worker) else _WORKER[worker.state]


def is_dead(worker: WorkerReading) -> bool:
    """Return whether it crashed too often to be restarted; others that failed never got ready."""
    return worker.state == "failed" and worker.last_error is not None and "deaths" in worker.last_error.details


def request_state(row: RequestRow) -> State:
    """A request's, or how it ended."""
    if row.state == "finished":
        return _FINISH[row.finish or "stop"]
    return _REQUEST[row.state]
