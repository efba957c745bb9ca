"""Numbers and foreign values in messages."""

from __future__ import annotations

import reprlib

from engine.text.printable import printable

_SHOWN_DIGITS = 24
_QUOTED_CHARACTERS = 100


def shown(number: float) -> str:
    """A number that was asked for, exactly; the start of one so long that nobody would read it."""
    digits = str(number)
    return digits if len(digits) <= _SHOWN_DIGITS else f"{digits[:_SHOWN_DIGITS]}..."


def quoted(value: object, max_characters: int = _QUOTED_CHARACTERS) -> str:
    """A value from a file that anybody may have written, for a message: on one line, its start alone where it is long,
    and nothing in it that a terminal would obey."""
    text = value if isinstance(value, str) else reprlib.repr(value)
    line = printable(text[: max_characters + 1])
    if not line.isprintable():  # nothing that is not seen, either
        line = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)
    return line if len(line) <= max_characters else f"{line[:max_characters]}..."
