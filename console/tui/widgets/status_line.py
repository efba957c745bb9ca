"""The top line of every screen: the model, its state, ready workers, queue, errors, alerts, the API and the time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content
from textual.style import Style
from textual.widget import Widget

from console import text
from console.link.protocol import ApiStatus
from console.link.status import LinkStatus
from console.text import has_simulated_devices, local_time
from console.tui.view import oldest_queued_s, workers_of
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.states import model_state
from engine.snapshot import Snapshot

HERE = LinkStatus()
_MUTED = "$muted"
_DOT = Content.styled(" · ", "$graph-axis")
_BAR_CELLS = 10
_BREVITIES = 6
_NARROW = 4
"""From this form on there is no brand, and the model's name is all that gets shorter."""
_FULL_QUEUE = 0.8
"""Share of the queue's places that are taken, from which on it is nearly full."""


@dataclass(frozen=True, slots=True)
class _View:
    snapshot: Snapshot
    api: ApiStatus
    standing: LinkStatus
    alerts: int


class StatusLine(Widget):
    """One row. It says less where there is less room, but always model, state and clock."""

    DEFAULT_CSS = """
    StatusLine {
        height: 1; width: 1fr; padding: 0 1; background: $panel;
        link-style: none; link-color: $accent; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._view: _View | None = None
        self._line = Content("")

    def show(self, snapshot: Snapshot, api: ApiStatus, standing: LinkStatus = HERE, *, alerts: int = 0) -> None:
        """Draw the line again, where anything changed. alerts: those that were not seen yet."""
        self._view = _View(snapshot, api, standing, alerts)
        line = self._fitted()
        if not line.is_same(self._line):
            self._line = line
            self.refresh()

    def on_resize(self) -> None:
        """Another width has another form."""
        self._line = self._fitted()
        self.refresh()

    def render(self) -> Content:
        """The line as it was last shown."""
        return self._line

    def _fitted(self) -> Content:
        """The widest form that fits."""
        if self._view is None:
            return Content("")
        view = self._view
        line = status_line(view.snapshot, view.api, self.size.width, view.standing, alerts=view.alerts)
        return for_terminal(self.app, line)


def status_line(
    snapshot: Snapshot, api: ApiStatus, width: int, standing: LinkStatus = HERE, *, alerts: int = 0
) -> Content:
    """The whole line in `width` cells."""
    clock = Content.styled(local_time(snapshot.at), _MUTED)
    room = width - clock.cell_length - 2
    view = _View(snapshot, api, standing, alerts)
    forms = (_joined(_parts(view, brevity, room)) for brevity in range(_BREVITIES))
    left = next((form for form in forms if form.cell_length <= room), None)
    if left is None:
        left = _reduced(_parts(view, _BREVITIES - 1, room), room)
    return Content.assemble(left, " " * (width - left.cell_length - clock.cell_length), clock)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the line. drop: in the narrowest form those with the highest number go first; 0 never goes."""

    content: Content
    drop: int = 0


def _joined(parts: Sequence[_Part]) -> Content:
    return _DOT.join([part.content for part in parts])


def _reduced(parts: Sequence[_Part], room: int) -> Content:
    """The parts that there is room for: what is well goes before what is not."""
    shown = list(parts)
    while _joined(shown).cell_length > room and (spare := max(shown, key=lambda part: part.drop)).drop:
        shown.remove(spare)
    return _joined(shown).truncate(room, ellipsis=True)


