"""The top line of every screen: which model, how it is, how it is served, what time it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from textual.content import Content
from textual.style import Style
from textual.widget import Widget

from console.clock import local_time
from console.link import ApiStatus
from console.standing import Standing
from console.widgets import text
from console.widgets.glyphs import fitted
from console.widgets.names import simulated
from console.widgets.states import model_state
from engine.snapshot import Snapshot

HERE = Standing()
_MUTED = "$muted"
_DOT = Content.styled(" · ", "$graph-axis")
_BAR_CELLS = 10
_BREVITIES = 5


@dataclass(frozen=True, slots=True)
class _View:
    snapshot: Snapshot
    api: ApiStatus
    standing: Standing


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

    def show(self, snapshot: Snapshot, api: ApiStatus, standing: Standing = HERE) -> None:
        """Draw anew, where anything changed."""
        before, self._view = self.render(), _View(snapshot, api, standing)
        if not self.render().is_same(before):
            self.refresh()

    def render(self) -> Content:
        """The widest form that fits."""
        if self._view is None:
            return Content("")
        return fitted(self.app, status_line(self._view.snapshot, self._view.api, self.size.width, self._view.standing))


def status_line(snapshot: Snapshot, api: ApiStatus, width: int, standing: Standing = HERE) -> Content:
    """The whole line in `width` cells."""
    clock = Content.styled(local_time(snapshot.at), _MUTED)
    room = width - clock.cell_length - 2
    forms = (_left(snapshot, api, standing, brevity, room) for brevity in range(_BREVITIES))
    left = next((form for form in forms if form.cell_length <= room), None)
    if left is None:
        left = _left(snapshot, api, standing, _BREVITIES - 1, room).truncate(room, ellipsis=True)
    return Content.assemble(left, " " * (width - left.cell_length - clock.cell_length), clock)


def _left(snapshot: Snapshot, api: ApiStatus, standing: Standing, brevity: int, room: int) -> Content:
    parts = [Content.styled("EricLLM", "bold $primary")] if brevity < _BREVITIES - 1 else []
    if standing.stale:
        return _DOT.join([*(parts if brevity < 2 else ()), *_out_of_reach(standing, brevity)])
    parts += _where(standing, brevity)
    name = _model(snapshot, brevity)
    if name is not None:
        parts.append(name)
    if standing.reach == "starting":
        return _DOT.join([*parts, Content.styled("◌ starting", "$worker-loading")])
    told = _told(snapshot, brevity)
    parts.append(_state(snapshot, brevity, room - sum(part.cell_length + 3 for part in (*parts, *told))))
    status = snapshot.status
    if status.state in ("ready", "draining"):
        parts.append(_shape(snapshot, brevity))
    parts += told
    if standing.reach != "recording" and (status.state != "failed" or brevity == 0):
        parts.append(_api(api, brevity, named=standing.name.endswith(f":{api.port}")))
    return _DOT.join(parts)


def _where(standing: Standing, brevity: int) -> list[Content]:
    """Whose engine it is, where that is not this program's, and whether commands are taken."""
    where: list[Content] = []
    if standing.name:
        where.append(Content.styled(text.clip(standing.name, (40, 32, 24, 21, 18)[brevity]), "$accent"))
    if standing.reach == "recording":
        where.append(Content.styled("◆ recording", "$warning"))
    elif standing.read_only:
        where.append(Content.styled("read-only", "$warning"))
    return where


def _out_of_reach(standing: Standing, brevity: int) -> list[Content]:
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
    told = (head + again + reason, head + again + reason, head + again + reason, head, head)[brevity]
    return [name, Content.styled(told, "$worker-failed")][brevity > 3 :]


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


def _told(snapshot: Snapshot, brevity: int) -> list[Content]:
    """That there are more models than this one, and that devices are simulated."""
    told: list[Content] = []
    if (more := len(snapshot.models) - 1) > 0:
        words = f"+{more}" if brevity > 2 else f"+{text.plural(more, 'model')}"
        told.append(Content.styled(words, "$accent").stylize(Style.from_meta({"@click": "app.next_model"})))
    if simulated(snapshot):
        told.append(Content.styled("simulated", "$warning"))
    return told


def _shape(snapshot: Snapshot, brevity: int) -> Content:
    workers, prompts = snapshot.target_workers, snapshot.max_prompts
    if brevity > 0:
        return Content.styled(f"{workers}×{prompts}", "$foreground")
    return Content.styled(f"{text.plural(workers, 'worker')} × {text.plural(prompts, 'prompt')}", "$foreground")


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
