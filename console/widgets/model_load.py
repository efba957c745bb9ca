"""A load as it goes: phase by phase, with bytes, for the model and for each worker."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from console.widgets import text
from console.widgets.glyphs import is_ascii, to_ascii
from console.widgets.load_phases import phase_lines
from console.widgets.states import model_state, worker_state
from engine.backends.base import LoadedModel
from engine.snapshot import ModelStatus, Snapshot, WorkerReading


class ModelLoad(Static):
    """The model's state; while it loads, a line for each phase."""

    DEFAULT_CSS = """
    ModelLoad { height: auto; min-height: 8; }
    """

    def __init__(self) -> None:
        super().__init__("", classes="panel", markup=False)
        self.border_title = "Engine"

    def show(self, snapshot: Snapshot) -> None:
        """Draw anew."""
        content = describe(snapshot)
        self.update(Content(to_ascii(content.plain)) if is_ascii(self.app) else content)


def describe(snapshot: Snapshot) -> Content:
    """State, then phases, facts or the reason of a failure."""
    status = snapshot.status
    name = status.spec.name if status.spec else ""
    lines = [Content.assemble(model_state(status.state).content, (f"  {name}", "bold $foreground"))]
    if status.state == "loading":
        lines += phase_lines(status.progress)
        lines += [_worker(worker) for worker in snapshot.workers if len(snapshot.workers) > 1]
        lines.append(Content.styled("c cancels", "$muted"))
    elif status.state == "failed" and status.error is not None:
        lines.append(Content.styled(status.error.message, "$error"))
    elif status.model is not None:
        lines += _facts(status.model, status, snapshot)
    elif status.state == "unloaded":
        lines.append(Content.styled("Choose a model and press Enter.", "$muted"))
    return Content("\n").join(lines)


def _worker(worker: WorkerReading) -> Content:
    progress = f"  {text.progress(worker.progress)}" if worker.progress else ""
    return Content.assemble(f"{worker.id} ", worker_state(worker).content, (progress, "$muted"))


def _facts(model: LoadedModel, status: ModelStatus, snapshot: Snapshot) -> list[Content]:
    rows = [
        ("backend", f"{model.backend}, {text.dtype(model.dtype)}, on {', '.join(model.devices)}"),
        ("weights", f"{text.size(model.weights_bytes)} per worker, {model.parameters / 1e6:,.0f} M parameters"),
        (
            "KV pages",
            f"{text.size(model.kv_bytes)} per worker: {model.kv_tokens} tokens in pages of {model.page_tokens}",
        ),
        ("context", f"{model.max_model_len} tokens"),
        ("workers", f"{len(snapshot.workers)} × {snapshot.max_prompts} prompts"),
    ]
    if model.attention:
        rows.insert(1, ("attention", f"{model.attention}: {model.attention_reason}"))
    loaded = next((worker.load_s for worker in snapshot.workers if worker.load_s), None)
    if loaded is not None:
        rows.append(("loaded", f"in {text.seconds(loaded)}"))
    lines = [Content.assemble((f"{label:<10}", "$muted"), value) for label, value in rows]
    return [*lines, Content.styled("u unloads", "$muted")] if status.state == "ready" else lines
