"""docs/api/parameters.md: what every endpoint of every dialect honours, clamps, refuses and leaves aside.

It is made of the tables that requests are read and refused by. `python -m console.api.parameter_page` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator

from console.api.body import Body
from console.api.context import ApiContext
from console.api.described import described_of
from console.api.dialects import DIALECTS, Dialect
from console.api.parameter_rows import HEAD, REFUSED_HEAD, bodies_within, inert_of, refused_lines, refused_of, rows_of
from console.api.parameters import SAMPLING_REFUSED
from console.api.sampling import SamplingFields
from console.api.settings import ApiSettings
from engine.backends.parameters import differing
from engine.config import EngineConfig
from engine.engine import Engine

_INTRO = """# Parameters, dialect by dialect

Made by `python -m console.api.parameter_page > docs/api/parameters.md` of the tables that requests are read and refused
by; a test compares the two. What a field of a body is:

* **honoured**: it does what its client expects. A value out of its bounds is a 400 that names the field.
* **clamped**: likewise, but some values are brought to what there is room for, or to what means the same. Its line says
  which and to what.
* **refused**: not honoured. The values that change nothing pass; any other is a 400 that names the field and says why.
* **inert**: taken, whatever its value: it changes nothing about an answer.
* any other: a 400 that names it.

`null` is the same as leaving a field out. Bodies and errors name fields as the client sent them."""

_BACKENDS = """## By backend

What not every backend honours, by the engine's name for it ([sampling.md](../sampling.md) has all of them). Where the
loaded model's backend does not, any value but the neutral one is a 400."""

_SAMPLING = """## Sampling

Fields of every endpoint that says so below. Where a default is `null`, what the model's makers recommend counts, else
the neutral value."""


def page() -> str:
    """The whole page."""
    return "\n".join(_Page().lines())


def bodies(*dialects: Dialect) -> dict[type[Body], list[str]]:
    """What endpoints of those dialects (of all, where none is named) take, and which ones take it."""
    context = ApiContext(Engine(EngineConfig()), ApiSettings())
    found: dict[type[Body], list[str]] = {}
    for dialect in dialects or DIALECTS:
        for endpoint in dialect.endpoints:
            for route in endpoint(context).routes():
                for described in described_of(route.handler):
                    if described.body is not None and issubclass(described.body, Body):
                        found.setdefault(described.body, []).append(f"{route.method} {route.path}")
    return found


class _Page:
    """The page while it is written: each body is told of in full where it comes first."""

    def __init__(self) -> None:
        self._sampling = rows_of(SamplingFields)
        self._told: dict[type[Body], str] = {}

    def lines(self) -> Iterator[str]:
        """Its lines, from the first to the last."""
        yield from (_INTRO, "", _BACKENDS, "", differing(), "", _SAMPLING, "", HEAD)
        yield from (row.line for row in self._sampling.values())
        yield from ("", "Refused with them, but where an endpoint honours one:", "", REFUSED_HEAD)
        yield from refused_lines(dict(SAMPLING_REFUSED))
        for dialect in DIALECTS:
            yield from ("", f"## {dialect.title}")
            for body, places in bodies(dialect).items():
                yield from self._body(body, ", ".join(f"`{place}`" for place in places))

    def _body(self, body: type[Body], title: str) -> Iterator[str]:
        yield from ("", f"### {title}", "")
        if (likeness := self._likeness(body)) is not None:
            yield likeness
            return
        self._told[body] = title
        samples = issubclass(body, SamplingFields)
        yield from self._honoured(body, samples)
        yield from self._refused(body, samples)
        if inert := inert_of(body):
            yield from ("", f"Inert: {', '.join(f'`{name}`' for name in inert)}.")
        for name, inner in bodies_within(body):
            if inner not in self._told:
                yield from self._body(inner, f"`{name}` of {title}")

    def _likeness(self, body: type[Body]) -> str | None:
        """A body that was told of, or lacks some fields of one that was, in a sentence."""
        for told, title in self._told.items():
            if issubclass(told, body):
                return f"As {title}{_without(told.model_fields, body.model_fields, ', but without ')}."
        return None

    def _honoured(self, body: type[Body], samples: bool) -> Iterator[str]:
        rows = rows_of(body)
        own = [row for name, row in rows.items() if not (samples and self._sampling.get(name) == row)]
        if samples:
            yield f"The fields of [sampling](#sampling){_without(self._sampling, rows, ' but for ')}, and:"
            yield ""
        yield HEAD
        yield from (row.line for row in own)

    def _refused(self, body: type[Body], samples: bool) -> Iterator[str]:
        refused = refused_of(body)
        shared = {name for name, refusal in refused.items() if SAMPLING_REFUSED.get(name) == refusal}
        own = {name: refusal for name, refusal in refused.items() if not (samples and name in shared)}
        if samples and shared:
            yield from ("", f"Refused: those of [sampling](#sampling){', and:' if own else '.'}")
        elif own:
            yield from ("", "Refused:")
        if own:
            yield from ("", REFUSED_HEAD)
            yield from refused_lines(own)


def _without(all_names: Iterable[str], names: Container[str], lead: str) -> str:
    """Which of them are not there, after `lead`; "" where all are."""
    missing = [f"`{name}`" for name in all_names if name not in names]
    return lead + ", ".join(missing) if missing else ""


if __name__ == "__main__":
    sys.stdout.write(page() + "\n")
