"""Everything about one request, as lines: state, timeline, numbers, sampling, and its text where that is allowed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from textual.content import Content

from console.widgets import text
from console.widgets.request_table import clock
from console.widgets.states import request_state
from console.widgets.timeline import chart, listing, pauses
from engine.records import RequestDetail
from engine.snapshot import RequestRow
from engine.text.printable import printable_lines

_LABEL = 12
_GLUE = "\N{NO-BREAK SPACE}"
_VALUE = 36
NOT_ALLOWED = (
    "Prompts and answers are not kept. Start with --show-prompts, or set show_prompts = true in config.toml, "
    "to read those of the last requests here."
)
NOT_KEPT = "Nothing of its text is kept any more: only that of the last requests is."
NO_TIMELINE = "Its timeline is not kept any more: only those of the last requests are."


def card(detail: RequestDetail, width: int, *, ascii_only: bool = False) -> Content:
    """All but the text, in `width` cells."""
    sections = (
        list(_headline(detail, width)),
        _timeline(detail, width, ascii_only),
        list(_numbers(detail)),
        _sampling(detail, width),
    )
    return Content("\n\n").join(Content("\n").join(section) for section in sections if section)


def told(detail: RequestDetail) -> Content:
    """Prompt and answer, unsafe characters as escapes; or why they cannot be read."""
    if detail.text is None:
        return Content.assemble(_title("Text"), "\n", (NOT_KEPT if detail.texts else NOT_ALLOWED, "$muted"))
    cut = "  both ends of what is long" if detail.text.cut else ""
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
        _title("Timeline", "tokens per second, and what the time went into"),
        *chart(detail, width, ascii_only=ascii_only),
    ]
    lines += [Content(""), *listing(detail)]
    if longest := pauses(detail.bursts):
        said = ", ".join(f"{text.seconds(long)} at {text.seconds(at)}" for at, long in longest)
        lines.append(Content.assemble(("longest pauses: ", "$muted"), said))
    return lines


def _numbers(detail: RequestDetail) -> Iterator[Content]:
    row = detail.row
    yield _title("Numbers")
    yield _fact(
        "submitted", clock(row.created_at), "took" if row.state == "finished" else "so far", text.seconds(row.age_s)
    )
    yield _fact("from", _from(row), "priority", str(row.priority))
    cached = f", {row.cached_tokens:,} cached" if row.cached_tokens else ""
    yield _fact("prompt", f"{text.plural(row.prompt_tokens, 'token')}{cached}", "TTFT", text.seconds(row.ttft_s))
    most = f" of {row.max_tokens:,} at most" if row.max_tokens else ""
    yield _fact("answer", f"{text.plural(row.output_tokens, 'token')}{most}", "ITL", text.seconds(row.itl_s))
    yield _fact("waited", text.seconds(row.queued_s), "tok/s", text.rate(row.tokens_per_s))


def _from(row: RequestRow) -> str:
    return f"{row.source}, client {row.client}" if row.client else row.source


def _sampling(detail: RequestDetail, width: int) -> list[Content]:
    if not detail.timeline:
        return []
    if not detail.sampling:
        return [_title("Sampling"), Content.styled("Neutral: nothing was asked for.", "$muted")]
    said = "  ".join(f"{name}{_GLUE}{_value(value)}" for name, value in detail.sampling.items())
    lines = textwrap.wrap(said, max(20, width), break_long_words=False)
    return [_title("Sampling", "what is not neutral"), *(Content(line.replace(_GLUE, " ")) for line in lines)]


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
