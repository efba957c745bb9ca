"""docs/api/parameters.md, and the tables that it and the refusals are made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from console.api.requests.body import Body
from tools.docs_pages.parameters import bodies, page

PAGE = Path(__file__).parents[2] / "docs" / "api" / "parameters.md"


def kinds(base: type[Body] = Body) -> Iterator[type[Body]]:
    """Every kind of body that there is."""
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def test_the_page_is_made_of_the_tables() -> None:
    renew = "renew it: python -m tools.docs_pages.parameters > docs/api/parameters.md"
    assert PAGE.read_text() == page() + "\n", renew


def test_every_body_of_every_dialect_is_told_of() -> None:
    told = page()
    for body, places in bodies().items():
        assert all(f"`{place}`" in told for place in places), body


def test_aliases_and_clamped_fields_are_of_fields_that_there_are() -> None:
    for body in kinds():
        assert set(body.aliases.values()) <= set(body.model_fields), body
        assert set(body.clamped) <= set(body.model_fields), body


def test_nothing_is_both_refused_and_inert() -> None:
    for body in kinds():
        assert not body.refused.keys() & body.inert, body
