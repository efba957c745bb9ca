"""What commands print: results on stdout, sentences on stderr. Nothing that it quotes steers a terminal."""

from __future__ import annotations

import sys

from console.settings import APP_NAME
from engine.text.printable import printable, printable_json, printable_lines


def write(text: str, *, as_json: bool = False) -> None:
    """Print a result of one line or several; as_json: one that a program reads as what it was made of."""
    sys.stdout.write(f"{printable_json(text) if as_json else printable_lines(text)}\n")


def say(sentence: str) -> None:
    """Print a line on stderr, its end with it: the log may write there from another thread."""
    sys.stderr.write(f"{APP_NAME}: {printable(sentence)}\n")
    sys.stderr.flush()
