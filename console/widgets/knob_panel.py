"""The knobs of the model in view: their values, what holds them back, and how they are turned. All can be clicked."""

from __future__ import annotations

from textual.content import Content
from textual.style import Style
from textual.widget import Widget

from console.in_view import prompts_limit, workers_of
from console.knobs import knob_words
from console.widgets import text
from console.widgets.glyphs import fitted
from engine.snapshot import ModelReading, Snapshot

_NAME = 13
_VALUE = 8


class KnobPanel(Widget):
    """One line for each knob."""

    DEFAULT_CSS = """
    KnobPanel {
        height: 3; width: 1fr;
        link-style: none; link-color: $primary; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._shown = Content("")

    def show(self, snapshot: Snapshot, model: ModelReading | None) -> None:
        """The knobs now; model: the one in view."""
        lines = knob_lines(snapshot, model)
        if not lines.is_same(self._shown):
            self._shown = lines
            self.refresh()

    def render(self) -> Content:
        """Three lines."""
        return fitted(self.app, self._shown)


def knob_lines(snapshot: Snapshot, model: ModelReading | None) -> Content:
    """Workers, max prompts and idle unload: value, keys, and how things stand."""
    idle_s = model.idle_unload_s if model is not None else 0.0
    return Content("\n").join(
        (
            _knob("workers", str(snapshot.target_workers), "app.step('workers', {})", "[ ]", _workers(snapshot)),
            _knob("max prompts", str(snapshot.max_prompts), "app.step('max_prompts', {})", "- +", _prompts(snapshot)),
            _knob("idle unload", knob_words("idle_unload", idle_s), "screen.idle({})", ", .", _idle(idle_s)),
        )
    )


def _knob(name: str, value: str, action: str, keys: str, said: str) -> Content:
    return Content.assemble(
        (f"{name:<{_NAME}}", "$muted"),
        _link(" − ", action.format(-1)),
        (f"{value:^{_VALUE}}", "bold"),
        _link(" + ", action.format(1)),
        (f"  {keys}  ", "$primary"),
        (said, "$muted"),
    )


def _link(said: str, action: str) -> Content:
    return Content.styled(said, "bold $primary").stylize(Style.from_meta({"@click": action}))


def _workers(snapshot: Snapshot) -> str:
    found = workers_of(snapshot)
    ready = sum(worker.state == "ready" for worker in found)
    coming = sum(worker.state in ("starting", "loading", "restarting") for worker in found)
    return f"{ready} ready" + (f", {coming} on the way" if coming else "")


def _prompts(snapshot: Snapshot) -> str:
    found = [worker for worker in workers_of(snapshot) if worker.state == "ready"]
    limit = prompts_limit(snapshot)
    allowed = f"; memory allows {limit}" if limit else ""
    if not found:
        return f"of each worker{allowed}"
    taken, places = sum(worker.active for worker in found), len(found) * (limit or snapshot.max_prompts)
    return f"of each worker; {taken} of {text.plural(places, 'place')} taken{allowed}"


def _idle(seconds: float) -> str:
    if not seconds:
        return "it keeps its memory, asked or not"
    return "without a request, then its memory is freed"
