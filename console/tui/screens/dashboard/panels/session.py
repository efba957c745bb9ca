"""Session: what the engine has done since it started, and which model it does it with."""

from __future__ import annotations

from collections.abc import Iterator

from textual.content import Content

from console import text
from console.tui.screens.dashboard.panels import DashboardPanel
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.panel import refresh_rows
from engine.snapshot import Snapshot, Totals


class SessionPanel(DashboardPanel):
    """As many lines as there is room for, the most important first."""

    NAME = "session"
    TITLE = "Session"
    PLACE = "left"
    ORDER = 30

    DEFAULT_CSS = """
    SessionPanel { height: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Content] = []

    def show(self, view: View) -> None:
        """Draw the lines that changed."""
        before = self._lines
        self._lines = [
            for_terminal(self.app, Content.assemble((f"{name:<10}", "$muted"), value))
            for name, value in session_facts(view.snapshot)
        ]
        refresh_rows(self, before, self._lines)

    def render(self) -> Content:
        """Name and number, two columns."""
        return Content("\n").join(self._lines[: max(1, self.size.height)])


def session_facts(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Name and value of each line."""
    totals, model = snapshot.totals, snapshot.status.model
    yield "up", _uptime(snapshot.uptime_s)
    yield "requests", " · ".join(_requests(snapshot))
    tokens = (totals.output_tokens, "out"), (totals.prompt_tokens, "in"), (totals.cached_tokens, "cached")
    yield "tokens", " · ".join(f"{text.count(number)} {word}" for number, word in tokens)
    yield "errors", " · ".join(_errors(totals)) or "none"
    if model is not None:
        yield "model", f"{text.count(model.parameters)} parameters · {model.architecture}"
        yield "context", f"{model.max_model_len:,} tokens · {model.kv_tokens:,} in KV pages of {model.page_tokens}"
        attention = f" · {model.attention} attention" if model.attention else ""
        yield "backend", f"{model.backend} · {model.dtype} · {text.size(model.weights_bytes)} weights{attention}"
    if totals.draft_tokens:
        accepted = text.percent(totals.draft_accepted / totals.draft_tokens)
        yield "drafts", f"{totals.draft_tokens:,} tokens drafted · {accepted} accepted"


def _requests(snapshot: Snapshot) -> Iterator[str]:
    """Those that ended and how, then those that live."""
    finished = snapshot.totals.finished
    ended = ", ".join(f"{count:,} {reason}" for reason, count in sorted(finished.items()) if count)
    yield f"{sum(finished.values()):,} done" + (f" ({ended})" if ended else "")
    for number, word in ((snapshot.running, "running"), (snapshot.queued, "queued")):
        if number:
            yield f"{number:,} {word}"


def _errors(totals: Totals) -> Iterator[str]:
    """Requests that got less than they asked for, then what the engine had to do over."""
    for number, word in (
        (totals.finished.get("error", 0), "failed"),
        (totals.finished.get("timeout", 0), "timed out"),
        (totals.finished.get("cancelled", 0), "cancelled"),
        (totals.rejected, "rejected"),
        (totals.requeued, "moved"),
        (totals.preemptions, "preempted"),
        (totals.worker_restarts, "workers restarted"),
    ):
        if number:
            yield f"{number:,} {word}"


def _uptime(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours}:{minutes:02d}:{rest:02d}" if days else f"{hours}:{minutes:02d}:{rest:02d}"
