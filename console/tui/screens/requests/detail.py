"""One request, looked at closely while it lives and after it ended."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import MouseMove
from textual.style import Style
from textual.widgets import Static

from console import text
from console.tui.keymap import READOUT, ConsoleBinding
from console.tui.screens.base import Dialog
from console.tui.screens.requests.groups import client_of
from console.tui.screens.requests.table import clock, prompt_percent
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal, is_ascii, is_lettered
from console.tui.widgets.latency import CAUSE_META, cause_lines
from console.tui.widgets.panel import after_layout
from console.tui.widgets.plot import draw
from console.tui.widgets.states import request_state
from engine.errors import EngineError
from engine.requests.causes import Cause
from engine.requests.history import RequestDetail, TokenBatch
from engine.snapshot import RequestRow
from engine.text.printable import printable_lines

# One request over its time: what it waited for, where it was, and when its tokens came. Pure.

Kind = Literal["queued", "prefill", "decode"]

_GLYPHS: dict[Kind, str] = {"queued": "◌", "prefill": "◔", "decode": "●"}
_FILLS: dict[Kind, str] = {"queued": ".", "prefill": "─", "decode": "━"}
_ROWS = 3
_PHASE = 22
TIMELINE_META = "timeline"
_MIN_PAUSES = 4
_PAUSES = 3
_MIN_S = 1e-6
"""Nothing took less; a part of such a time, as it may come from elsewhere, is not a number."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's time, in seconds since it was submitted. lost: it ended with its worker's death."""

    kind: Kind
    since_s: float
    until_s: float
    worker: str = ""
    lost: bool = False


def phases(detail: RequestDetail) -> list[Phase]:
    """The parts of its time without a gap, up to now or to its end."""
    found, at, end = list[Phase](), 0.0, detail.row.age_s
    for stay in detail.stays:
        if stay.since_s > at:
            found.append(Phase("queued", at, stay.since_s))
        until = end if stay.until_s is None else stay.until_s
        first = next((burst.since_s for burst in detail.bursts if burst.until_s >= stay.since_s), until)
        first = min(max(first, stay.since_s), until)
        decodes = first < until
        if first > stay.since_s:
            found.append(Phase("prefill", stay.since_s, first, stay.worker, stay.lost and not decodes))
        if decodes:
            found.append(Phase("decode", first, until, stay.worker, stay.lost))
        at = until
    if end > at:
        found.append(Phase("queued", at, end))
    return found


def pauses(bursts: Sequence[TokenBatch]) -> list[tuple[float, float]]:
    """The longest times without a token once they came: (when, how long), the longest first. Only those that stand out:
    of at least twice the mean."""
    gaps = [(before.until_s, after.since_s - before.until_s) for before, after in pairwise(bursts)]
    if len(gaps) < _MIN_PAUSES:
        return []
    mean = sum(gap for _, gap in gaps) / len(gaps)
    return sorted((gap for gap in gaps if gap[1] >= 2 * mean), key=lambda gap: -gap[1])[:_PAUSES]


def timeline_chart(
    detail: RequestDetail, width: int, *, ascii_only: bool = False, cursor: float | None = None
) -> list[Content]:
    """Tokens per second over its time, the phases below, and the times below those. The bar's fill and colour say
    which phase it is. Each line has TIMELINE_META.

    cursor: the moment to highlight, in seconds since it was submitted.
    """
    end = detail.row.age_s
    if end < _MIN_S:
        return []
    lines = _tokens(detail.bursts, end, width, ascii_only) if detail.bursts else []
    bar = _bar(phases(detail), end, width)
    if cursor is None:
        lines += bar, _axis(detail, end, width)
    else:
        column = _column(cursor, end, width)
        lines += bar.stylize("reverse", column, column + 1), _cursor_axis(cursor, end, width)
    return [line.stylize(Style.from_meta({TIMELINE_META: True})) for line in lines]


