"""Foreign text as something a terminal, a log or a page can show: control characters become visible escapes.

Unsafe are C0, DEL and C1 (a terminal obeys them), the bidirectional controls (they reorder what a person reads), the
Unicode line and paragraph separators, and lone surrogates (no encoding of text has them).
"""

from __future__ import annotations

import re
import reprlib

_UNSAFE = (
    (0x00, 0x1F),
    (0x7F, 0x9F),
    (0x061C, 0x061C),
    (0x200E, 0x200F),
    (0x2028, 0x202E),
    (0x2066, 0x2069),
    (0xD800, 0xDFFF),
)
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for first, last in _UNSAFE
    for code in range(first, last + 1)
} | str.maketrans({"\t": r"\t", "\n": r"\n", "\r": r"\r"})
_ESCAPES_IN_LINES = {code: escape for code, escape in _ESCAPES.items() if chr(code) not in "\n\t"}
_ESCAPES_IN_JSON = {code: f"\\u{code:04x}" for code in _ESCAPES if chr(code) not in "\n\r\t"}
ANY_UNSAFE = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in _UNSAFE) + "]")
"""Matches an unsafe character."""
UNSAFE_IN_LINES = re.compile(rf"{ANY_UNSAFE.pattern}(?<![\n\t])")
"""Matches one that is neither a newline nor a tab."""


def printable(text: str) -> str:
    r"""Return `text` as one line in which every unsafe character is a visible escape: `\x1b`, `\n`, `\u202e`.

    Text without one is returned as it is, at the cost of a scan. The escapes are up to six times as long.
    """
    if text.isprintable() or ANY_UNSAFE.search(text) is None:
        return text
    return text.translate(_ESCAPES)


def printable_lines(text: str) -> str:
    """As `printable`, with newlines and tabs kept."""
    if text.isprintable() or UNSAFE_IN_LINES.search(text) is None:
        return text
    return text.translate(_ESCAPES_IN_LINES)


def printable_json(text: str) -> str:
    """Return JSON that means the same, with every unsafe character in its strings as JSON's own escape."""
    if text.isprintable() or UNSAFE_IN_LINES.search(text) is None:
        return text
    return text.translate(_ESCAPES_IN_JSON)


# Numbers, durations and foreign values in messages.

_SHOWN_DIGITS = 24
_QUOTED_CHARACTERS = 100


def format_number(number: float) -> str:
    """Return a number that was asked for, exactly; only the start of a very long one."""
    digits = str(number)
    return digits if len(digits) <= _SHOWN_DIGITS else f"{digits[:_SHOWN_DIGITS]}..."


def format_seconds(value_s: float | None) -> str:
    """ "14 ms", "1.24 s", "2:05", "<0.1 ms", "–" for what is not known."""
    if value_s is None:
        return "–"
    if 0 < value_s < 0.00005:
        return "<0.1 ms"
    if 0 < value_s < 0.0095:
        return f"{value_s * 1000:.1f} ms"
    if value_s < 0.9995:
        return f"{value_s * 1000:.0f} ms"
    if value_s < 99.95:
        return f"{value_s:.2f} s" if value_s < 9.995 else f"{value_s:.1f} s"
    return f"{int(value_s // 60)}:{int(value_s % 60):02d}"


def quote_value(value: object, max_characters: int = _QUOTED_CHARACTERS) -> str:
    """Return an untrusted value for a message: on one line, only the start of a long one, without control characters of
    a terminal."""
    text = value if isinstance(value, str) else reprlib.repr(value)
    line = printable(text[: max_characters + 1])
    if not line.isprintable():  # nothing that is not seen, either
        line = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)
    return line if len(line) <= max_characters else f"{line[:max_characters]}..."
