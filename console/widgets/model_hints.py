"""What the engine holds of the models found, and what the keys would do with the selected one."""

from __future__ import annotations

from textual.content import Content

from console.in_view import first
from console.widgets.clicks import clickable
from engine.models.catalog import ModelEntry
from engine.snapshot import ModelReading, ModelStatus, Snapshot


def held(snapshot: Snapshot) -> list[ModelStatus]:
    """The models that are there, or on their way."""
    found = [model.status for model in snapshot.models] or [snapshot.status]
    return [status for status in found if status.spec is not None and status.state not in ("unloaded", "failed")]


def is_of(status: ModelStatus, entry: ModelEntry) -> bool:
    """Whether it is the one of that folder."""
    return status.spec is not None and status.spec.path == entry.path


def unfinished_of(model: ModelReading | None, snapshot: Snapshot) -> int:
    """Requests on a model, the only one where none is listed."""
    counted = model if model is not None else snapshot
    return counted.running + counted.queued


def is_broken(entry: ModelEntry) -> bool:
    """Whether it cannot be loaded, whatever is done here."""
    return bool(entry.problem) and not entry.unfinished


def hint(snapshot: Snapshot, entry: ModelEntry, *, read_only: bool = False) -> Content:
    """What the keys do with the selected model; each can be clicked. read_only: nothing is loaded from here."""
    marks = (clickable("space marks", "screen.mark"), clickable("v compares", "screen.compare"))
    if read_only or is_broken(entry):
        return Content(", ").join(marks)
    there = held(snapshot)
    load = "Enter goes on with its download" if entry.unfinished else "Enter loads it"
    words = [clickable(load, "screen.load_model(False)")]
    if there:
        model = first(snapshot)
        spec = model.status.spec if model is not None else there[0].spec
        replaced = spec.name if spec is not None else "the model"
        words = [
            clickable(f"{load} in place of {replaced}", "screen.load_model(False)"),
            clickable("b beside it", "screen.load_model(True)"),
        ]
    more = (
        clickable("e sets values", "screen.edit"),
        clickable("R resets", "screen.forget"),
        *marks,
    )
    return Content("\n").join((Content(", ").join(words), Content(", ").join(more)))
