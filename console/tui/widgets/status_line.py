"""The top line of every screen: the model, its state, ready workers, queue, errors, alerts, the API and the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from textual.content import Content
from textual.style import Style
from textual.widget import Widget

from console import text
from console.link.protocol import ApiStatus
from console.link.status import LinkStatus
from console.text import has_simulated_devices, local_time
from console.tui.view import workers_of
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.states import model_state
from engine.snapshot import Snapshot

HERE = LinkStatus()
_MUTED = "$muted"
_DOT = Content.styled(" · ", "$graph-axis")
_BAR_CELLS = 10
_BREVITIES = 5
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

    def show(self, snapshot: Snapshot, api: ApiStatus, standing: LinkStatus = HERE, *, alerts: int = 0) -> None:
        """Draw the line again, where anything changed. alerts: those that were not seen yet."""
        before, self._view = self.render(), _View(snapshot, api, standing, alerts)
        if not self.render().is_same(before):
            self.refresh()

    def render(self) -> Content:
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
    forms = (_left(snapshot, api, standing, brevity, room, alerts) for brevity in range(_BREVITIES))
    left = next((form for form in forms if form.cell_length <= room), None)
    if left is None:
        left = _left(snapshot, api, standing, _BREVITIES - 1, room, alerts).truncate(room, ellipsis=True)
    return Content.assemble(left, " " * (width - left.cell_length - clock.cell_length), clock)


def _left(snapshot: Snapshot, api: ApiStatus, standing: LinkStatus, brevity: int, room: int, alerts: int) -> Content:
    colour = "$primary" if standing.stale else _worst(snapshot)
    parts = [Content.styled("EricLLM", f"bold {colour}")] if brevity < _BREVITIES - 1 else []
    if standing.stale:
        return _DOT.join([*(parts if brevity < 2 else ()), *_out_of_reach(standing, brevity)])
    parts += _where(standing, brevity)
    name = _model(snapshot, brevity)
    if name is not None:
        parts.append(name)
    if standing.reach == "starting":
        return _DOT.join([*parts, Content.styled(f"◌ starting {standing.model}".rstrip(), "$worker-loading")])
    remarks = [*_remarks(snapshot, brevity), *_health(snapshot, brevity, alerts)]
    parts.append(_state(snapshot, brevity, room - sum(part.cell_length + 3 for part in (*parts, *remarks))))
    status = snapshot.status
    if status.state in ("ready", "draining"):
        parts.append(_shape(snapshot, brevity))
    served: list[Content] = []
    if standing.reach != "recording" and (status.state != "failed" or brevity == 0):
        served.append(_api(api, brevity, named=standing.name.endswith(f":{api.port}")))
    narrowest = brevity == _BREVITIES - 1  # its end is cut, and an open API is worse news than a queue
    return _DOT.join([*parts, *(served + remarks if narrowest else remarks + served)])


def _where(standing: LinkStatus, brevity: int) -> list[Content]:
    """Whose engine it is, where that is not this program's, and whether commands are taken."""
    where: list[Content] = []
    if standing.name:
        where.append(Content.styled(text.clip(standing.name, (40, 32, 24, 21, 18)[brevity]), "$accent"))
    if standing.reach == "recording":
        where.append(Content.styled("◆ recording", "$warning"))
    elif standing.read_only:
        where.append(Content.styled("read-only", "$warning"))
    return where


def _out_of_reach(standing: LinkStatus, brevity: int) -> list[Content]:
    """Whose engine it was, and why what is shown of it is old."""
    name = Content.styled(text.clip(standing.name, 40), "$accent")
    if standing.silent_s:
        return [name, Content.styled(f"◌ no data for {standing.silent_s} s", "$warning")][brevity > 2 :]
    if standing.reach == "connecting":
        return [name, Content.styled("◌ connecting", "$worker-loading")][brevity > 2 :]
    if standing.reach == "refused":
        again, reason = "", f": {standing.reason}"
    else:
        again = "" if standing.retry_in_s is None else f", trying again in {math.ceil(standing.retry_in_s)} s"
        reason = f": {standing.reason}" if brevity == 0 else ""
    head = "✖ refused" if standing.reach == "refused" else "✖ connection lost" if again else "✖ cannot be read"
    sentence = (head + again + reason, head + again + reason, head + again + reason, head, head)[brevity]
    return [name, Content.styled(sentence, "$worker-failed")][brevity > 3 :]


def _model(snapshot: Snapshot, brevity: int) -> Content | None:
    status = snapshot.status
    if status.spec is None:
        return None
    name = Content.styled(text.clip(status.spec.name, (48, 36, 24, 18, 15)[brevity]), "bold $foreground")
    if status.model is None or brevity > 2:
        return name
    return Content.assemble(name, (f" {text.dtype(status.model.dtype)}", _MUTED))


def _state(snapshot: Snapshot, brevity: int, room: int) -> Content:
    status = snapshot.status
    state = model_state(status.state)
    if status.error is not None and status.state == "failed":
        return Content.styled(text.clip(f"{state.glyph} failed: {status.error.message}", room), state.style)
    if status.progress is None or status.state != "loading":
        return state.content
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


