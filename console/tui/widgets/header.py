"""The top line of every screen: which model, how it is, how it is served, what time it is."""

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
from console.tui.modes import MODES
from console.tui.view import prompts_limit, workers_now
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.states import model_state
from engine.snapshot import Snapshot

# The second row of every screen: where one is and where one can go, and the two knobs. All of it can be clicked.


@dataclass(frozen=True, slots=True)
class KnobValues:
    """Values of the knobs. now: workers there are while they become `workers`; limit: what memory allows of prompts,
    0 where that is all."""

    workers: int = 0
    now: int = 0
    prompts: int = 0
    limit: int = 0

    @classmethod
    def of(cls, snapshot: Snapshot) -> KnobValues:
        """Those of the model in view."""
        return cls(
            workers=snapshot.target_workers,
            now=workers_now(snapshot),
            prompts=snapshot.max_prompts,
            limit=prompts_limit(snapshot),
        )


class TabRow(Widget):
    """mode: the name of the screen this row is on."""

    DEFAULT_CSS = """
    TabRow {
        height: 1; width: 1fr; padding: 0 1; background: $surface;
        link-style: none; link-color: $foreground; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    """

    def __init__(self, mode: str) -> None:
        super().__init__()
        self._mode = mode
        self._knobs = KnobValues()
        self._read_only = False

    def show(self, snapshot: Snapshot, *, read_only: bool = False) -> None:
        """The knobs as they are set. read_only: they cannot be turned, so there is nothing to click."""
        knobs = KnobValues.of(snapshot)
        if (knobs, read_only) != (self._knobs, self._read_only):
            self._knobs, self._read_only = knobs, read_only
            self.refresh()

    def render(self) -> Content:
        """Tabs on the left, knobs on the right: the widest forms that fit together, knobs giving way first."""
        width = self.size.width
        for brief in (False, True):
            tabs = tab_row(self._mode, brief=brief)
            for brevity in range(BREVITIES):
                knobs = knob_row(self._knobs, brevity, turns=not self._read_only)
                if (room := width - tabs.cell_length - knobs.cell_length) > 0:
                    return for_terminal(self.app, Content.assemble(tabs, " " * room, knobs))
        return for_terminal(self.app, tabs)


BREVITIES = 4


def tab_row(here: str, *, brief: bool) -> Content:
    """All tabs; brief: the digit alone of those that one is not on."""
    return Content("").join(_tab(mode.name, mode.digit, mode.title, mode.name == here, brief=brief) for mode in MODES)


def knob_row(knobs: KnobValues, brevity: int, *, turns: bool = True) -> Content:
    """Both knobs. brevity: 0 says most; the last of BREVITIES is the narrowest form. turns: with signs to click."""
    coming = f"{knobs.now}→" if knobs.now != knobs.workers else ""
    allowed = (f", memory allows {knobs.limit}", f", memory allows {knobs.limit}", f", fits {knobs.limit}")
    limit = "" if not knobs.limit else (*allowed, f" ({knobs.limit})")[brevity]
    tight = brevity == BREVITIES - 1
    prompts = "Prompts" if brevity else "Max prompts"
    return Content("  ").join(
        (
            _knob("Workers", "workers", f"{coming}{knobs.workers}", tight=tight, turns=turns),
            _knob(prompts, "max_prompts", str(knobs.prompts), limit, tight=tight, turns=turns),
        )
    )


def _link(text: str, style: str, action: str) -> Content:
    return Content.styled(text, style).stylize(Style.from_meta({"@click": action}))


def _tab(name: str, digit: str, title: str, here: bool, *, brief: bool) -> Content:
    if here:
        return Content.styled(f" {digit} {title} ", "bold reverse $primary")
    if brief:
        return _link(f" {digit} ", "$primary", f"app.open('{name}')")
    return Content.assemble((f" {digit}", "$primary"), _link(f" {title} ", "$foreground", f"app.open('{name}')"))


def _knob(title: str, name: str, value: str, limit: str = "", *, tight: bool, turns: bool) -> Content:
    """limit: what memory allows, said behind the value. tight: no more spaces than it needs."""
    pad = "" if tight else " "
    if not turns:
        return Content.assemble((f"{title} ", "$muted"), (value, "bold $foreground"), (limit, "$warning"))
    return Content.assemble(
        (f"{title} ", "$muted"),
        _link(f"{pad}−{pad}", "bold $primary", f"app.step('{name}', -1)"),
        (f" {value}", "bold $foreground"),
        (limit, "$warning"),
        " ",
        _link(f"{pad}+{pad}", "bold $primary", f"app.step('{name}', 1)"),
    )


HERE = LinkStatus()
_MUTED = "$muted"
_DOT = Content.styled(" · ", "$graph-axis")
_BAR_CELLS = 10
_BREVITIES = 5


@dataclass(frozen=True, slots=True)
class _View:
    snapshot: Snapshot
    api: ApiStatus
    standing: LinkStatus


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

    def show(self, snapshot: Snapshot, api: ApiStatus, standing: LinkStatus = HERE) -> None:
        """Draw the line again, where anything changed."""
        before, self._view = self.render(), _View(snapshot, api, standing)
        if not self.render().is_same(before):
            self.refresh()

    def render(self) -> Content:
        """The widest form that fits."""
        if self._view is None:
            return Content("")
        return for_terminal(
            self.app, status_line(self._view.snapshot, self._view.api, self.size.width, self._view.standing)
        )


def status_line(snapshot: Snapshot, api: ApiStatus, width: int, standing: LinkStatus = HERE) -> Content:
    """The whole line in `width` cells."""
    clock = Content.styled(local_time(snapshot.at), _MUTED)
    room = width - clock.cell_length - 2
    forms = (_left(snapshot, api, standing, brevity, room) for brevity in range(_BREVITIES))
    left = next((form for form in forms if form.cell_length <= room), None)
    if left is None:
        left = _left(snapshot, api, standing, _BREVITIES - 1, room).truncate(room, ellipsis=True)
    return Content.assemble(left, " " * (width - left.cell_length - clock.cell_length), clock)


def _left(snapshot: Snapshot, api: ApiStatus, standing: LinkStatus, brevity: int, room: int) -> Content:
    parts = [Content.styled("EricLLM", "bold $primary")] if brevity < _BREVITIES - 1 else []
    if standing.stale:
        return _DOT.join([*(parts if brevity < 2 else ()), *_out_of_reach(standing, brevity)])
    parts += _where(standing, brevity)
    name = _model(snapshot, brevity)
    if name is not None:
        parts.append(name)
    if standing.reach == "starting":
        return _DOT.join([*parts, Content.styled("◌ starting", "$worker-loading")])
    remarks = _remarks(snapshot, brevity)
    parts.append(_state(snapshot, brevity, room - sum(part.cell_length + 3 for part in (*parts, *remarks))))
    status = snapshot.status
    if status.state in ("ready", "draining"):
        parts.append(_shape(snapshot, brevity))
    parts += remarks
    if standing.reach != "recording" and (status.state != "failed" or brevity == 0):
        parts.append(_api(api, brevity, named=standing.name.endswith(f":{api.port}")))
    return _DOT.join(parts)


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
    """That there are more models than this one, and that devices are simulated."""
    remarks: list[Content] = []
    if (more := len(snapshot.models) - 1) > 0:
        words = f"+{more}" if brevity > 2 else f"+{text.plural(more, 'model')}"
        remarks.append(Content.styled(words, "$accent").stylize(Style.from_meta({"@click": "app.next_model"})))
    if has_simulated_devices(snapshot):
        remarks.append(Content.styled("simulated", "$warning"))
    return remarks


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
