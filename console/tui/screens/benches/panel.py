"""Benchmarks, a view of Tune: the one that runs, and earlier results, to be opened, plotted, compared and deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from console.bench.comparison import compare, trend
from console.bench.result import BenchResult
from console.link.benches import BenchEntry, BenchReport
from console.link.protocol import EngineLink
from console.text import plural
from console.tui.keymap import ConsoleBinding
from console.tui.screens.base import AppScreen
from console.tui.screens.benches.bench_draft import BenchDraft
from console.tui.screens.benches.comparison import BenchComparisonScreen
from console.tui.screens.benches.form import BenchFormScreen
from console.tui.screens.benches.plot import BenchPlot, plottable_columns
from console.tui.screens.benches.result import BenchHistoryTable, BenchResultScreen
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.widgets.bench import BenchProgressPanel
from console.tui.widgets.glyphs import for_terminal
from console.tui.widgets.panel import set_subtitle
from console.tui.widgets.table import Table
from engine.errors import EngineError

MAX_OVER_TIME = 50
_OF_RESULTS = ("bench.plot", "bench.plot.before", "bench.time", "bench.mark", "bench.forget")
"""Keys of the selected result."""
_ENDINGS = {"done": ("✓", "$success"), "cancelled": ("◇", "$warning"), "failed": ("✖", "$error")}


class BenchesPanel(Vertical):
    """link: the engine whose benches these are."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "n",
            "new",
            "New",
            id="bench.new",
            mutates=True,
            primary=True,
            tooltip="Choose a benchmark and run it on the serving engine",
        ),
        ConsoleBinding(
            "c",
            "cancel",
            "Cancel",
            id="bench.cancel",
            mutates=True,
            tooltip="Cancel the running benchmark; partial results are saved",
        ),
        Binding("p", "number(1)", "Plot", id="bench.plot", tooltip="Plot the next number of the result"),
        Binding("P", "number(-1)", "Previous", id="bench.plot.before", tooltip="Plot the previous number", show=False),
        Binding("o", "time", "Over time", id="bench.time", tooltip="Plot the number over time, or of one result"),
        Binding("space", "mark", "Mark", id="bench.mark", tooltip="Mark the result, to compare it with another"),
        Binding(
            "C",
            "compare",
            "Compare",
            id="bench.compare",
            tooltip="Compare the marked results, or the marked one with the selected one",
        ),
        ConsoleBinding(
            "d,delete",
            "forget",
            "Delete",
            id="bench.forget",
            mutates=True,
            tooltip="Delete the selected result",
            key_display="d",
        ),
    ]

    def __init__(self, link: EngineLink, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._link = link
        self._read = False
        self._draft = BenchDraft()
        self._report = BenchReport()
        self._entries: Sequence[BenchEntry] = ()
        self._results: dict[tuple[int, str], BenchResult] = {}
        self._marked: list[int] = []
        self._number = 0
        self._over_time = False

    def compose(self) -> ComposeResult:
        """The running bench, the results, and the plot of the selected one."""
        with Vertical(id="bench-now", classes="panel") as now:
            now.border_title = "Running"
            now.display = False
            yield BenchProgressPanel()
        yield Static(id="bench-outcome", markup=False)
        with Vertical(id="bench-results", classes="panel") as results:
            results.border_title = "Benchmark results"
            yield BenchHistoryTable()
        yield BenchPlot(id="bench-plot", classes="panel")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only a running bench can be cancelled."""
        return self._report.under_way if action == "cancel" else True

    @property
    def key_states(self) -> dict[str, bool | str]:
        """Offer what has a result to work on."""
        chosen, marked = self.table.chosen, self._marked
        pair = len(marked) == 2 or (bool(marked) and chosen not in (None, *marked))
        states: dict[str, bool | str] = dict.fromkeys(_OF_RESULTS, chosen is not None)
        return states | {"bench.compare": pair}

    # -- what is shown ------------------------------------------------------------------------------------------------

    @property
    def table(self) -> BenchHistoryTable:
        """The results."""
        return self.query_one(BenchHistoryTable)

    def show(self, report: BenchReport) -> None:
        """Show the progress of the running bench; read the results at first, and again when it ends."""
        before, self._report = self._report, report
        now = self.query_one("#bench-now")
        now.display = report.under_way
        self.set_class(report.under_way, "-measuring")
        if report.under_way:
            self.query_one(BenchProgressPanel).show(report)
        self._say(report)
        if before.under_way != report.under_way:
            self.screen.refresh_bindings()
        if before.under_way and not report.under_way:
            self._read_history(report.number)
        elif not self._read:
            self._read_history()
        self._read = True

    def _say(self, report: BenchReport) -> None:
        outcome = self.query_one("#bench-outcome", Static)
        outcome.display = report.state in _ENDINGS
        if outcome.display:
            glyph, style = _ENDINGS[report.state]
            line = Content.assemble(
                (f" {glyph} ", f"bold {style}"), (f"{report.bench}: {report.outcome}", "$foreground")
            )
            outcome.update(for_terminal(self.app, line))

    def _read_history(self, choose: int = 0) -> None:
        self.run_worker(self._reading(choose), group="history", exclusive=True, exit_on_error=False)

    async def _reading(self, choose: int) -> None:
        if self._screen.console.view.link_status.reach == "recording":
            self.table.show((), empty="A recording holds no benchmark results.")
            return
        try:
            self._entries = await self._link.benches.history()
        except EngineError as error:
            self.table.show((), empty=error.message)
            return
        numbers = [entry.id for entry in self._entries]
        self._marked = [each for each in self._marked if each in numbers]
        self._show_entries()
        if choose in numbers:
            self.table.move_to(numbers.index(choose))
        elif self.table.chosen is None and numbers:
            self.table.move_to(0)
        self._plot()

    def _show_entries(self) -> None:
        is_read_only = self._screen.console.view.is_read_only
        self.table.show_entries(self._entries, self._marked, read_only=is_read_only)
        self._screen.offer_keys()
        results = self.query_one("#bench-results")
        set_subtitle(results, plural(len(self._entries), "result") if self._entries else "")

    @property
    def _entry(self) -> BenchEntry | None:
        return next((each for each in self._entries if each.id == self.table.chosen), None)

    def on_table_moved(self, event: Table.Moved) -> None:
        """The plot of another result."""
        if event.table is self.table:
            self._plot()

    @work(group="plot", exclusive=True, exit_on_error=False)
    async def _plot(self) -> None:
        entry, plot = self._entry, self.query_one(BenchPlot)
        if entry is None:
            plot.clear("The selected result is plotted here.")
            return
        try:
            result = await self._result(entry)
            columns = plottable_columns(result)
            column = columns[self._number % len(columns)] if columns else None
            if self._over_time and column is not None:
                over = trend(result, column, await self._like(entry))
                plot.show(over.found, column, over.about)
            else:
                plot.show(result, column)
        except EngineError as error:
            plot.clear(error.message)
            return
        set_subtitle(plot, f"p plots another of {len(columns)} numbers" if len(columns) > 1 else "")

    async def _like(self, entry: BenchEntry) -> dict[int, BenchResult]:
        """The newest results of the same bench, model and place, the newest first."""
        alike = [
            each
            for each in self._entries
            if (each.bench, each.model, each.target) == (entry.bench, entry.model, entry.target)
        ]
        return {each.id: await self._result(each) for each in alike[:MAX_OVER_TIME]}

    async def _result(self, entry: BenchEntry) -> BenchResult:
        """Read once: a result never changes."""
        key = entry.id, entry.started
        if key not in self._results:
            self._results[key] = await self._link.benches.result(entry.id)
        return self._results[key]

    # -- what can be done ---------------------------------------------------------------------------------------------

    def action_new(self) -> None:
        """Choose one."""
        screen = self._screen
        form = BenchFormScreen(self._link, model=screen.console.view.model_name, draft=self._draft)
        self.app.push_screen(form, lambda begun: screen.redraw() if begun else None)

    @property
    def _screen(self) -> AppScreen[Any]:
        assert isinstance(self.screen, AppScreen)
        return self.screen

    def action_cancel(self) -> None:
        """Cancel the running bench."""
        self._screen.console.perform(self._link.benches.cancel())

    def action_number(self, by: int) -> None:
        """Another number of the result."""
        self._number += by
        self._plot()

    def action_time(self) -> None:
        """From run to run, or the rows of one."""
        self._over_time = not self._over_time
        self._plot()

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Open it."""
        entry = self._entry
        if event.table is self.table and entry is not None:
            self.run_worker(self._open(entry), group="open", exclusive=True, exit_on_error=False)

    async def _open(self, entry: BenchEntry) -> None:
        try:
            self.app.push_screen(BenchResultScreen(entry.id, await self._result(entry)))
        except EngineError as error:
            self._complain(error)

    def action_mark(self) -> None:
        """Mark it, or not any more; of three the oldest mark goes."""
        number = self.table.chosen
        if number is None:
            return
        if number in self._marked:
            self._marked.remove(number)
        else:
            self._marked = [*self._marked[-1:], number]
        self._show_entries()

    def action_compare(self) -> None:
        """The two marked, or the marked one and the selected one: the older before the newer."""
        numbers = sorted({*self._marked, *([self.table.chosen or 0] if len(self._marked) < 2 else [])})
        pair = [entry for number in numbers for entry in self._entries if entry.id == number]
        if len(pair) != 2:
            self.notify("Mark a result with space, then select another one.")
            return
        self.run_worker(self._comparing(pair[0], pair[1]), group="open", exclusive=True, exit_on_error=False)

    async def _comparing(self, before: BenchEntry, after: BenchEntry) -> None:
        try:
            found = compare(await self._result(before), await self._result(after))
        except EngineError as error:
            self._complain(error)
        else:
            self.app.push_screen(BenchComparisonScreen(before.id, after.id, found))

    def action_forget(self) -> None:
        """Ask first."""
        entry = self._entry
        if entry is None:
            self.notify("No result to delete.")
            return
        question = ConfirmScreen(
            f"Delete result {entry.id}?",
            f"{entry.bench} of {entry.model}, {entry.headline}. It is also removed from 'ericllm bench history'.",
            yes="Delete",
            no="Cancel",
        )
        self.app.push_screen(question, lambda yes: self._forget(entry) if yes else None)

    def _forget(self, entry: BenchEntry) -> None:
        async def forget() -> None:
            await self._link.benches.forget(entry.id)
            self._read_history()

        self._screen.console.perform(forget(), done=f"Result {entry.id} deleted")

    def _complain(self, error: EngineError) -> None:
        self.notify(error.message[:1].upper() + error.message[1:], severity="error", markup=False, timeout=8)