def timeline_reading(detail: RequestDetail, width: int, cursor: float) -> Content:
    """Return the reading of a moment of `timeline_chart`: its time of day, the phase with its duration and share,
    and tokens per second."""
    end = detail.row.age_s
    middle = (_column(cursor, end, width) + 0.5) * end / width
    phase = next((each for each in phases(detail) if middle <= each.until_s), None)
    if phase is None:
        return Content("")
    took_s = phase.until_s - phase.since_s
    rate = rates(detail.bursts, end, width)[_column(cursor, end, width)] or 0.0
    return Content.assemble(
        (f"{clock(detail.row.created_at + middle)}  ", "$muted"),
        (f"{_GLYPHS[phase.kind]} {phase.kind}", f"$request-{phase.kind}"),
        f" on {phase.worker}" if phase.worker else "",
        (f"  {text.seconds(took_s)}", "bold"),
        f" ({text.percent(took_s / end)})",
        (f"  {text.rate(rate)} tok/s", "$graph-tokens") if phase.kind == "decode" else "",
    )


def _column(at: float, end: float, width: int) -> int:
    return min(width - 1, max(0, int(at / end * width)))


def rates(bursts: Sequence[TokenBatch], end: float, width: int) -> list[float | None]:
    """Tokens per second in each of `width` equal parts of the time until `end`; what was joined is spread evenly."""
    tokens = [0.0] * width
    for burst in bursts:
        first, last = _column(burst.since_s, end, width), _column(burst.until_s, end, width)
        for column in range(first, last + 1):
            tokens[column] += burst.tokens / (last + 1 - first)
    return [each * width / end if each else None for each in tokens]


def _tokens(bursts: Sequence[TokenBatch], end: float, width: int, ascii_only: bool) -> list[Content]:
    values = rates(bursts, end, width)
    top = max(value for value in values if value is not None)
    plot = draw(values, [], top, _ROWS, ascii_only=ascii_only)
    return [Content.styled("".join(cell.char for cell in row), "$graph-tokens") for row in plot]


def _bar(found: Sequence[Phase], end: float, width: int) -> Content:
    """The middle of each column decides; a phase too short for one is in the list below the chart alone."""
    middles = [(column + 0.5) * end / width for column in range(width)]
    kinds = [next((phase.kind for phase in found if middle <= phase.until_s), None) for middle in middles]
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    return Content.assemble(
        *((_FILLS[kind] * cells, f"$request-{kind}") if kind else " " * cells for kind, cells in runs)
    )


def _axis(detail: RequestDetail, end: float, width: int) -> Content:
    right = text.seconds(end)
    first = detail.bursts[0].since_s if detail.bursts else None
    line = "0" + " " * (width - 1 - len(right)) + right
    if first is not None:
        at, label = _column(first, end, width), f"▏first token {text.seconds(first)}"
        at = max(2, min(at, width - len(right) - len(label) - 1))
        if at + len(label) < width - len(right):
            line = line[:at] + label + line[at + len(label) :]
    return Content.styled(line, "$muted")


def _cursor_axis(cursor: float, end: float, width: int) -> Content:
    """The axis with the time of the cursor, and no other but its ends."""
    column, right, when = _column(cursor, end, width), text.seconds(end), text.seconds(cursor)
    label, start = f"▲ {when}", column
    if column + len(label) > width:
        label = f"{when} ▲"
        start = column + 1 - len(label)
    line = "0" + " " * (width - 1 - len(right)) + right
    if start + len(label) >= width - len(right):
        line = "0".ljust(width)
    return Content.styled(line[:start] + label + line[start + len(label) :], "$muted")