def _parts(view: _View, brevity: int, room: int) -> list[_Part]:
    snapshot, api, standing = view.snapshot, view.api, view.standing
    colour = "$primary" if standing.stale else _worst(view)
    parts = [_Part(Content.styled("EricLLM", f"bold {colour}"))] if brevity < _NARROW else []
    if standing.stale:
        return [*(parts if brevity < 2 else ()), *map(_Part, _out_of_reach(standing, brevity))]
    parts += [_Part(each, drop=2) for each in _where(standing, brevity)]
    alarm = "" if colour == "$primary" else colour
    name = _model(snapshot, brevity, alarm)
    if name is not None:
        parts.append(_Part(name, drop=3))
    if standing.reach == "starting":
        return [*parts, _Part(Content.styled(f"◌ starting {standing.model}".rstrip(), "$worker-loading"))]
    status = snapshot.status
    serves = status.state in ("ready", "draining")
    tail = [
        *([_shape(snapshot, brevity)] if serves else ()),
        *_health(view, brevity if serves else max(brevity, 3)),
        *_remarks(snapshot, brevity),
    ]
    if standing.reach != "recording":
        tail.append(_api(api, brevity, named=standing.name.endswith(f":{api.port}")))
    failure = "" if status.error is None or status.state != "failed" else f"✖ failed: {status.error.message}"
    if failure and _room(room, (*parts, *tail)) < len(failure):
        tail = tail[:-1]
    return [*parts, _Part(_state(snapshot, brevity, _room(room, (*parts, *tail)), alarm if serves else "")), *tail]


def _room(room: int, others: Sequence[_Part]) -> int:
    """Return the room that the others leave for one more part."""
    return room - sum(part.content.cell_length + 3 for part in others)


def _where(standing: LinkStatus, brevity: int) -> list[Content]:
    """Whose engine it is, where that is not this program's, and whether commands are taken."""
    where: list[Content] = []
    if standing.name:
        where.append(Content.styled(text.clip(standing.name, (40, 32, 24, 21, 18, 12)[brevity]), "$accent"))
    if standing.reach == "recording":
        where.append(Content.styled("◆ recording", "$warning"))
    elif standing.read_only:
        where.append(Content.styled("read-only", "$warning"))
    return where


def _out_of_reach(standing: LinkStatus, brevity: int) -> list[Content]:
    """Whose engine it was, why what is shown of it is old, and how old."""
    name = Content.styled(text.clip(standing.name, 40), "$accent")
    if standing.reach == "live":
        return [name, Content.styled(f"◌ no data for {standing.silent_s} s", "$warning")][brevity > 2 :]
    if standing.reach == "connecting":
        return [name, Content.styled("◌ connecting", "$worker-loading")][brevity > 2 :]
    if standing.reach == "refused":
        again, reason = "", f": {standing.reason}"
    else:
        again = "" if standing.retry_in_s is None else f", trying again in {math.ceil(standing.retry_in_s)} s"
        reason = f": {standing.reason}" if brevity == 0 else ""
    head = "✖ refused" if standing.reach == "refused" else "✖ connection lost" if again else "✖ cannot be read"
    if standing.silent_s:
        head += f", data {_whole_seconds(standing.silent_s)} old"
    sentence = head + again + reason if brevity < 3 else head
    return [name, Content.styled(sentence, "$worker-failed")][brevity > 3 :]


def _model(snapshot: Snapshot, brevity: int, alarm: str) -> Content | None:
    """alarm: the colour of what is wrong, "" where all is well; the narrowest form has no other place for it."""
    status = snapshot.status
    if status.spec is None:
        return None
    name = Content.styled(
        text.clip(status.spec.name, (48, 36, 24, 18, 15, 8)[brevity]), f"bold {alarm or '$foreground'}"
    )
    if status.model is None or brevity > 2:
        return name
    return Content.assemble(name, (f" {text.dtype(status.model.dtype)}", _MUTED))


def _state(snapshot: Snapshot, brevity: int, room: int, alarm: str) -> Content:
    """alarm: a colour in place of the state's own."""
    status = snapshot.status
    state = model_state(status.state)
    if status.error is not None and status.state == "failed":
        return Content.styled(text.clip(f"{state.glyph} failed: {status.error.message}", room), state.style)
    if status.state == "ready" and snapshot.target_workers and not _ready_workers(snapshot):
        return Content.styled("◌ restarting", alarm or "$warning")
    if status.progress is None or status.state != "loading":
        return Content.styled(f"{state.glyph} {state.word}", alarm or state.style)
    words = (f" {text.progress(status.progress)}", state.style) if brevity < 3 else ""
    if status.progress.total <= 0:
        return Content.assemble(state.content, words)
    done = text.fraction(status.progress)
    filled = round(done * _BAR_CELLS)
    bar = Content.assemble((" " + "━" * filled, state.style), ("━" * (_BAR_CELLS - filled), "$gpu-free"))
    return Content.assemble(
        state.content,
        words,
        bar if brevity < 2 else "",
        (f" {text.percent(done)}", state.style),
    )


