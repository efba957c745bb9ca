"""Characters that the console draws with: blocks, or ASCII where a terminal has none."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from textual.app import App
from textual.content import Content

from engine.text.printable import UNSAFE_IN_LINES, printable

COLUMNS = " ▁▂▃▄▅▆▇█"
ROWS = " ▏▎▍▌▋▊▉█"
ASCII_COLUMNS = " ._-=+*##"

_TO_ASCII = str.maketrans(
    {
        "●": "*",
        "○": "o",
        "◔": "%",
        "◒": "~",
        "◌": ".",
        "↻": "@",
        "✖": "!",
        "✓": "v",
        "◆": "#",
        "◇": "^",
        "▲": "!",
        "▸": ">",
        "▾": "v",
        "■": "#",
        "□": ".",
        "·": "|",
        "×": "x",
        "≠": "!",
        "−": "-",
        "–": "-",
        "→": ">",
        "↑": "^",
        "‹": "<",
        "›": ">",
        "↓": "v",
        "≈": "=",
        "≤": "<",
        "…": "~",
        "•": "*",
        "⏎": "<",
        "▼": "v",
        "▏": "|",
        "°": " ",
        "█": "#",
        "░": ".",
        "━": "=",
        "╸": "-",
        "▕": "|",
        "┊": ":",
        "─": "-",
    }
)


_KEY_NAMES = {"⏎": "enter", "⌫": "bksp", "⇥": "tab", "←": "left", "→": "right", "↑": "up", "↓": "down"}


def key_name(app: App[Any], shown: str) -> str:
    """Return the name of a key: a glyph where the terminal has it, else a word."""
    return _KEY_NAMES.get(shown, shown) if is_ascii(app) else shown


def wants_ascii(environ: Mapping[str, str] = os.environ, encoding: str | None = None) -> bool:
    """Return whether the terminal lacks block characters: its locale is not UTF-8, or it is the Linux console."""
    encoding = encoding if encoding is not None else getattr(sys.__stdout__, "encoding", None) or "utf-8"
    return not encoding.lower().replace("-", "").startswith("utf") or environ.get("TERM") == "linux"


def is_ascii(app: App[object]) -> bool:
    """Return whether this app draws in ASCII."""
    return app.has_class("-ascii")


def is_lettered(app: App[object]) -> bool:
    """Return whether the parts of a bar are marked by letters: block characters or colours are lacking."""
    return is_ascii(app) or app.no_color


def to_ascii(text: str) -> str:
    """`text` with our glyphs replaced, character by character."""
    return text.translate(_TO_ASCII)


def escape_unsafe(content: Content) -> Content:
    """Return `content` with what a terminal would obey as visible escapes; colours, links, newlines and tabs
    stay."""
    if content.plain.isprintable() or UNSAFE_IN_LINES.search(content.plain) is None:
        return content
    parts, at = list[Content](), 0
    for found in UNSAFE_IN_LINES.finditer(content.plain):
        parts += content[at : found.start()], Content(printable(found[0]))
        at = found.end()
    return Content("").join([*parts, content[at:]])


def for_terminal(app: App[object], content: Content) -> Content:
    """Return `content` in characters that the terminal has: ours are replaced one by one, so colours and links stay;
    foreign ones that it would obey are escapes."""
    content = escape_unsafe(content)
    if not is_ascii(app):
        return content
    return Content(to_ascii(content.plain), spans=list(content.spans))