def phase_list(detail: RequestDetail) -> Iterator[Content]:
    """The phases in words, with what became of their workers."""
    row, began = detail.row, False
    yield Content.styled(f"{'phase':<{_PHASE}}{'began':>8}{'took':>9}", "$muted")
    for at, phase in enumerate(phases(detail)):
        where = f" on {phase.worker}" if phase.worker else (" again" if at else "")
        more = ""
        if phase.kind == "prefill" and not began:
            cached = f", {row.cached_tokens:,} of them cached" if row.cached_tokens else ""
            more, began = f"  {row.prompt_tokens:,} tokens{cached}", True
        yield Content.assemble(
            (f"{_GLYPHS[phase.kind]} {phase.kind}", f"$request-{phase.kind}"),
            where.ljust(_PHASE - 2 - len(phase.kind)),
            (f"{text.seconds(phase.since_s):>8} ", "$muted"),
            f"{text.seconds(phase.until_s - phase.since_s):>8}",
            (more, "$muted"),
        )
        if phase.lost:
            yield Content.styled(f"✖ {phase.worker} crashed; request requeued", "$request-failed")


# Everything about one request, as lines: state, timeline, numbers, sampling, and its text where that is allowed.

_LABEL = 12
_GLUE = "\N{NO-BREAK SPACE}"
_VALUE = 36
NOT_ALLOWED = (
    "Prompts and answers are not kept. Start with --show-prompts, or set show_prompts = true in config.toml, "
    "to read those of the last requests here."
)
NOT_KEPT = "Text no longer kept (only for the last requests)"
NO_TIMELINE = "Timeline no longer kept (only for the last requests)"


def request_card(
    detail: RequestDetail,
    width: int,
    *,
    ascii_only: bool = False,
    lettered: bool = False,
    cursor: float | None = None,
    cause: Cause | None = None,
) -> Content:
    """All but the text, in `width` cells. lettered: mark causes by letters.

    cursor: the moment of the timeline to read, in seconds since it was submitted.  cause: the one to highlight.
    """
    sections = (
        list(_headline(detail, width)),
        _timeline(detail, width, ascii_only, cursor),
        _why(detail, width, lettered, cause),
        list(_numbers(detail)),
        _sampling(detail, width),
    )
    return Content("\n\n").join(Content("\n").join(section) for section in sections if section)


def prompt_and_answer(detail: RequestDetail) -> Content:
    """Prompt and answer, unsafe characters as escapes; or why they cannot be read."""
    if detail.text is None:
        return Content.assemble(_title("Text"), "\n", (NOT_KEPT if detail.texts else NOT_ALLOWED, "$muted"))
    cut = "  start and end of long texts" if detail.text.cut else ""
    prompt, answer = printable_lines(detail.text.prompt), printable_lines(detail.text.answer)
    return Content.assemble(_title("Prompt", cut), "\n", prompt, "\n\n", _title("Answer"), "\n", answer)


def _headline(detail: RequestDetail, width: int) -> Iterator[Content]:
    row, state = detail.row, request_state(detail.row)
    where = f" on {row.worker}" if row.worker and row.state != "finished" else ""
    adapter = f" with {detail.adapter}" if detail.adapter else ""
    model = f"  {row.model or 'the first model'}{adapter}"
    yield Content.assemble((f"{state.glyph} {state.word}{where}", f"bold {state.style}"), (model, "$muted"))
    if row.error is not None:
        for line in textwrap.wrap(row.error.message, max(20, width)):
            yield Content.styled(line, "$error")


def _timeline(detail: RequestDetail, width: int, ascii_only: bool, cursor: float | None) -> list[Content]:
    if not detail.timeline:
        return [_title("Timeline"), Content.styled(NO_TIMELINE, "$muted")]
    title = _title("Timeline", "tok/s and phases")
    if cursor is not None:
        title = Content.assemble(_title("Timeline"), "  ", timeline_reading(detail, width, cursor))
    lines = [title, *timeline_chart(detail, width, ascii_only=ascii_only, cursor=cursor)]
    lines += [Content(""), *phase_list(detail)]
    if longest := pauses(detail.bursts):
        listed = ", ".join(f"{text.seconds(long)} at {text.seconds(at)}" for at, long in longest)
        lines.append(Content.assemble(("longest pauses: ", "$muted"), listed))
    return lines


