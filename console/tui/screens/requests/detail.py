"""One request, looked at closely while it lives and after it ended."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from console import text
from console.tui.keymap import ConsoleBinding
from console.tui.screens.base import Dialog
from console.tui.screens.requests.groups import client_of
from console.tui.screens.requests.table import clock
from console.tui.view import View
from console.tui.widgets.glyphs import for_terminal, is_ascii, is_lettered
from console.tui.widgets.latency import cause_lines
from console.tui.widgets.plot import draw
from console.tui.widgets.states import request_state
from engine.errors import EngineError
from engine.requests.history import RequestDetail, TokenBatch
from engine.snapshot import RequestRow
from engine.text.printable import printable_lines

# One request over its time: what it waited for, where it was, and when its tokens came. Pure.

Kind = Literal["queued", "prefill", "decode"]

_GLYPHS: dict[Kind, str] = {"queued": "◌", "prefill": "◔", "decode": "●"}
_FILLS: dict[Kind, str] = {"queued": ".", "prefill": "─", "decode": "━"}
_ROWS = 3
_PHASE = 22
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


def timeline_chart(detail: RequestDetail, width: int, *, ascii_only: bool = False) -> list[Content]:
    """Tokens per second over its time, the phases below, and the times below those. The bar's fill and colour say
    which phase it is."""
    end = detail.row.age_s
    if end < _MIN_S:
        return []
    lines = _tokens(detail.bursts, end, width, ascii_only) if detail.bursts else []
    return [*lines, _bar(phases(detail), end, width), _axis(detail, end, width)]


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


def request_card(detail: RequestDetail, width: int, *, ascii_only: bool = False, lettered: bool = False) -> Content:
    """All but the text, in `width` cells. lettered: mark causes by letters."""
    sections = (
        list(_headline(detail, width)),
        _timeline(detail, width, ascii_only),
        _why(detail, width, lettered),
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


def _timeline(detail: RequestDetail, width: int, ascii_only: bool) -> list[Content]:
    if not detail.timeline:
        return [_title("Timeline"), Content.styled(NO_TIMELINE, "$muted")]
    lines = [
        _title("Timeline", "tok/s and phases"),
        *timeline_chart(detail, width, ascii_only=ascii_only),
    ]
    lines += [Content(""), *phase_list(detail)]
    if longest := pauses(detail.bursts):
        listed = ", ".join(f"{text.seconds(long)} at {text.seconds(at)}" for at, long in longest)
        lines.append(Content.assemble(("longest pauses: ", "$muted"), listed))
    return lines


def _why(detail: RequestDetail, width: int, lettered: bool) -> list[Content]:
    lines = [] if detail.why is None else cause_lines(detail.why, width, lettered=lettered)
    return [_title("Latency", "by cause"), *lines] if lines else []


def _numbers(detail: RequestDetail) -> Iterator[Content]:
    row = detail.row
    yield _title("Numbers")
    yield _fact(
        "submitted", clock(row.created_at), "took" if row.state == "finished" else "elapsed", text.seconds(row.age_s)
    )
    yield _fact("from", _from(row), "priority", str(row.priority))
    cached = f", {row.cached_tokens:,} cached" if row.cached_tokens else ""
    yield _fact("prompt", f"{text.plural(row.prompt_tokens, 'token')}{cached}", "TTFT", text.seconds(row.ttft_s))
    answer = (
        f"{row.output_tokens:,} of max {row.max_tokens:,} tokens"
        if row.max_tokens
        else text.plural(row.output_tokens, "token")
    )
    yield _fact("answer", answer, "ITL", text.seconds(row.itl_s))
    yield _fact("waited", text.seconds(row.queued_s), "tok/s", text.rate(row.tokens_per_s))


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
        Binding("escape,q", "dismiss", "Close", id="request.close", tooltip="Close the request", key_display="esc"),
    ]

    def __init__(self, row: RequestRow) -> None:
        super().__init__()
        self._row = row
        self._detail: RequestDetail | None = None
        self._looking = False
        self._problem = ""
        self._shown: tuple[Content, Content] | None = None

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
            yield Static(id="request-card", markup=False)
            yield Static(id="request-text", markup=False)

    def on_mount(self) -> None:
        """Never empty for long."""
        self.redraw()

    def on_resize(self) -> None:
        """The chart is drawn to the width."""
        self.call_after_refresh(self._show)

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
            self.query_one("#request-card", Static).update(self._problem)
            return
        page.border_subtitle = "ended" if self._ended else ""
        self.refresh_bindings()
        width = max(40, page.scrollable_content_region.width or self.app.size.width - _FRAME_CELLS)
        ascii_only, lettered = is_ascii(self.app), is_lettered(self.app)
        card = request_card(detail, width, ascii_only=ascii_only, lettered=lettered)
        shown = (card, prompt_and_answer(detail))
        before = self._shown
        self._shown = shown
        for at, name in enumerate(("#request-card", "#request-text")):
            if before is None or not shown[at].is_same(before[at]):
                margin = Content("\n") if at else Content("")
                self.query_one(name, Static).update(for_terminal(self.app, margin + shown[at]))

    def action_cancel(self) -> None:
        """End it, after a question."""
        self.cancel_request(self._row if self._detail is None else self._detail.row)
