"""docs/sampling.md's table: every sampling parameter by backend.

`python -m tools.docs_pages.sampling` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import msgspec

from engine.backends.parameters import BACKENDS, lacking
from engine.config import PARAMETERS, RANGES, TINY


def table() -> str:
    """Return parameter x backend as Markdown: one line for each field of SamplingParams."""
    return "\n".join(_lines(PARAMETERS))


def support_differences() -> str:
    """Return the part of `table` that not every backend supports."""
    return "\n".join(_lines([name for name in PARAMETERS if lacking(name)]))


def bounds(name: str) -> str:
    """Return the range of a parameter in words; "" for one that is not a number."""
    if name not in RANGES:
        return ""
    low, high = RANGES[name]
    return f"more than 0, up to {high:g}" if low == TINY else f"{_number(low)} to {_number(high)}"


def _lines(names: Iterable[str]) -> Iterator[str]:
    yield f"| parameter | neutral | range | {' | '.join(BACKENDS)} |"
    yield f"|---|---|---|{'---|' * len(BACKENDS)}"
    for name in names:
        reasons = lacking(name)
        cells = [f"no: {reasons[backend]}" if backend in reasons else "yes" for backend in BACKENDS]
        neutral = msgspec.json.encode(PARAMETERS[name].neutral).decode()
        yield f"| `{name}` | `{neutral}` | {bounds(name)} | {' | '.join(cells)} |"


def _number(value: float) -> str:
    """Format a bound; a power of 2 as one."""
    whole = int(value) if value == int(value) else None
    if whole is not None and abs(whole) > 10**6:
        power = (abs(whole) + 1).bit_length() - 1
        return f"{'-' if whole < 0 else ''}2^{power}{'' if abs(whole) == 2**power else '-1'}"
    return f"{value:g}"


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
