"""One worker, looked at closely while it lives, dies and comes back."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from console import text
from console.text import device_name, devices_name, local_time
from console.tui.keymap import ConsoleBinding
from console.tui.load_pace import LoadPaces, Pace
from console.tui.screens.base import Dialog
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal, is_lettered
from console.tui.widgets.latency import cause_lines
from console.tui.widgets.panel import after_layout, set_title
from console.tui.widgets.states import worker_state
from console.tui.widgets.worker_text import failure_text, num_slots, phase_lines, placement_map, tier_text
from engine.config import DeviceShare
from engine.snapshot import LogEntry, Snapshot, WorkerReading

# Everything about one worker, as lines: state, placement, load, work, crashes and its last log lines.

_LABEL = 12
_VALUE = 38
_CLOCK = 9
_STEP_OLD_S = 5.0


def worker_card(
    worker: WorkerReading,
    snapshot: Snapshot,
    width: int,
    *,
    pace: Pace | None = None,
    log: Sequence[LogEntry] = (),
    ascii_only: bool = False,
) -> Content:
    """Return the card in `width` cells. pace: of its load, where it is measurable.  log: its last lines."""
    words = _last_words(worker, width)
    down = worker.state in ("restarting", "failed")
    sections = (
        [_headline(worker, width)],
        words if down else [],
        _load(worker, pace),
        _placement(worker, snapshot, width, ascii_only),
        list(_facts(worker)),
        _why(worker, width, ascii_only),
        [] if down else words,
        _log(log, width),
    )
    return Content("\n\n").join(Content("\n").join(section) for section in sections if section)


def _headline(worker: WorkerReading, width: int) -> Content:
    state = worker_state(worker)
    failure = failure_text(worker)
    where = f"  on {devices_name(worker.devices)}" + (" (simulated)" if _is_simulated(worker) else "")
    line = Content.assemble((f"{state.glyph} {state.word}", f"bold {state.style}"), (failure, "bold $foreground"))
    return line.truncate(max(10, width - len(where)), ellipsis=True) + Content.styled(where, "$muted")


def _is_simulated(worker: WorkerReading) -> bool:
    return any(device.rpartition("/")[2].startswith("sim:") for device in worker.devices)


def _placement(worker: WorkerReading, snapshot: Snapshot, width: int, ascii_only: bool) -> list[Content]:
    totals = {device.id: device.total_bytes for device in snapshot.devices}
    lines = placement_map(worker.planned, worker.used, totals, width, ascii_only=ascii_only)
    if not lines:
        return [_title("Placement"), Content.styled("No data yet", "$muted")]
    shares = worker.used or worker.planned
    layers = ", ".join(f"{_layers(share)} on {device_name(share.device)}" for share in shares if share.layers)
    return [_title("Placement", f"layers: {layers}" if layers and len(shares) > 1 else ""), *lines]


def _layers(share: DeviceShare) -> str:
    return str(share.layers) if share.ranks == 1 else f"1/{share.ranks} of {share.layers}"


def _load(worker: WorkerReading, pace: Pace | None) -> list[Content]:
    if worker.state not in ("starting", "loading"):
        return []
    return [_title("Load"), *phase_lines(worker.progress, pace)]


def _facts(worker: WorkerReading) -> Iterator[Content]:
    stats = worker.stats
    yield _title("Work")
    allowed = num_slots(worker)
    limit = f", limited to {allowed} by memory" if allowed < worker.max_prompts else ""
    yield _fact("model", worker.model or "–", "process", _process(worker))
    yield _fact("active", f"{worker.active} of {worker.max_prompts}{limit}", "tok/s", text.rate(worker.tokens_per_s))
    step = text.seconds(worker.step_s) if worker.step_s else "–"
    yield _fact("step", step, "last step", _age(worker))
    pages = stats.pages_total
    used = text.percent(1 - stats.pages_free / pages) if pages else "–"
    kv = f"{used} of {worker.kv_tokens:,} tokens" if worker.kv_tokens else used
    yield _fact("KV", kv, "RAM", text.size(worker.rss_bytes) if worker.rss_bytes else "–")
    for tier in stats.kv_tiers:
        yield _fact(f"KV {tier.name}", tier_text(tier), "read back", text.plural(tier.restored_pages, "page"))
        if tier.problem:
            yield Content.styled(tier.problem, "$warning")
    loaded = f"in {text.seconds(worker.load_s)}" if worker.load_s is not None else "–"
    yield _fact("loaded", loaded, "preempted", str(stats.preemptions))
    wait = f", next start in {worker.retry_in_s:.1f} s" if worker.retry_in_s is not None else ""
    yield _fact("crashes", f"{worker.deaths_in_a_row}{wait}", "restarts", str(worker.restarts))


def _why(worker: WorkerReading, width: int, lettered: bool) -> list[Content]:
    lines = cause_lines(worker.why, width, lettered=lettered)
    return [_title("Latency", "by cause, last minute"), *lines] if lines else []


def _process(worker: WorkerReading) -> str:
    pid = f"pid {worker.pid}" if worker.pid is not None else "thread of the engine" if worker.state == "ready" else "–"
    return f"{pid} on {worker.node}" if worker.node else pid


def _age(worker: WorkerReading) -> str:
    """Old steps only mean something while there is work."""
    if worker.last_step_age_s is None:
        return "–"
    late = worker.active and worker.last_step_age_s > _STEP_OLD_S
    return f"{text.seconds(worker.last_step_age_s)} ago{' (has work)' if late else ''}"


def _last_words(worker: WorkerReading, width: int) -> list[Content]:
    """Why it died the last time, and what it wrote before that."""
    if worker.last_error is None:
        return []
    sentence = [Content.styled(line, "$error") for line in textwrap.wrap(worker.last_error.message, max(20, width))]
    details = worker.last_error.details
    numbers = [
        f"{name} {details[key]}"
        for key, name in (("signal", "signal"), ("code", "exit code"), ("silent_s", "silent for seconds:"))
        if details.get(key) not in (None, "")
    ]
    lines = [_title("Last crash", ", ".join(numbers)), *sentence]
    if worker.log_tail:
        lines.append(Content.styled("Last lines:", "$muted"))
        lines += [Content.styled(f"▏ {text.clip(line, width - 2)}", "$foreground") for line in worker.log_tail]
    return lines


def _log(log: Sequence[LogEntry], width: int) -> list[Content]:
    if not log:
        return []
    return [
        _title("Log"),
        *(
            Content.assemble((f"{local_time(line.at)} ", "$muted"), message)
            for line in log
            if (message := text.clip(line.message, max(10, width - _CLOCK)))
        ),
    ]


def _title(title: str, more: str = "") -> Content:
    return Content.assemble((title, "bold $primary"), (f"  {more}" if more else "", "$muted"))


def _fact(label: str, value: str | Content, second: str, second_value: str) -> Content:
    first = value if isinstance(value, Content) else Content(text.clip(value, _VALUE - 2))
    return Content.assemble(
        (f"{label:<{_LABEL}}", "$muted"),
        first.pad_right(max(2, _VALUE - first.cell_length)),
        (f"{second:<{_LABEL}}", "$muted"),
        second_value,
    )


def _is_last(worker: WorkerReading, view: View) -> bool:
    """Return whether no worker of its model would be left to answer without it."""
    others = [each for each in view.published.workers if each.model == worker.model and each.id != worker.id]
    left = [each.state for each in others if each.state not in ("draining", "stopping")]
    return not left or (worker.state != "failed" and all(state == "failed" for state in left))


_FRAME_CELLS = 6
_LOG_LINES = 8


class WorkerScreen(Dialog[None]):
    """worker: its id. What was last known of a worker that is gone stays to be read."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding("r", "restart", "Restart", id="worker.restart", mutates=True, tooltip="Restart this worker"),
        ConsoleBinding(
            "d",
            "drain",
            "Drain",
            id="worker.drain",
            mutates=True,
            tooltip="Drain this worker: it finishes its requests, then stops",
        ),
        Binding("escape,q", "dismiss", "Close", id="worker.close", tooltip="Close the worker", key_display="esc"),
    ]

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker
        self._shown: Content | None = None
        self._paces = LoadPaces()
        self._logged = 0
        self._log: deque[LogEntry] = deque(maxlen=_LOG_LINES)

    def compose(self) -> ComposeResult:
        """One page that scrolls where it is long."""
        with VerticalScroll(classes="dialog worker") as page:
            set_title(page, f"Worker {self._worker}")
            yield Static(id="card", markup=False)

    def on_mount(self) -> None:
        """Never empty."""
        self.redraw()

    def on_resize(self) -> None:
        """Bars and lines are cut to the width."""
        after_layout(self, self.redraw)

    def _reading(self, view: View) -> WorkerReading | None:
        """Return the worker; None once it is removed."""
        return next((worker for worker in view.published.workers if worker.id == self._worker), None)

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer to restart a worker that is there, and to drain one that leaves another to answer."""
        worker = self._reading(view)
        drains = worker is not None and worker.state in ("draining", "stopping")
        return super().key_states(view) | {
            "worker.restart": worker is not None,
            "worker.drain": worker is not None and not drains and not _is_last(worker, view),
        }

    def show_view(self, view: View) -> None:
        """Show the worker; where it was removed, the last that was read of it stays."""
        worker = self._reading(view)
        page = self.query_one(VerticalScroll)
        if worker is None:
            page.border_subtitle = "stopped"
            return
        width = max(40, page.scrollable_content_region.width or self.app.size.width - _FRAME_CELLS)
        snapshot = view.published
        paces = self._paces.observe(snapshot.at, {worker.id: worker.progress} if worker.progress else {})
        self._read_log()
        shown = worker_card(
            worker, snapshot, width, pace=paces.get(worker.id), log=tuple(self._log), ascii_only=is_lettered(self.app)
        )
        if self._shown is None or not shown.is_same(self._shown):
            self._shown = shown
            self.query_one("#card", Static).update(for_terminal(self.app, shown))

    def _read_log(self) -> None:
        """Read what was logged of the worker since the last frame."""
        self._logged, lines = self.console.link.logs(self._logged)
        self._log.extend(line for line in lines if line.source == self._worker)

    def action_restart(self) -> None:
        """Start it again; ask first where requests would have to move."""
        worker = self._reading(self.console.view)
        if worker is None:
            self.notify(f"Worker {self._worker} has stopped.", severity="warning", markup=False)
        elif worker.active:
            works = f"{worker.id} is running {text.plural(worker.active, 'request')}."
            moved = "They continue on another worker, or here after the restart. Restart?"
            question = ConfirmScreen(works, moved, yes="Restart", no="Cancel")
            self.app.push_screen(question, lambda yes: self._restart() if yes else None)
        else:
            self._restart()

    def _restart(self) -> None:
        self.console.perform(self.console.link.restart_worker(self._worker), done=f"{self._worker} restarted")

    def action_drain(self) -> None:
        """Let it finish and go; ask first: there is one worker less then."""
        worker = self._reading(self.console.view)
        if worker is None:
            self.notify(f"Worker {self._worker} has stopped.", severity="warning", markup=False)
        elif worker.state in ("draining", "stopping"):
            self.notify(f"{worker.id} is already draining.", markup=False)
        elif _is_last(worker, self.console.view):
            words = f"{worker.id} is the last worker of {worker.model or 'its model'}: unload the model instead."
            self.notify(words, severity="warning", markup=False)
        else:
            works = f" finishes {text.plural(worker.active, 'request')} and" if worker.active else ""
            question = ConfirmScreen(
                f"Drain {worker.id}?",
                f"It{works} then stops. The model runs with one worker fewer.",
                yes="Drain",
                no="Cancel",
            )
            self.app.push_screen(question, lambda yes: self._drain() if yes else None)

    def _drain(self) -> None:
        self.console.perform(
            self.console.link.drain_worker(self._worker), done=f"{self._worker} is draining, then stops"
        )