def _remarks(snapshot: Snapshot, brevity: int) -> list[_Part]:
    """That new requests are refused, there are more models than this one, and devices are simulated."""
    remarks: list[_Part] = []
    if snapshot.draining_since is not None:
        remarks.append(_Part(_draining(snapshot, snapshot.draining_since, brevity)))
    remarks += [_Part(each, drop=5) for each in _waited_for(snapshot, brevity)]
    if (more := len(snapshot.models) - 1) > 0:
        words = f"+{more}" if brevity > 2 else f"+{text.plural(more, 'model')}"
        link = Style.from_meta({"@click": "app.next_model"})
        remarks.append(_Part(Content.styled(words, "$accent").stylize(link), drop=6))
    if has_simulated_devices(snapshot):
        remarks.append(_Part(Content.styled("simulated", "$warning"), drop=8))
    return remarks


def _waited_for(snapshot: Snapshot, brevity: int) -> list[Content]:
    """The models that requests wait for: what leaves memory for each, and how long it may take."""
    waited = [model for model in snapshot.models if model.plan is not None and model.waiting]
    if brevity > 0:
        return [Content.styled(f"◌ loading {text.clip(model.name, 16)}", "$worker-loading") for model in waited]
    found = [(model.name, text.load_plan(model.plan, model.waiting, snapshot.at)) for model in waited if model.plan]
    return [Content.styled(f"◌ loading {text.clip(name, 24)}: {planned}", "$worker-loading") for name, planned in found]


def _draining(snapshot: Snapshot, since: float, brevity: int) -> Content:
    """For how long new requests have been refused, and what is left of the old ones."""
    unfinished, lasts = snapshot.running + snapshot.queued, _whole_seconds(snapshot.at - since)
    left = f", {unfinished} left" if brevity < _NARROW else ""
    return Content.styled(f"◒ draining {lasts}{left}" if unfinished else f"◒ drained {lasts}", "$warning")


def _whole_seconds(elapsed_s: float) -> str:
    """ "42 s", "2:05"."""
    return f"{elapsed_s:.0f} s" if elapsed_s < 99.5 else text.seconds(elapsed_s)


def _ready_workers(snapshot: Snapshot) -> int:
    """Workers of the model in view that are ready, of those that are wanted."""
    return min(snapshot.target_workers, sum(worker.state == "ready" for worker in workers_of(snapshot)))


def _shape(snapshot: Snapshot, brevity: int) -> _Part:
    """Ready workers of those that are wanted; a sign and a colour where one is missing or still comes."""
    wanted, ready, prompts = snapshot.target_workers, _ready_workers(snapshot), snapshot.max_prompts
    noun = "worker" if wanted == 1 else "workers"
    if ready < wanted:
        glyph, style = ("◌", "$worker-loading") if _only_grows(snapshot) else ("▲", "$warning")
        if not ready:
            glyph, style = "✖", "$error"
        return _Part(Content.styled(f"{glyph} {ready}/{wanted}" + (f" {noun}" if brevity < 3 else ""), style))
    if brevity > 0:
        return _Part(Content.styled(f"{ready}/{wanted}×{prompts}", "$foreground"), drop=5)
    return _Part(Content.styled(f"{ready}/{wanted} {noun} × {text.plural(prompts, 'prompt')}", "$foreground"))


def _only_grows(snapshot: Snapshot) -> bool:
    """True if the workers that are missing are on their first start."""
    return all(
        worker.state in ("starting", "loading") and not worker.restarts
        for worker in workers_of(snapshot)
        if worker.state not in ("ready", "draining", "stopping")
    )