def _why(detail: RequestDetail, width: int, lettered: bool, cause: Cause | None) -> list[Content]:
    lines = [] if detail.why is None else cause_lines(detail.why, width, lettered=lettered, pointed=cause)
    return [_title("Latency", "by cause"), *lines] if lines else []


def _numbers(detail: RequestDetail) -> Iterator[Content]:
    row = detail.row
    yield _title("Numbers")
    yield _fact(
        "submitted", clock(row.created_at), "took" if row.state == "finished" else "elapsed", text.seconds(row.age_s)
    )
    yield _fact("from", _from(row), "priority", str(row.priority))
    cached = f", {row.cached_tokens:,} cached" if row.cached_tokens else ""
    computed = f", {prompt_percent(row)} computed" if row.state == "prefill" else ""
    prompt = f"{text.plural(row.prompt_tokens, 'token')}{cached}{computed}"
    yield _fact("prompt", prompt, "TTFT", text.seconds(row.ttft_s))
    answer = (
        f"{row.output_tokens:,} of max {row.max_tokens:,} tokens"
        if row.max_tokens
        else text.plural(row.output_tokens, "token")
    )
    yield _fact("answer", answer, "ITL", text.seconds(row.itl_s))
    yield _fact("waited", _waited(row), "tok/s", text.rate(row.tokens_per_s))


def _waited(row: RequestRow) -> str:
    position = "" if row.queue_position is None else f", position {row.queue_position}"
    left = "" if row.expected_wait_s is None else f", about {text.duration(row.expected_wait_s)} left"
    return f"{text.seconds(row.queued_s)}{position}{left}"


def _from(row: RequestRow) -> str:
    client = client_of(row)
    return f"{row.source}, client {client}" if client else row.source


def _sampling(detail: RequestDetail, width: int) -> list[Content]:
    if not detail.timeline:
        return []
    if not detail.sampling:
        return [_title("Sampling"), Content.styled("Defaults.", "$muted")]
    values = "  ".join(f"{name}{_GLUE}{_value(value)}" for name, value in detail.sampling.items())
    lines = textwrap.wrap(values, max(20, width), break_long_words=False)
    return [_title("Sampling", "non-default values"), *(Content(line.replace(_GLUE, " ")) for line in lines)]


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _title(title: str, more: str = "") -> Content:
    return Content.assemble((title, "bold $primary"), (f"  {more}" if more else "", "$muted"))


def _fact(label: str, value: str, second: str, second_value: str) -> Content:
    return Content.assemble(
        (f"{label:<{_LABEL}}", "$muted"),
        f"{text.clip(value, _VALUE):<{_VALUE + 2}}",
        (f"{second:<{_LABEL}}", "$muted"),
        second_value,
    )


_FRAME_CELLS = 6