def _remarks(snapshot: Snapshot, brevity: int) -> list[Content]:
    """That new requests are refused, there are more models than this one, and devices are simulated."""
    remarks: list[Content] = []
    if snapshot.draining_since is not None:
        remarks.append(_draining(snapshot, snapshot.draining_since, brevity))
    if (more := len(snapshot.models) - 1) > 0:
        words = f"+{more}" if brevity > 2 else f"+{text.plural(more, 'model')}"
        remarks.append(Content.styled(words, "$accent").stylize(Style.from_meta({"@click": "app.next_model"})))
    if has_simulated_devices(snapshot):
        remarks.append(Content.styled("simulated", "$warning"))
    return remarks


def _draining(snapshot: Snapshot, since: float, brevity: int) -> Content:
    """For how long new requests have been refused, and what is left of the old ones."""
    unfinished, lasts = snapshot.running + snapshot.queued, _whole_seconds(snapshot.at - since)
    if brevity > 2:
        return Content.styled(f"◒ draining {unfinished}" if unfinished else "◒ drained", "$warning")
    words = f"◒ draining {lasts}, {unfinished} left" if unfinished else f"◒ drained {lasts}"
    return Content.styled(words, "$warning")


def _whole_seconds(elapsed_s: float) -> str:
    """ "42 s", "2:05"."""
    return f"{elapsed_s:.0f} s" if elapsed_s < 99.5 else text.seconds(elapsed_s)


def _ready_workers(snapshot: Snapshot) -> int:
    """Workers of the model in view that are ready, of those that are wanted."""
    return min(snapshot.target_workers, sum(worker.state == "ready" for worker in workers_of(snapshot)))


def _shape(snapshot: Snapshot, brevity: int) -> Content:
    """Ready workers of those that are wanted; a sign and a colour where one is missing or still comes."""
    wanted, ready, prompts = snapshot.target_workers, _ready_workers(snapshot), snapshot.max_prompts
    noun = "worker" if wanted == 1 else "workers"
    if ready < wanted:
        glyph, style = ("◌", "$worker-loading") if _only_grows(snapshot) else ("▲", "$warning")
        if not ready:
            glyph, style = "✖", "$error"
        return Content.styled(f"{glyph} {ready}/{wanted}" + (f" {noun}" if brevity < 3 else ""), style)
    if brevity > 0:
        return Content.styled(f"{ready}/{wanted}×{prompts}", "$foreground")
    return Content.styled(f"{ready}/{wanted} {noun} × {text.plural(prompts, 'prompt')}", "$foreground")


def _only_grows(snapshot: Snapshot) -> bool:
    """True if the workers that are missing are on their first start."""
    return all(
        worker.state in ("starting", "loading") and not worker.restarts
        for worker in workers_of(snapshot)
        if worker.state not in ("ready", "draining", "stopping")
    )


def _health(snapshot: Snapshot, brevity: int, alerts: int) -> list[Content]:
    """The queue, requests that failed in the last minute, and alerts that were not seen; nothing where all is well."""
    found: list[Content] = []
    if snapshot.queued:
        found.append(Content.styled(f"queue {snapshot.queued}", "$warning" if _queue_is_full(snapshot) else ""))
    if errors := snapshot.errors_per_min:
        words = f"✖ {errors}" if brevity > 2 else f"✖ {text.plural(errors, 'error')}" + ("" if brevity else " in 1 min")
        found.append(Content.styled(words, "$error"))
    if alerts and brevity < 3:
        words = f"▲ {text.plural(alerts, 'alert')}"
        found.append(Content.styled(words, "$warning").stylize(Style.from_meta({"@click": "app.alerts"})))
    return found


def _queue_is_full(snapshot: Snapshot) -> bool:
    return snapshot.max_queue > 0 and snapshot.queued >= _FULL_QUEUE * snapshot.max_queue


def _worst(snapshot: Snapshot) -> str:
    """The colour of the worst of the states that the line shows."""
    serving = snapshot.status.state in ("ready", "draining")
    ready, wanted = _ready_workers(snapshot), snapshot.target_workers
    if snapshot.errors_per_min or snapshot.status.state == "failed" or (serving and not ready):
        return "$error"
    if snapshot.draining_since is not None:
        return "$warning"
    if _queue_is_full(snapshot) or (serving and ready < wanted and not _only_grows(snapshot)):
        return "$warning"
    return "$primary"


def _api(api: ApiStatus, brevity: int, *, named: bool) -> Content:
    """named: the address stands on the line already."""
    if api.error is not None:
        return Content.styled("✖ API failed", "$worker-failed")
    if not api.running:
        return Content.styled("○ API off", _MUTED)
    address = f":{api.port}" if brevity > 1 else api.url.partition("://")[2]
    if brevity > 3 and api.is_open:
        return Content.styled("✖ API, no key", "$error")
    if brevity > 3:
        return Content.styled("API on" if named else f"API {address}", "$foreground")
    if api.stopping:
        return Content.styled("◒ API stopping" if named else f"◒ API {address} stopping", "$warning")
    clients = f", {api.clients}" if brevity > 1 else f", {text.plural(api.clients, 'client')}"
    head = "API on" if named else f"API {address} on"
    if api.is_open:
        return Content.assemble((f"✖ {head} without a key", "$error"), (clients, _MUTED))
    return Content.assemble((head, "$foreground"), (clients, _MUTED))
