"""Session: what the engine has done since it started, and which model it does it with."""

from __future__ import annotations

from collections.abc import Iterator

from textual.content import Content
from textual.events import MouseMove

from console import text
from console.tui.screens.dashboard.panels import RowsPanel
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal, is_lettered
from console.tui.widgets.latency import (
    CAUSE_META,
    advice_lines,
    cause_bar,
    cause_list,
    cause_text,
    latency_breakdown,
    room_of,
)
from console.tui.widgets.panel import set_subtitle
from engine.requests.causes import Cause, Why
from engine.snapshot import Session, Snapshot, Totals

_NAME_CELLS = 10

_LEADING_ROWS = 2
"""Facts before what the time of requests went into, as far as that fits below them."""


class SessionPanel(RowsPanel):
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
        self._view: View | None = None
        self._cause: Cause | None = None

    def on_resize(self) -> None:
        """Lines are cut to the width."""
        if self._view is not None:
            self.show(self._view)

    def on_mouse_move(self, event: MouseMove) -> None:
        """Name the cause under the mouse, in the frame."""
        self._point(event.style.meta.get(CAUSE_META))

    def on_leave(self) -> None:
        """No cause is under the mouse."""
        self._point(None)

    def _point(self, cause: Cause | None) -> None:
        if cause != self._cause and self._view is not None:
            self._cause = cause
            self.show(self._view)

    def show(self, view: View) -> None:
        """Draw the lines that changed."""
        self._view = view
        lines = [
            Content.assemble((f"{name:<{_NAME_CELLS}}", "$muted"), value)
            for name, value in session_facts(view.snapshot)
        ]
        time = self._time(view.snapshot.why)
        before_time = max(0, min(_LEADING_ROWS, self.size.height - len(time)))
        lines[before_time:before_time] = time
        for more in (self._causes(view.snapshot.why), list(self._latency(view.snapshot))):
            if len(lines) + len(more) <= self.size.height:
                lines += more
        self.show_rows([for_terminal(self.app, line) for line in lines])
        set_subtitle(self, cause_text(view.snapshot.why, self._cause))

    def _time(self, why: Why) -> list[Content]:
        """The time of requests as a bar, and what to change; nothing while there were none."""
        if not why.causes:
            return []
        advice = advice_lines(why, self.size.width)
        if len(advice) >= self.size.height > 0:
            return advice
        bar = cause_bar(why, max(0, self.size.width - _NAME_CELLS), lettered=is_lettered(self.app))
        return [_named("time", bar), *advice]

    def _causes(self, why: Why) -> list[Content]:
        """The causes of the time of requests, beneath an empty row."""
        lines = list(cause_list(why, lettered=is_lettered(self.app)))
        return [Content(), Content.styled("Time of requests, last minute", "bold $primary"), *lines] if lines else []

    def _latency(self, snapshot: Snapshot) -> Iterator[Content]:
        """Queue, prefill and decode, beneath an empty row; nothing while no answer has ended."""
        insight = snapshot.insight
        if any(spread.count for spread in (insight.queue, insight.prefill, insight.decode)):
            yield Content()
            yield from latency_breakdown(snapshot, room_of(self.app, self.size.width))


def _named(name: str, value: Content) -> Content:
    return Content.assemble((f"{name:<{_NAME_CELLS}}", "$muted"), value)


def session_facts(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Name and value of each line."""
    totals, model = snapshot.totals, snapshot.status.model
    yield "requests", " · ".join(_requests(snapshot))
    yield "errors", " · ".join(_errors(totals)) or "none"
    tokens = (totals.output_tokens, "out"), (totals.prompt_tokens, "in"), (totals.cached_tokens, "cached")
    yield "tokens", " · ".join(f"{text.count(number)} {word}" for number, word in tokens)
    if snapshot.insight.session.busy_s > 0:
        yield "busy", _busy(snapshot.insight.session)
    yield "up", _uptime(snapshot.uptime_s)
    if energy := " · ".join(_energy(snapshot)):
        yield "energy", energy
    if model is not None:
        yield "model", f"{text.count(model.parameters)} parameters · {text.architecture(model.architecture)}"
        yield (
            "context",
            f"{model.max_model_len:,} tokens · KV cache {model.kv_tokens:,} in pages of {model.page_tokens}",
        )
        attention = f" · {model.attention} attention" if model.attention else ""
        yield "backend", f"{model.backend} · {model.dtype} · {text.size(model.weights_bytes)} weights{attention}"
    if totals.draft_tokens:
        accepted = text.percent(totals.draft_accepted / totals.draft_tokens)
        yield "drafts", f"{totals.draft_tokens:,} draft tokens · {accepted} accepted"


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
        (totals.requeued, "requeued"),
        (totals.preemptions, "preempted"),
    ):
        if number:
            yield f"{number:,} {word}"
    if totals.worker_restarts:
        yield f"{text.plural(totals.worker_restarts, 'worker')} restarted"


def _busy(session: Session) -> str:
    """Share of the time in which a worker computed, and how fast that went."""
    rates = (session.output_tokens / session.busy_s, session.prompt_tokens / session.busy_s)
    speed = f"{text.rate(rates[0])} tok/s generated, {text.rate(rates[1])} prefilled"
    batch = "" if session.batch is None else f" · average batch {text.three_digits(session.batch)}"
    share = text.percent(session.busy_s / max(session.elapsed_s, session.busy_s))
    return f"{share} · {speed}{batch}"


def _energy(snapshot: Snapshot) -> Iterator[str]:
    """Power now, what a token takes, and today's energy with its cost; nothing where no device reports power."""
    seen, session = snapshot.insight.energy, snapshot.insight.session
    if seen.power_w is not None:
        yield f"{seen.power_w:,.0f} W"
    if seen.session_joules and session.output_tokens:
        yield f"{text.three_digits(seen.busy_joules / session.output_tokens)} J/token while busy"
    if seen.session_joules or seen.today_joules:
        money = "" if seen.rate_per_kwh is None else text.cost(seen.today_joules, seen.rate_per_kwh, seen.currency)
        yield f"today {text.energy(seen.today_joules)}" + (f", {money}" if money else "")


def _uptime(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours}:{minutes:02d}:{rest:02d}" if days else f"{hours}:{minutes:02d}:{rest:02d}"
