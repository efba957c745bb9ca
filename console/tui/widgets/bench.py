"""A bench under way: what it is at, how far it is, and its table as it grows."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Grid, Vertical
from textual.content import Content
from textual.widgets import Input, Label, Static

from console.bench.result import BenchProgress, columns_with_numbers
from console.bench.result import Column as Number
from console.bench.result import Row as Measured
from console.bench.text import column_title, row_cells, span
from console.link.benches import BenchField, BenchForm, BenchReport
from console.tui.screens.benches.bench_draft import TRACE, BenchDraft
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.plot import meter
from console.tui.widgets.table import Cell, Column, Row, Table, cell

# The settings of a bench: a line for each, with what it means.

MAX_FIELDS = 8
_LONG = (TRACE,)
"""Settings that name files."""


class BenchFields(Grid):
    """Fields that write into the draft as they are typed in. without: settings that are not offered."""

    def __init__(self, draft: BenchDraft, without: Sequence[str] = ()) -> None:
        super().__init__()
        self._draft = draft
        self._without = without
        self._form: BenchForm | None = None

    def compose(self) -> ComposeResult:
        """As many lines as any bench has settings."""
        for at in range(MAX_FIELDS):
            yield Label("", id=f"title-{at}", markup=False)
            yield Input(id=f"field-{at}", compact=True, select_on_focus=True)
            yield Label("", id=f"hint-{at}", classes="hint", markup=False)

    @property
    def _fields(self) -> Sequence[BenchField]:
        fields = self._form.fields if self._form is not None else ()
        return [field for field in fields if field.name not in self._without]

    def show(self, form: BenchForm | None) -> None:
        """The settings of a bench, as they are in the draft."""
        self._form = form
        fields = self._fields
        for at in range(MAX_FIELDS):
            field = fields[at] if at < len(fields) else None
            for name in ("title", "field", "hint"):
                self.query_one(f"#{name}-{at}").display = field is not None
            if form is not None and field is not None:
                self._fill(self._box(at), self._draft.value(form, field))
                self._explain(at, field)

    def _explain(self, at: int, field: BenchField) -> None:
        """Its hint behind it; in it, where what is typed may be long."""
        self.query_one(f"#title-{at}", Label).update(field.title)
        hint, box, long = self.query_one(f"#hint-{at}", Label), self._box(at), field.name in _LONG
        hint.display = not long
        hint.update(for_terminal(self.app, Content(field.hint)))
        box.placeholder = field.hint if long else "none"
        box.set_class(long, "-long")

    def go_to(self, setting: str) -> bool:
        """To the one that is wrong; whether there is such a one."""
        for at, field in enumerate(self._fields):
            if field.name == setting:
                self._box(at).add_class("-wrong").focus()
                return True
        return False

    def on_input_changed(self, event: Input.Changed) -> None:
        """Kept; other settings may follow it."""
        event.stop()
        event.input.remove_class("-wrong")
        fields, at = self._fields, int((event.input.id or "-0").rpartition("-")[2])
        if self._form is None or at >= len(fields):
            return
        self._draft.type(self._form, fields[at], event.value)
        for other, field in enumerate(fields):
            if other != at:
                self._fill(self._box(other), self._draft.value(self._form, field))

    def _box(self, at: int) -> Input:
        return self.query_one(f"#field-{at}", Input)

    def _fill(self, box: Input, text: str) -> None:
        if box.value == text:
            return
        with box.prevent(Input.Changed):
            box.value = text
        box.remove_class("-wrong")
        if box.has_focus:
            box.action_select_all()


# The rows of a bench as a table: what each was measured for, and the middle of its repeats with how far they lie.


def table_of(
    keys: Sequence[Number], numbers: Sequence[Number], rows: Sequence[Measured]
) -> tuple[tuple[Column, ...], list[Row]]:
    """Columns and rows; while there is no row, all columns, and where there is not the room, the last go first."""
    shown = [each for each in (columns_with_numbers(numbers, rows) if rows else numbers) if each.shown]
    lines = [row_cells(keys, shown, row) for row in rows]
    titles = [column_title(each) for each in (*keys, *shown)]
    columns = tuple(
        Column(
            title,
            max(len(title), *(len(row[at]) for row in lines), 1),
            "right" if at else "left",
            drop=max(0, at - len(keys)),
        )
        for at, title in enumerate(titles)
    )
    return columns, [Row(" ".join(row[: len(keys)]), _cells(row, len(keys))) for row in lines]


def _cells(texts: Sequence[str], keys: int) -> tuple[Cell, ...]:
    return tuple(cell(each, "$muted" if at < keys else "bold" if at == keys else "") for at, each in enumerate(texts))


NO_ROW = "Measuring the first row…"
_AFTER = 30
"""Cells behind the bar, for what is left."""


class BenchProgressPanel(Vertical):
    """Two lines and a table."""

    def __init__(self) -> None:
        super().__init__()
        self._report = BenchReport()

    def compose(self) -> ComposeResult:
        """Head, then rows."""
        yield Static(id="bench-head", markup=False)
        yield Table((), empty=NO_ROW, id="bench-rows")

    def on_resize(self) -> None:
        """The bar is as long as there is room."""
        self.show(self._report)

    def show(self, report: BenchReport) -> None:
        """How it stands."""
        self._report = report
        progress = report.progress
        head = Content("\n").join((_state(report), _bar(progress, self.size.width)))
        self.query_one("#bench-head", Static).update(for_terminal(self.app, head))
        if progress is not None:
            columns, rows = table_of(progress.keys, progress.columns, progress.rows)
            self.query_one(Table).show(rows, columns=columns)


def fraction(progress: BenchProgress | None) -> float:
    """How far it is, 0..1; what warms up does not count."""
    if progress is None or not progress.total or progress.doing == "warming up":
        return 0.0
    return min(1.0, progress.done / progress.total)


def brief(report: BenchReport) -> str:
    """In a few words, for a screen that is about something else."""
    progress = report.progress
    left = "" if progress is None or progress.left_s is None else f", {span(progress.left_s)} left"
    return f"benchmark {report.bench} {fraction(progress):.0%}{left}"


def _bar(progress: BenchProgress | None, width: int) -> Content:
    share = fraction(progress)
    left = "" if progress is None or progress.left_s is None else f"about {span(progress.left_s)} left"
    line = meter(share, max(8, width - _AFTER), "$worker-loading")
    return Content.assemble(line, (f"{share:>6.0%}", "bold"), (f"  {left}", "$muted"))


def _state(report: BenchReport) -> Content:
    words = "stopping" if report.state == "stopping" else "measuring"
    return Content.assemble(
        (f"◔ {words} {report.bench}", "bold $worker-loading"),
        *((f"  ·  {part}", "$foreground") for part in _parts(report.progress)),
        (f"  ·  {report.model}", "$muted"),
    )


def _parts(progress: BenchProgress | None) -> list[str]:
    if progress is None:
        return []
    repeat = f"repeat {progress.repeat + 1} of {progress.repeats}" if progress.repeats > 1 else ""
    done = f"{progress.done:,} of {progress.total:,}" if progress.doing != "warming up" else ""
    return [part for part in (progress.doing, done, repeat) if part]