def _health(view: _View, brevity: int) -> list[_Part]:
    """The queue, errors and refused requests of the last minute, alerts not seen, a missed SLO; nothing where all is
    well."""
    snapshot, narrow = view.snapshot, brevity > 2
    errors = snapshot.errors_per_min + view.api.refused_per_min
    found: list[_Part] = []
    if snapshot.queued:
        style = "$warning" if _queue_is_full(snapshot) else ""
        oldest_s = None if brevity else oldest_queued_s(snapshot)
        waits = f" (oldest {_whole_seconds(oldest_s)})" if oldest_s is not None else ""
        found.append(_Part(Content.styled(f"queue {snapshot.queued}{waits}", style)))
    if errors:
        words = f"✖ {errors} err" if narrow else f"✖ {text.plural(errors, 'error')}" + ("" if brevity else "/min")
        found.append(_Part(Content.styled(words, "$error")))
    if view.alerts:
        words = f"▲{view.alerts}" if narrow else f"▲ {text.plural(view.alerts, 'alert')}"
        link = Style.from_meta({"@click": "app.alerts"})
        found.append(_Part(Content.styled(words, "$warning").stylize(link)))
    if _misses_slo(snapshot):
        found.append(_Part(Content.styled("▲ SLO" if narrow else "▲ SLO missed", "$warning"), drop=4))
    return found


def _misses_slo(snapshot: Snapshot) -> bool:
    """True if the p95 of TTFT or ITL is over its limit, as the Dashboard colours it."""
    limits = snapshot.insight.goodput
    pairs = ((snapshot.ttft.p95, limits.slo_ttft_s), (snapshot.itl.p95, limits.slo_itl_s))
    return any(value is not None and limit is not None and value > limit for value, limit in pairs)


def _queue_is_full(snapshot: Snapshot) -> bool:
    return snapshot.max_queue > 0 and snapshot.queued >= _FULL_QUEUE * snapshot.max_queue


def _worst(view: _View) -> str:
    """The colour of the worst of the states that the line shows."""
    snapshot, api = view.snapshot, view.api
    serving = snapshot.status.state in ("ready", "draining")
    ready, wanted = _ready_workers(snapshot), snapshot.target_workers
    if snapshot.errors_per_min or api.refused_per_min or snapshot.status.state == "failed" or (serving and not ready):
        return "$error"
    if view.standing.reach != "recording" and (api.error is not None or (api.running and api.is_open)):
        return "$error"
    if snapshot.draining_since is not None or view.alerts or _misses_slo(snapshot):
        return "$warning"
    if _queue_is_full(snapshot) or (serving and ready < wanted and not _only_grows(snapshot)):
        return "$warning"
    return "$primary"


def _api(api: ApiStatus, brevity: int, *, named: bool) -> _Part:
    """named: the address stands on the line already."""
    if api.error is not None:
        return _Part(Content.styled("✖ API failed", "$worker-failed"))
    if not api.running:
        return _Part(Content.styled("○ API off", _MUTED), drop=7)
    address = f":{api.port}" if brevity > 1 else api.url.partition("://")[2]
    narrow = brevity >= _NARROW
    where = "API" if named or narrow else f"API {address}"
    if api.is_open:
        key = ", no key" if narrow else " on without a key"
        return _Part(Content.assemble((f"✖ {where}{key}", "$error"), (_clients(api, brevity), _MUTED)))
    if api.stopping:
        return _Part(Content.styled(f"◒ {where} stopping", "$warning"))
    if narrow:
        return _Part(Content.styled("API on" if named else f"API {address}", "$foreground"), drop=7)
    return _Part(Content.assemble((f"{where} on", "$foreground"), (_clients(api, brevity), _MUTED)))


def _clients(api: ApiStatus, brevity: int) -> str:
    return f", {text.plural(api.clients, 'client')}" if brevity < 3 else ""
