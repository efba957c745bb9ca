"""Numbers in messages."""

from __future__ import annotations

_SHOWN_DIGITS = 24


def shown(number: float) -> str:
    """A number that was asked for, exactly; the start of one so long that nobody would read it."""
    digits = str(number)
    return digits if len(digits) <= _SHOWN_DIGITS else f"{digits[:_SHOWN_DIGITS]}..."
