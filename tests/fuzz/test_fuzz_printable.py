"""Any text becomes one that steers no terminal, loses nothing else, and takes the cells it took."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.strip import Strip

from console.tui.printable_filter import PrintableFilter
from engine.text.printable import ANY_UNSAFE, printable, printable_json, printable_lines

pytestmark = pytest.mark.long

ANY = st.text(st.characters(), max_size=80)
"""Surrogates, too."""
JOINED = "\u061c\u200e\u200f\ud800\udfff\u200d\ufe0f\u0301👩e漢[\\🇩🇪"
STEERING = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A))))
UNSAFE = st.text(st.sampled_from(STEERING + JOINED), max_size=40)
TEXT = ANY | UNSAFE | st.tuples(ANY, UNSAFE, ANY).map("".join)
BLACK = Color(0, 0, 0)


@settings(derandomize=True, max_examples=3000, deadline=None)
@given(TEXT)
def test_any_text_becomes_printable(text: str) -> None:
    shown = printable(text)
    assert ANY_UNSAFE.search(shown) is None
    assert printable(shown) is shown
    assert len(shown.splitlines()) <= 1
    assert ANY_UNSAFE.sub("", text) == "".join(char for char in text if not ANY_UNSAFE.match(char))
    lines = printable_lines(text)
    assert ANY_UNSAFE.search(lines.replace("\n", "").replace("\t", "")) is None
    assert (lines.count("\n"), lines.count("\t")) == (text.count("\n"), text.count("\t"))
    assert lines.replace("\n", r"\n").replace("\t", r"\t") == shown


@settings(derandomize=True, max_examples=1500, deadline=None)
@given(TEXT.filter(lambda text: not re.search("[\ud800-\udfff]", text)))
def test_json_means_the_same(text: str) -> None:
    encoded = printable_json(json.dumps({text: [text]}, ensure_ascii=False, indent=1))
    assert ANY_UNSAFE.search(encoded.replace("\n", "")) is None
    assert json.loads(encoded) == {text: [text]}


@settings(derandomize=True, max_examples=3000, deadline=None)
@given(st.lists(st.tuples(TEXT, st.sampled_from([None, Style(bold=True), Style(link="x\x1b")])), max_size=6))
def test_a_filtered_line_takes_the_cells_it_took(parts: list[tuple[str, Style | None]]) -> None:
    strip = Strip([Segment(text, style) for text, style in parts])
    after = strip.apply_filter(PrintableFilter(), BLACK)
    assert after.cell_length == strip.cell_length
    for old, new in zip(strip, after, strict=True):
        assert cell_len(new.text) == cell_len(old.text)
        assert ANY_UNSAFE.search(new.text) is None
        assert new.style is None or new.style.link is None
