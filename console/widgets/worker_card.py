"""Everything about one worker, as lines: state, placement, load, work, deaths and what it said at the last of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from textual.content import Content

from console.clock import local_time
from console.load_pace import Pace
from console.widgets import text
from console.widgets.load_phases import phase_lines
from console.widgets.names import device_name, devices_name
from console.widgets.placement import placement_map
from console.widgets.states import worker_state
from console.widgets.worker_words import places, trouble
from engine.snapshot import LogEntry, Snapshot, WorkerReading

_LABEL = 12
_CLOCK = 9
_STEP_OLD_S = 5.0


def card(
    worker: WorkerReading,
    snapshot: Snapshot,
    width: int,
    *,
    pace: Pace | None = None,
    log: Sequence[LogEntry] = (),
    ascii_only: bool = False,
) -> Content:
    """The whole card in `width` cells. pace: of its load, where that can be told.  log: its last lines."""
    words = _last_words(worker, width)
    down = worker.state in ("restarting", "failed")
    sections = (
        [_headline(worker, width)],
        words if down else [],
        _load(worker, pace),
        _placement(worker, snapshot, width, ascii_only),
        list(_facts(worker)),
        [] if down else words,
        _log(log, width),
    )
    return Content("\n\n").join(Content("\n").join(section) for section in sections if section)


def _headline(worker: WorkerReading, width: int) -> Content:
    state = worker_state(worker)
    said = trouble(worker)
    where = f"  on {devices_name(worker.devices)}" + (" (simulated)" if _is_simulated(worker) else "")
    line = Content.assemble((f"{state.glyph} {state.word}", f"bold {state.style}"), (said, "bold $foreground"))
    return line.truncate(max(10, width - len(where)), ellipsis=True) + Content.styled(where, "$muted")


def _is_simulated(worker: WorkerReading) -> bool:
    return any(device.rpartition("/")[2].startswith("sim:") for device in worker.devices)


def _placement(worker: WorkerReading, snapshot: Snapshot, width: int, ascii_only: bool) -> list[Content]:
    totals = {device.id: device.total_bytes for device in snapshot.devices}
    lines = placement_map(worker.planned, worker.used, totals, width, ascii_only=ascii_only)
    if not lines:
        return [_title("Placement"), Content.styled("Not known yet.", "$muted")]
    shares = worker.used or worker.planned
    layers = ", ".join(f"{share.layers} on {device_name(share.device)}" for share in shares if share.layers)
    return [_title("Placement", f"layers: {layers}" if layers and len(shares) > 1 else ""), *lines]


def _load(worker: WorkerReading, pace: Pace | None) -> list[Content]:
    if worker.state not in ("starting", "loading"):
        return []
    return [_title("Load"), *phase_lines(worker.progress, pace)]


def _facts(worker: WorkerReading) -> Iterator[Content]:
    stats = worker.stats
    yield _title("Work")
    allowed = places(worker)
    limit = f", memory allows {allowed}" if allowed < worker.max_prompts else ""
    yield _fact("model", worker.model or "–", "process", _process(worker))
    yield _fact("active", f"{worker.active} of {worker.max_prompts}{limit}", "tok/s", text.rate(worker.tokens_per_s))
    step = text.seconds(worker.step_s) if worker.step_s else "–"
    yield _fact("step", step, "last step", _age(worker))
    pages = stats.pages_total
    held = text.percent(1 - stats.pages_free / pages) if pages else "–"
    kv = f"{held} of {worker.kv_tokens:,} tokens" if worker.kv_tokens else held
    yield _fact("KV", kv, "RAM", text.size(worker.rss_bytes) if worker.rss_bytes else "–")
    loaded = f"in {text.seconds(worker.load_s)}" if worker.load_s is not None else "–"
    yield _fact("loaded", loaded, "preempted", str(stats.preemptions))
    wait = f", next start in {worker.retry_in_s:.1f} s" if worker.retry_in_s is not None else ""
    yield _fact("deaths", f"{worker.deaths_in_a_row} in a row{wait}", "restarts", str(worker.restarts))


def _process(worker: WorkerReading) -> str:
    pid = (
        f"pid {worker.pid}" if worker.pid is not None else "a thread of the engine" if worker.state == "ready" else "–"
    )
    return f"{pid} on {worker.node}" if worker.node else pid


def _age(worker: WorkerReading) -> str:
    """Old steps only mean something while there is work."""
    if worker.last_step_age_s is None:
        return "–"
    late = worker.active and worker.last_step_age_s > _STEP_OLD_S
    return f"{text.seconds(worker.last_step_age_s)} ago{', though it has work' if late else ''}"


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
    lines = [_title("Last death", ", ".join(numbers)), *sentence]
    if worker.log_tail:
        lines.append(Content.styled("Its last lines:", "$muted"))
        lines += [Content.styled(f"▏ {text.clip(line, width - 2)}", "$foreground") for line in worker.log_tail]
    return lines


def _log(log: Sequence[LogEntry], width: int) -> list[Content]:
    if not log:
        return []
    return [
        _title("Log"),
        *(
            Content.assemble((f"{local_time(line.at)} ", "$muted"), said)
            for line in log
            if (said := text.clip(line.message, max(10, width - _CLOCK)))
        ),
    ]


def _title(title: str, more: str = "") -> Content:
    return Content.assemble((title, "bold $primary"), (f"  {more}" if more else "", "$muted"))


def _fact(label: str, value: str, second: str, second_value: str) -> Content:
    return Content.assemble(
        (f"{label:<{_LABEL}}", "$muted"), f"{text.clip(value, 36):<38}", (f"{second:<{_LABEL}}", "$muted"), second_value
    )
