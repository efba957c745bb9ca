"""The filter between widgets and the terminal: what it drops, what it leaves, and that a line is filtered once."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.color import Color
from textual.content import Content
from textual.strip import Strip
from textual.widgets import Input, Label, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from console.text import clip
from console.tui.printable_filter import PrintableFilter
from console.tui.stylesheet import StyledApp, Stylesheet
from console.tui.widgets.glyphs import escape_unsafe
from console.tui.widgets.table import cell, side_by_side
from engine.text.printable import ANY_UNSAFE
from tests.fakes.hostile import STEERS
from tests.ui.seen import rows, until
from tests.ui.test_hostile_text import Recorder, steering

BLACK = Color(0, 0, 0)


def filtered(*segments: Segment) -> list[Segment]:
    return PrintableFilter().apply([*segments], BLACK)


def test_clean_segments_are_not_touched() -> None:
    segments = [Segment("naïve 漢字 ▁▂", Style(bold=True)), Segment(" "), Segment("👩‍👩‍👧\u00a0")]
    assert PrintableFilter().apply(segments[:2], BLACK) == segments[:2]
    assert filtered(*segments) == segments


@pytest.mark.parametrize(
    "text", [STEERS, "\x1b[31mred\x1b[0m", "\x9d0;t\x9c", "a\ud800b", "👩\u200d\u200e👧", "\u202eabc", "\t"]
)
def test_what_a_terminal_obeys_is_dropped_and_the_line_stays_as_wide(text: str) -> None:
    style = Style(bold=True, meta={"@click": "own"})
    (found,) = filtered(Segment(text, style))
    assert ANY_UNSAFE.search(found.text) is None
    assert cell_len(found.text) == cell_len(text)
    assert found.style == style
    strip = Strip([Segment("before "), Segment(text, style), Segment(" after")])
    after = strip.apply_filter(PrintableFilter(), BLACK)
    assert after.cell_length == strip.cell_length == sum(cell_len(segment.text) for segment in after)


@pytest.mark.parametrize(
    "text",
    ["a" + "\u0301" * 9000, "👩\u200d" * 4000, "\u200b" * 9000, "x\U000e0041" + "\ufe0f" * 9000],
    ids=["marks", "joiners", "blanks", "variants"],
)
def test_no_flood_of_marks_reaches_the_terminal(text: str) -> None:
    found = filtered(Segment("before"), Segment(text, Style(bold=True)), Segment("👨‍👩‍👧‍👦 Z̷̗͇͓̑"))
    assert [cell_len(each.text) for each in found] == [6, cell_len(text), 4]
    assert len(found[1].text) <= 8 * (cell_len(text) + 1)
    assert (found[0].text, found[2].text) == ("before", "👨‍👩‍👧‍👦 Z̷̗͇͓̑")


def test_no_link_reaches_the_terminal() -> None:
    (found,) = filtered(Segment("here", Style(link="http://e/\x1b]52;c;QQ==\x07", underline=True)))
    assert found.style is not None and found.style.link is None and found.style.underline
    assert "\x1b]8" not in Strip([found]).render(StyledApp().console)


class Everything(StyledApp):
    """Every kind of widget that foreign text comes into, without markup."""

    TOOLTIP_DELAY = 0.01

    def compose(self) -> ComposeResult:
        """One of each."""
        yield Static(f"{STEERS}static", markup=False)
        yield Label(f"{STEERS}label", markup=False)
        yield Static(Content.styled(f"{STEERS}link", "link='http://e/'"), id="link")
        yield Input(f"{STEERS}input")
        yield TextArea(f"{STEERS}area")
        yield OptionList(Option(Content(f"{STEERS}option")))

    def on_mount(self) -> None:
        """Titles, a toast and a tooltip."""
        label = self.query_one(Label)
        label.styles.width = "1fr"
        label.styles.border = ("solid", "red")
        label.border_title = Content(f"{STEERS}title")
        label.tooltip = Content(f"{STEERS}tooltip")
        self.notify(f"{STEERS}toast", title=f"{STEERS}head", markup=False)


async def test_every_kind_of_widget_passes_the_filter() -> None:
    app = Everything()
    app.stylesheet = Stylesheet(variables=app.get_css_variables())
    app.driver_class = Recorder
    async with app.run_test(size=(80, 40), headless=False, notifications=True, tooltips=True) as pilot:
        driver = app._driver
        await pilot.pause()
        await pilot.hover(Label)
        await until(pilot, lambda: "tooltip" in "".join(rows(app)))
    assert isinstance(driver, Recorder)
    written = "".join(driver.written)
    for word in ("static", "label", "link", "input", "area", "option", "title", "toast", "head"):
        assert word in written, word
    assert steering(written) == []


async def test_a_line_is_filtered_once_however_often_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    apply = PrintableFilter.apply

    def counted(self: PrintableFilter, segments: list[Segment], background: Color) -> list[Segment]:
        nonlocal calls
        calls += 1
        return apply(self, segments, background)

    monkeypatch.setattr(PrintableFilter, "apply", counted)
    app = Everything()
    app.stylesheet = Stylesheet(variables=app.get_css_variables())
    async with app.run_test(size=(80, 40)) as pilot:
        await pilot.pause()
        rows(app)
        assert calls > 10
        before = calls
        for _ in range(20):
            rows(app)
        assert calls == before


def test_a_person_sees_escapes_where_there_is_room_for_them() -> None:
    row = side_by_side([((("a\x1bb", "bold"), ("c", "")), 9, "left"), (cell("\u202ex"), 7, "right")], 1)
    assert row.plain == r"a\x1bbc   \u202ex"
    assert [(span.start, span.end, str(span.style)) for span in row.spans] == [(0, 6, "bold")]
    assert side_by_side([(cell("\x1b" * 9), 8, "left")], 1).plain == r"\x1b\x1…"
    assert clip("one\x1b \n two\x9b", 40) == r"one\x1b two\x9b"
    shown = escape_unsafe(Content.assemble(("a\x1b", "bold"), "b\n\tc", ("\x9b", "red")))
    assert shown.plain == "a\\x1bb\n\tc\\x9b"
    assert [(span.start, span.end, str(span.style)) for span in shown.spans] == [(0, 1, "bold")]
    clean = Content("漢字\n\tc")
    assert escape_unsafe(clean) is clean
