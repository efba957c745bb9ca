"""Sampling parameters by backend: the refusal of what a backend lacks, and the table of the documentation.

`python -m engine.backends.parameters` prints it as it stands in docs/sampling.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import get_args

import msgspec

from engine.config import PARAMETERS, RANGES, TINY, BackendKind, SamplingParams
from engine.errors import InvalidRequest
from engine.samplers import added_parameters

BACKENDS: tuple[BackendKind, ...] = get_args(BackendKind)

_NEUTRAL = SamplingParams()
_ADDED = frozenset(row.name for row in added_parameters())
_LIBRARIES: Mapping[str, str] = {
    backend: "its library has no such sampler" for backend in BACKENDS if backend != "torch"
}
"""Only torch applies the files of engine/samplers/."""


def lacking(name: str) -> Mapping[str, str]:
    """Return why backends do not support a parameter, by backend; all others support it."""
    row = PARAMETERS[name]
    if row.part_of:
        return lacking(row.part_of)
    return {**_LIBRARIES, **row.lacking} if name in _ADDED else row.lacking


def refuse_lacking(params: SamplingParams, backend: str) -> None:
    """Raise InvalidRequest naming the first parameter that is not neutral and that `backend` lacks."""
    for name, reason in _refusals(backend):
        if getattr(params, name) != getattr(_NEUTRAL, name):
            raise InvalidRequest(
                f"{name} is not supported by the {backend} backend: {reason}", param=name, backend=backend
            )


@cache
def _refusals(backend: str) -> tuple[tuple[str, str], ...]:
    """Parameters that the backend lacks, and why; those that are part of another one are left to that."""
    rows = [row for row in PARAMETERS.values() if not row.part_of]
    return tuple((row.name, lacking(row.name)[backend]) for row in rows if backend in lacking(row.name))


def bounds(name: str) -> str:
    """Return the range of a parameter in words; "" for one that is not a number."""
    if name not in RANGES:
        return ""
    low, high = RANGES[name]
    return f"more than 0, up to {high:g}" if low == TINY else f"{_number(low)} to {_number(high)}"


def support_differences() -> str:
    """Return the part of `table` that not every backend supports."""
    return "\n".join(_lines([name for name in PARAMETERS if lacking(name)]))


def table() -> str:
    """Return parameter x backend as Markdown: one line for each field of SamplingParams."""
    return "\n".join(_lines(PARAMETERS))


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
