"""The models that the engine holds: how each is doing and what it takes; one that loads shows its phases."""

from __future__ import annotations

from collections.abc import Iterator

from textual.content import Content
from textual.widgets import Static

from console.in_view import first, workers_of
from console.widgets import text
from console.widgets.glyphs import fitted
from console.widgets.load_phases import phase_lines
from console.widgets.names import device_name, devices_name
from console.widgets.placement import devices_of, difference
from console.widgets.states import model_state, worker_state
from engine.backends.base import LoadedModel
from engine.snapshot import AdapterReading, ModelReading, ModelStatus, Snapshot, WorkerReading

_LABEL = 10


class ModelLoad(Static):
    """A block for each model; a line for each phase of one that loads."""

    DEFAULT_CSS = """
    ModelLoad { height: auto; min-height: 8; }
    """

    def __init__(self) -> None:
        super().__init__("", classes="panel", markup=False)
        self.border_title = "Engine"

    def show(self, snapshot: Snapshot) -> None:
        """Draw anew."""
        self.update(fitted(self.app, describe(snapshot)))


def describe(snapshot: Snapshot) -> Content:
    """All models held; where there is none, what to do, or how the first one fares."""
    models = snapshot.models or _only(snapshot)
    if not models:
        return Content("\n").join(_without_a_model(snapshot.status))
    here = first(snapshot) if snapshot.models else models[0]
    loads = len(models) > 1 and any(model.status.state == "loading" for model in models)
    blocks = [
        _block(model, snapshot, mark=_mark(model is here) if len(models) > 1 else "", full=model is here and not loads)
        for model in models
    ]
    return Content("\n\n" if len(models) > 1 else "\n").join(Content("\n").join(lines) for lines in blocks)


def _only(snapshot: Snapshot) -> tuple[ModelReading, ...]:
    """The one model of a snapshot that lists none."""
    status = snapshot.status
    if status.spec is None or status.state == "unloaded":
        return ()
    return (
        ModelReading(
            key="",
            name=status.spec.name,
            status=status,
            target_workers=snapshot.target_workers,
            max_prompts=snapshot.max_prompts,
            queued=snapshot.queued,
            running=snapshot.running,
        ),
    )


def _without_a_model(status: ModelStatus) -> Iterator[Content]:
    yield model_state(status.state).content
    if status.state == "loading":
        yield from phase_lines(status.progress)
        yield Content.styled("c cancels", "$muted")
    elif status.error is not None:
        yield Content.styled(status.error.message, "$error")
    else:
        yield Content.styled("Choose a model and press Enter.", "$muted")


def _mark(in_view: bool) -> str:
    return "▸ " if in_view else "  "


def _block(model: ModelReading, snapshot: Snapshot, *, mark: str, full: bool) -> list[Content]:
    """mark: before its state. full: say more than what changes."""
    status = model.status
    lines = [
        Content.assemble(
            (mark, "$primary"),
            model_state(status.state).content,
            (f"  {model.name}", "bold $foreground"),
            _shape(model),
        )
    ]
    if status.state == "loading":
        workers = [worker for worker in snapshot.workers if worker.model in ("", model.name)]
        lines += phase_lines(status.progress)
        lines += [_worker(worker) for worker in workers if len(workers) > 1]
        lines.append(Content.styled("c cancels", "$muted"))
    elif status.state == "failed":
        lines += [Content.styled(status.error.message, "$error")] if status.error is not None else []
    else:
        lines += _rows(model, snapshot, full=full)
    return lines


def _shape(model: ModelReading) -> Content:
    if model.status.state in ("loading", "failed"):
        return Content("")
    return Content.styled(f"  {model.target_workers} × {text.plural(model.max_prompts, 'prompt')}", "$muted")


def _span(time_s: float) -> str:
    return f"{time_s / 60:g} min" if time_s >= 60 else f"{time_s:g} s"


def _worker(worker: WorkerReading) -> Content:
    progress = f"  {text.progress(worker.progress)}" if worker.progress else ""
    return Content.assemble(f"{worker.id} ", worker_state(worker).content, (progress, "$muted"))


def _rows(model: ModelReading, snapshot: Snapshot, *, full: bool) -> Iterator[Content]:
    yield _row("requests", Content(f"{model.running} running, {model.queued} queued"))
    if model.status.state == "idle":
        yield _row("idle", Content("loads again with the next request"))
    elif model.idle_unload_s > 0:
        yield _row("idle", Content(f"unloads after {_span(model.idle_unload_s)} without requests"))
    if full and model.status.model is not None:
        yield from (_row(label, Content(value)) for label, value in _facts(model.status.model, snapshot))
    if model.status.state != "idle":
        for device in devices_of(model.planned, model.used):
            yield _row(device_name(device), difference(model.planned, model.used, device))
    yield from (_row("adapter", _adapter(adapter, model)) for adapter in model.adapters)
    if full and model.status.state in ("ready", "idle"):
        yield Content.styled("u unloads, d shows adapters", "$muted")


def _row(label: str, value: Content) -> Content:
    return Content.assemble((f"{label:<{max(_LABEL, len(label) + 1)}}", "$muted"), value)


def _adapter(adapter: AdapterReading, model: ModelReading) -> Content:
    if adapter.error is not None:
        return Content.styled(f"✖ {adapter.name}: {adapter.error.message}", "$error")
    size = f", {text.size(adapter.size_bytes)}" if adapter.size_bytes else ""
    on = f" on {adapter.workers} of {text.plural(model.target_workers, 'worker')}{size}"
    return Content.assemble(("✓ ", "$success"), adapter.name, (on, "$muted"))


def _facts(model: LoadedModel, snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    yield "backend", f"{model.backend}, {text.dtype(model.dtype)}, on {devices_name(model.devices)}"
    if model.attention:
        yield "attention", f"{model.attention}: {model.attention_reason}"
    yield "weights", f"{text.size(model.weights_bytes)} a worker, {text.count(model.parameters)} parameters"
    yield "KV pages", f"{text.size(model.kv_bytes)} a worker, {model.kv_tokens:,} tokens"
    yield "context", f"{model.max_model_len:,} tokens, {model.page_tokens} a page"
    loaded = next((worker.load_s for worker in workers_of(snapshot) if worker.load_s), None)
    if loaded is not None:
        yield "loaded", f"in {text.seconds(loaded)}"
