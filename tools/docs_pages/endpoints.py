"""docs/api/endpoints.md: every path that the server answers, made of what each endpoint says of itself.

`python -m tools.docs_pages.endpoints` prints it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from console.api.http.scopes import is_open, scope_needed
from console.api.openapi import Place
from console.runtime.runtime import Runtime
from console.settings.schema import Settings

_INTRO = """# Endpoints

Made by `python -m tools.docs_pages.endpoints > docs/api/endpoints.md` of what each endpoint says of itself, as
`/openapi.json` is, which has the schemas of bodies and answers too; a test compares the two. What the fields of a body
mean and which are honoured: [parameters.md](parameters.md). `POST` takes JSON. A key needs the scope that is named, or
`admin`; without keys this machine's programs need none: [security.md](security.md)."""


def page() -> str:
    """The whole page."""
    return "\n".join(_lines(Runtime(Settings()).api.places()))


def _lines(places: Sequence[Place]) -> Iterator[str]:
    yield _INTRO
    for group in dict.fromkeys(group for place in places for group in place.groups):
        yield from ("", f"## {group[:1].upper()}{group[1:]}", "", "| | | key |", "|---|---|---|")
        inside = [place for place in places if group in place.groups]
        for place in inside:
            yield f"| `{place.method} {place.path}` | {_summary(place)} | {_key(place)} |"
        for place in inside:
            if place.groups[0] == group:
                yield from _details(place)


def _summary(place: Place) -> str:
    text = " / ".join(dict.fromkeys(each.summary for each in place.described)) or "-"
    return text.replace("|", "\\|")


def _key(place: Place) -> str:
    if is_open(place.path):
        return "none"
    return scope_needed(place.method, place.path) or "any"


def _details(place: Place) -> Iterator[str]:
    query = {name: meaning for each in place.described for name, meaning in each.query.items()}
    examples = [each.example for each in place.described if each.example is not None]
    if not query and not examples:
        return
    yield from ("", f"### `{place.method} {place.path}`")
    if query:
        yield ""
        yield from (f"* `?{name}=`: {meaning}" for name, meaning in query.items())
    for example in examples:
        yield from ("", "```json", json.dumps(example, ensure_ascii=False), "```")


if __name__ == "__main__":
    sys.stdout.write(f"{page()}\n")
