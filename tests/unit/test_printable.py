"""Foreign text becomes something that a terminal shows and does not obey."""

from __future__ import annotations

import subprocess
import sys
import unicodedata

import pytest

from engine.text.printable import printable, printable_lines
from tests.fakes.bounds import within_bounds

UNSAFE = {char for char in map(chr, range(0x110000)) if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")} | set(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;QQ==\x1b\\", r"\x1b]52;c;QQ==\x1b" + "\\"),
        ("\x9d0;title\x9c", r"\x9d0;title\x9c"),
        ("one\ntwo\r\n\tthree", r"one\ntwo\r\n\tthree"),
        ("pay \u202eecila\u202c", r"pay \u202eecila\u202c"),
        ("a\u2028b\u2029c\x85d", r"a\u2028b\u2029c\x85d"),
        ("half \ud800", r"half \ud800"),
        ("\x00\x7f", r"\x00\x7f"),
    ],
)
def test_a_control_character_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_every_unsafe_character_is_replaced_and_nothing_else() -> None:
    every = [chr(code) for code in range(0x110000)]
    assert not UNSAFE & set(printable("".join(every)))
    harmless = "".join(char for char in every if char not in UNSAFE)
    assert printable(harmless) is harmless


def test_clean_text_is_returned_as_it_is() -> None:
    for text in ("", "plain", "naïve 漢字 مرحبا 👩‍👩‍👧", "no\u00a0break", r"C:\x1b", "\u200b\u200d"):
        assert printable(text) is text
        assert printable_lines(text) is text
    assert printable_lines("one\n\ttwo") == "one\n\ttwo"


def test_lines_are_kept_where_lines_are_made() -> None:
    assert printable_lines("one\r\n\ttwo\x1b[2J\u2028") == "one\\r\n\ttwo\\x1b[2J\\u2028"


def test_a_body_of_control_characters_is_cheap() -> None:
    text = "\x1b" * (2 * 2**20)
    with within_bounds(4 * len(text)):
        assert len(printable(text)) == 4 * len(text)


def test_it_loads_no_torch_and_no_terminal_toolkit() -> None:
    code = "import sys, engine.text.printable; assert not {'torch', 'rich', 'textual'} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