class RequestCard(Static):
    """All of a request but its text. The timeline is read by `move_cursor` or the mouse, the bar of causes by the
    mouse."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, markup=False)
        self._detail: RequestDetail | None = None
        self._width = 0
        self._cursor: float | None = None
        self._cause: Cause | None = None
        self._shown = Content("")

    @property
    def has_timeline(self) -> bool:
        """True if there is a timeline to read."""
        return self._detail is not None and self._detail.timeline and self._detail.row.age_s >= _MIN_S

    def show(self, detail: RequestDetail, width: int) -> None:
        """Draw a request in `width` cells, where anything changed."""
        self._detail, self._width = detail, width
        self._draw()

    def move_cursor(self, by: int) -> None:
        """Read the next column of the timeline earlier (-1) or later (1), beginning with the last; after that none."""
        if self._detail is None or not self.has_timeline:
            return
        end, at = self._detail.row.age_s, self._width
        if self._cursor is not None:
            at = _column(self._cursor, end, self._width)
        at = max(0, at + by)
        self._point((at + 0.5) * end / self._width if at < self._width else None, None)

    def on_mouse_move(self, event: MouseMove) -> None:
        """Read what is under the mouse."""
        offset, meta = event.get_content_offset(self), event.style.meta
        cursor = None
        if offset is not None and self._detail is not None and meta.get(TIMELINE_META):
            cursor = (offset.x + 0.5) * self._detail.row.age_s / self._width
        self._point(cursor, meta.get(CAUSE_META))

    def on_leave(self) -> None:
        """Nothing is under the mouse."""
        self._point(None, None)

    def _point(self, cursor: float | None, cause: Cause | None) -> None:
        if (cursor, cause) != (self._cursor, self._cause):
            self._cursor, self._cause = cursor, cause
            self._draw()

    def _draw(self) -> None:
        if self._detail is None:
            return
        card = request_card(
            self._detail,
            self._width,
            ascii_only=is_ascii(self.app),
            lettered=is_lettered(self.app),
            cursor=self._cursor if self.has_timeline else None,
            cause=self._cause,
        )
        if not card.is_same(self._shown):
            self._shown = card
            self.update(for_terminal(self.app, card))


_READ = Binding.Group("Read timeline", compact=True)


class RequestScreen(Dialog[None]):
    """row: the request as it was in the table. What was last known of it stays to be read."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "x,delete",
            "cancel",
            "Cancel",
            id="request.cancel.this",
            mutates=True,
            tooltip="Cancel this request",
            key_display="x",
        ),
        *(replace(each, show=True, group=_READ) for each in READOUT),
        Binding("escape,q", "dismiss", "Close", id="request.close", tooltip="Close the request", key_display="esc"),
    ]

    def __init__(self, row: RequestRow) -> None:
        super().__init__()
        self._row = row
        self._detail: RequestDetail | None = None
        self._looking = False
        self._problem = ""
        self._text = Content("")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A request that ended cannot be cancelled."""
        return not (action == "cancel" and self._ended) and super().check_action(action, parameters)

    @property
    def _ended(self) -> bool:
        return self._detail is not None and self._detail.row.state == "finished"

    def compose(self) -> ComposeResult:
        """One page that scrolls where it is long."""
        with VerticalScroll(classes="dialog request") as page:
            page.border_title = Content(f"Request {self._row.id}")
            yield RequestCard(id="request-card")
            yield Static(id="request-text", markup=False)

    def on_mount(self) -> None:
        """Never empty for long."""
        self.redraw()

    def on_resize(self) -> None:
        """The chart is drawn to the width."""
        after_layout(self, self._show)

    def show_view(self, view: View) -> None:
        """Ask for the request's details, until it has ended and they are complete."""
        complete = self._detail is not None and self._detail.row.state == "finished"
        if not (complete or self._looking or self._problem):
            self._looking = True
            self.run_worker(self._look(), group="look", exit_on_error=False)

    async def _look(self) -> None:
        try:
            self._detail = await self.console.link.requests.detail(self._row.id, self._row.order)
        except EngineError as error:
            self._problem = error.message
        finally:
            self._looking = False
        self._show()

    def _show(self) -> None:
        page, detail = self.query_one(VerticalScroll), self._detail
        if detail is None:
            self.query_one(RequestCard).update(self._problem)
            return
        page.border_subtitle = "ended" if self._ended else ""
        width = max(40, page.scrollable_content_region.width or self.app.size.width - _FRAME_CELLS)
        self.query_one(RequestCard).show(detail, width)
        self.offer_keys()
        self.refresh_bindings()
        shown = prompt_and_answer(detail)
        if not shown.is_same(self._text):
            self._text = shown
            self.query_one("#request-text", Static).update(for_terminal(self.app, Content("\n") + shown))

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer to read the timeline where there is one."""
        has_timeline = self.query_one(RequestCard).has_timeline
        return super().key_states(view) | dict.fromkeys((each.id or "" for each in READOUT), has_timeline)

    def action_readout(self, by: int) -> None:
        """Read another moment of the timeline."""
        self.query_one(RequestCard).move_cursor(by)

    def action_cancel(self) -> None:
        """End it, after a question."""
        self.cancel_request(self._row if self._detail is None else self._detail.row)
