"""Which backend honours which sampling parameter: the one table, and the refusal of what a backend lacks.

`python -m engine.backends.parameters` prints it as it stands in docs/sampling.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

import msgspec

from engine.config import RANGES, TINY, BackendKind, SamplingParams
from engine.errors import InvalidRequest

BACKENDS: tuple[BackendKind, ...] = get_args(BackendKind)

_STATEFUL = "its state follows from all choices so far, and a request that lost its worker has those no more"
_ONE_SEQUENCE = "it computes one sequence per request, not a second one for the negative prompt"
_LAST_LOGITS = "its generator keeps the logits of a prompt's last token alone"

LACKING: Mapping[str, Mapping[str, str]] = {
    "mirostat": {"torch": _STATEFUL},
    "cfg_scale": {"torch": _ONE_SEQUENCE},
    "prompt_logprobs": {"exllamav2": _LAST_LOGITS},
}
"""Why a backend does not honour a parameter. Whatever is not here, every backend honours."""

PART_OF: Mapping[str, str] = {
    "mirostat_tau": "mirostat",
    "mirostat_eta": "mirostat",
    "negative_prompt_ids": "cfg_scale",
}
"""Parameters that mean something only while another one is on."""

_NEUTRAL = SamplingParams()


def refuse_lacking(params: SamplingParams, backend: str) -> None:
    """Raise InvalidRequest naming the first parameter that is not neutral and that `backend` lacks."""
    for name, reasons in LACKING.items():
        if backend in reasons and getattr(params, name) != getattr(_NEUTRAL, name):
            raise InvalidRequest(
                f"{name} is not supported by the {backend} backend: {reasons[backend]}", param=name, backend=backend
            )


def bounds(name: str) -> str:
    """Between what a parameter lies, in words; "" for one that is no number."""
    if name not in RANGES:
        return ""
    low, high = RANGES[name]
    return f"more than 0, up to {high:g}" if low == TINY else f"{_number(low)} to {_number(high)}"


def differing() -> str:
    """The same as `table`, of those that not every backend honours."""
    return "\n".join(_lines([name for name in SamplingParams.__struct_fields__ if PART_OF.get(name, name) in LACKING]))


def table() -> str:
    """Parameter x backend as Markdown: one line for each field of SamplingParams."""
    return "\n".join(_lines(SamplingParams.__struct_fields__))


def _lines(names: Iterable[str]) -> Iterator[str]:
    yield f"| parameter | neutral | range | {' | '.join(BACKENDS)} |"
    yield f"|---|---|---|{'---|' * len(BACKENDS)}"
    for name in names:
        reasons = LACKING.get(PART_OF.get(name, name), {})
        cells = [f"no: {reasons[backend]}" if backend in reasons else "yes" for backend in BACKENDS]
        neutral = msgspec.json.encode(getattr(_NEUTRAL, name)).decode()
        yield f"| `{name}` | `{neutral}` | {bounds(name)} | {' | '.join(cells)} |"


def _number(value: float) -> str:
    """A bound; a power of 2 as one."""
    whole = int(value) if value == int(value) else None
    if whole is not None and abs(whole) > 10**6:
        power = (abs(whole) + 1).bit_length() - 1
        return f"{'-' if whole < 0 else ''}2^{power}{'' if abs(whole) == 2**power else '-1'}"
    return f"{value:g}"


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
