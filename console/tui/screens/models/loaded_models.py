"""The loaded models: how each is doing and what it takes; one that loads shows its phases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from textual.content import Content
from textual.widgets import Static

from console import text
from console.link.protocol import Fetching
from console.text import device_name, devices_name, places_name
from console.tui.load_pace import LoadPaces, Pace
from console.tui.view import default_model
from console.tui.widgets.clickable import clickable
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.states import model_state, worker_state
from console.tui.widgets.worker_text import (
    current_phase,
    device_bytes,
    devices_of,
    difference,
    pace_text,
    phase_lines,
    tier_text,
)
from engine.backends.base import LoadedModel, LoadProgress
from engine.snapshot import AdapterReading, ModelReading, ModelStatus, Snapshot, WorkerReading

_LABEL = 10
_MAX_WORKERS = 8
_CANCEL = clickable("c cancels", "screen.cancel_load")

_KEYS = Content.assemble(
    clickable("u unloads", "screen.unload"), ", ", clickable("d shows adapters", "screen.adapters")
)


class ModelLoad(Static):
    """A block for each model; a line for each phase of one that loads."""

    DEFAULT_CSS = """
    ModelLoad {
        height: auto; min-height: 8;
        link-style: none; link-color: $primary; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    """

    def __init__(self) -> None:
        super().__init__("", classes="panel", markup=False)
        self.border_title = "Engine"
        self._paces = LoadPaces()
        self._shown = Content("")

    def show(
        self, snapshot: Snapshot, fetching: Fetching | None = None, *, read_only: bool = False, starting: str = ""
    ) -> None:
        """Redraw what has changed. fetching: a download under way. read_only: without keys that change the engine.
        starting: what is said while the engine starts, else ""."""
        paces = self._paces.observe(snapshot.at, _under_way(snapshot, fetching))
        content = loaded_models_text(snapshot, fetching, paces, read_only=read_only, starting=starting)
        shown = for_terminal(self.app, content)
        if not shown.is_same(self._shown):
            self._shown = shown
            self.update(shown)


def _under_way(snapshot: Snapshot, fetching: Fetching | None) -> dict[str, LoadProgress]:
    """Everything that loads: models by name, workers by id, the download as "download"."""
    models = {model.name: model.status.progress for model in snapshot.models or _only(snapshot)}
    workers = {worker.id: worker.progress for worker in snapshot.workers}
    download = fetching.progress if fetching is not None else None
    found = {**models, **workers, "download": download}
    return {key: progress for key, progress in found.items() if progress is not None}


def loaded_models_text(
    snapshot: Snapshot,
    fetching: Fetching | None = None,
    paces: Mapping[str, Pace] = {},
    *,
    read_only: bool = False,
    starting: str = "",
) -> Content:
    """All models held, and the download; where there is none, what to do, or how the first one fares.

    paces: of models by name, of workers by id, of the download as "download". read_only: without keys that change the
    engine. starting: what is said while the engine starts, else "".
    """
    models = snapshot.models or _only(snapshot)
    blocks = [] if fetching is None else [_download(fetching, paces.get("download"), read_only=read_only)]
    if not models and fetching is None:
        blocks = [list(_without_a_model(snapshot.status, read_only=read_only, starting=starting))]
    here = default_model(snapshot) if snapshot.models else next(iter(models), None)
    loads = len(models) > 1 and any(model.status.state == "loading" for model in models)
    for model in models:
        mark = _mark(model is here) if len(models) > 1 else ""
        full = model is here and not loads
        blocks.append(_block(model, snapshot, paces, mark=mark, full=full, read_only=read_only))
    return Content("\n\n").join(Content("\n").join(lines) for lines in blocks)


def _download(fetching: Fetching, pace: Pace | None, *, read_only: bool) -> list[Content]:
    asking = fetching.progress.total <= 0
    return [
        Content.assemble(("◔ downloading", "$worker-loading"), (f"  {fetching.model}", "bold $foreground")),
        *([Content.styled("Fetching the file list…", "$muted")] if asking else current_phase(fetching.progress, pace)),
        *([] if read_only else [Content.assemble(_CANCEL, ("; the downloaded part is kept", "$muted"))]),
    ]


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


def _without_a_model(status: ModelStatus, *, read_only: bool, starting: str) -> Iterator[Content]:
    if starting:
        yield Content.styled(f"◌ {starting}", "$muted")
        return
    yield model_state(status.state).content
    if status.state == "loading":
        yield from phase_lines(status.progress)
        yield from () if read_only else (_CANCEL,)
    elif status.error is not None:
        yield Content.styled(status.error.message, "$error")
    elif not read_only:
        yield Content.styled("Choose a model and press Enter.", "$muted")


def _mark(in_view: bool) -> str:
    return "▸ " if in_view else "  "


def _block(
    model: ModelReading, snapshot: Snapshot, paces: Mapping[str, Pace], *, mark: str, full: bool, read_only: bool
) -> list[Content]:
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
        if model.plan is not None and (planned := text.load_plan(model.plan, model.waiting, snapshot.at)):
            lines.append(Content.styled(planned[:1].upper() + planned[1:], "$muted"))
        lines += phase_lines(status.progress, paces.get(model.name))
        lines += _workers(workers if len(workers) > 1 else [], paces)
        lines += [] if read_only else [_CANCEL]
    elif status.state == "failed":
        lines += [Content.styled(status.error.message, "$error")] if status.error is not None else []
    else:
        lines += _rows(model, snapshot, full=full)
        coming = [worker for worker in snapshot.workers if worker.model in ("", model.name) and worker.progress]
        lines += _workers(coming if full else [], paces)
        if full and status.state in ("ready", "idle") and not read_only:
            lines.append(_KEYS)
    return lines


def _shape(model: ModelReading) -> Content:
    if model.status.state in ("loading", "failed"):
        return Content("")
    return Content.styled(f"  {model.target_workers} × {text.plural(model.max_prompts, 'prompt')}", "$muted")


def _span(time_s: float) -> str:
    return f"{time_s / 60:g} min" if time_s >= 60 else f"{time_s:g} s"


def _workers(workers: Sequence[WorkerReading], paces: Mapping[str, Pace]) -> Iterator[Content]:
    """A line for each of the first ones; how many more there are."""
    yield from (_worker(worker, paces.get(worker.id)) for worker in workers[:_MAX_WORKERS])
    if len(workers) > _MAX_WORKERS:
        yield Content.styled(f"and {text.plural(len(workers) - _MAX_WORKERS, 'more worker')}", "$muted")


def _worker(worker: WorkerReading, pace: Pace | None) -> Content:
    """Its state, its phase and how fast that goes."""
    parts = []
    if worker.progress is not None:
        parts = [text.progress(worker.progress), pace_text(worker.progress, pace)]
    return Content.assemble(
        f"{worker.id} ", worker_state(worker).content, ("  " + ", ".join(word for word in parts if word), "$muted")
    )


def _rows(model: ModelReading, snapshot: Snapshot, *, full: bool) -> Iterator[Content]:
    yield _row("requests", Content(f"{model.running} running, {model.queued} queued"))
    if model.status.state == "idle":
        yield _row("idle", Content("the next request reloads it"))
    elif model.idle_unload_s > 0:
        yield _row("idle", Content(f"unloads after {_span(model.idle_unload_s)} without requests"))
    workers = [worker for worker in snapshot.workers if worker.model in ("", model.name)]
    if full and model.status.model is not None:
        yield from (_row(label, value) for label, value in _facts(model.status.model, workers))
    if model.status.state != "idle":
        yield from _memory(model, workers)
    yield from (_row("adapter", _adapter(adapter, model)) for adapter in model.adapters)


def _memory(model: ModelReading, workers: Sequence[WorkerReading]) -> Iterator[Content]:
    """Yield, for each device, the memory of the largest worker on it: a sum would count twice what they share."""
    readings = [(worker.planned, worker.used) for worker in workers if worker.planned or worker.used]
    readings = readings or [(model.planned, model.used)]
    for device in devices_of(*(shares for both in readings for shares in both)):
        here = [both for both in readings if device in devices_of(*both)]
        planned, used = max(here, key=lambda both: device_bytes(device, both[1] or both[0]))
        many = f" · largest of {len(here)} workers" if len(here) > 1 else ""
        yield _row(device_name(device), Content.assemble(difference(planned, used, device), (many, "$muted")))


def _row(label: str, value: str | Content) -> Content:
    return Content.assemble((f"{label:<{max(_LABEL, len(label) + 1)}}", "$muted"), value)


def _adapter(adapter: AdapterReading, model: ModelReading) -> Content:
    if adapter.error is not None:
        return Content.styled(f"✖ {adapter.name}: {adapter.error.message}", "$error")
    size = f", {text.size(adapter.size_bytes)}" if adapter.size_bytes else ""
    on = f" on {adapter.workers} of {text.plural(model.target_workers, 'worker')}{size}"
    return Content.assemble(("✓ ", "$success"), adapter.name, (on, "$muted"))


def _facts(model: LoadedModel, workers: Sequence[WorkerReading]) -> Iterator[tuple[str, str | Content]]:
    places = [worker.devices for worker in workers if worker.devices] or [model.devices]
    where = places_name(places) if len(set(places)) > 1 else f"on {devices_name(places[0])}"
    yield "backend", f"{model.backend}, {text.dtype(model.dtype)}, {where}"
    if model.attention:
        yield "attention", f"{model.attention} ({model.attention_reason})"
    yield "weights", f"{text.size(model.weights_bytes)} per worker"
    yield "KV cache", f"{text.size(model.kv_bytes)} for {model.kv_tokens:,} tokens"
    for tier in next((worker.stats.kv_tiers for worker in workers if worker.stats.kv_tiers), ()):
        counted = [each for worker in workers for each in worker.stats.kv_tiers if each.name == tier.name]
        restored = sum(each.restored_pages for each in counted)
        yield f"KV {tier.name}", tier_text(tier)
        yield "", f"{text.plural(restored, 'page')} read back"
    yield "context", f"{model.max_model_len:,} tokens, {model.page_tokens} per page"
    loaded = next((worker.load_s for worker in workers if worker.load_s), None)
    if loaded is not None:
        yield "loaded", f"in {text.seconds(loaded)}"
