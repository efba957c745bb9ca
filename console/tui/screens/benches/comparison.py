"""Two results of one bench: every number before and after, and whether that is more than the noise."""

from __future__ import annotations

import itertools
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from console.bench.comparison import Change, Comparison
from console.bench.result import Column as Number
from console.bench.result import key_texts
from console.bench.text import column_title, median_text
from console.tui.screens.base import Dialog
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.panel import set_title
from console.tui.widgets.table import Column, Row, Table, cell

_VERDICTS = {
    "better": ("▲ better", "bold $success"),
    "worse": ("▼ worse", "bold $error"),
    "changed": ("≠ changed", "bold $warning"),
    "same": ("≈ same", "$muted"),
    "unclear": ("? unclear", "$muted"),
}
_NOISE = "± is half the range of the repeats; differences within ± or 10% count as equal."


class BenchComparisonScreen(Dialog[None]):
    """before, after: the results' numbers in the history."""

    AUTO_FOCUS = "Table"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "only", "Differences", id="bench.only", tooltip="Show only differences, then all"),
        Binding("a", "all", "All numbers", id="bench.all", tooltip="Show all numbers, then the main ones"),
        Binding(
            "escape,v,q",
            "dismiss",
            "Close",
            id="bench.compare.close",
            tooltip="Close the comparison",
            key_display="esc",
        ),
    ]

    def __init__(self, before: int, after: int, found: Comparison) -> None:
        super().__init__()
        self._found = found
        self._only = False
        self._all = False
        self._columns = (
            Column("row", 16, grow=30),
            Column("number", 18, grow=20),
            Column(f"before ({before})", 13, "right", grow=10),
            Column(f"after ({after})", 13, "right", grow=10),
            Column("change", 7, "right", drop=1),
            Column("", 9),
        )

    def compose(self) -> ComposeResult:
        """The numbers, and what else is not the same."""
        with Vertical(id="bench-compare") as page:
            set_title(page, f"Two results of benchmark {self._found.name}")
            yield Table(self._columns, empty="No difference is larger than the noise.")
            yield Static(for_terminal(self.app, difference_notes(self._found)), id="bench-differences", markup=False)

    def on_mount(self) -> None:
        """Never empty."""
        self._show()

    def action_only(self) -> None:
        """Only what differs."""
        self._only = not self._only
        self._show()

    def action_all(self) -> None:
        """Those too that a table does not show."""
        self._all = not self._all
        self._show()

    def _show(self) -> None:
        shown = {each.name: each for each in self._found.columns if self._all or each.shown}
        changes = [
            change
            for change in self._found.changes
            if change.column in shown and not (self._only and change.verdict == "same")
        ]
        groups = itertools.groupby(changes, lambda change: key_texts(change.keys))
        self.query_one(Table).show(
            [
                _row(change, shown[change.column], "" if at else name)
                for name, group in groups
                for at, change in enumerate(group)
            ]
        )


def _row(change: Change, number: Number, name: str) -> Row:
    words, style = _VERDICTS[change.verdict]
    share = "–" if change.share is None else f"{change.share:+.1%}"
    cells = (
        cell(name, "bold $muted"),
        cell(column_title(number)),
        cell(median_text(change.before, change.before_spread, number), "$muted"),
        cell(median_text(change.after, change.after_spread, number), "bold"),
        cell(share, style),
        cell(words, style),
    )
    return Row(f"{key_texts(change.keys)} {change.column}", cells)


def difference_notes(found: Comparison) -> Content:
    """Why changes are unclear, and what besides the numbers is not the same."""
    lines = [*(Content.styled(note, "$warning") for note in found.notes), Content.styled(_NOISE, "$muted")]
    lines += [
        Content.assemble((f"{each.what}  ", "$muted"), each.before, (" → ", "$muted"), (each.after, "bold"))
        for each in found.differences
    ]
    for words, rows in (("before", found.only_before), ("after", found.only_after)):
        lines += [Content.assemble((f"only {words}  ", "$muted"), key_texts(keys)) for keys in rows]
    return Content("\n").join(lines)
