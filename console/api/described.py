"""What an endpoint takes and gives, said right at it: /openapi.json is made of that and of nothing else.

@describes("Continue a text", body=CompletionBody, answer=Completion, event=Completion)
async def _post(self, request: web.Request) -> web.StreamResponse: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

_ATTRIBUTE = "__described__"

H = TypeVar("H", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One way of asking one endpoint.

    success: the status of an answer that is no error; None where every answer is one.
    body: the schema that reads it; None where there is none.  optional: whether it may be left out.
    answer: a type that msgspec knows, a media type as text where the answer is no JSON, None where nothing is known of
    it.  event: what each chunk of a stream holds; media: the stream's content type.
    query: parameters in the address, and what each means.  example: a body that is answered.
    group: under which heading it stands where it is in no dialect.
    """

    summary: str
    success: int | None = 200
    body: type[BaseModel] | None = None
    optional: bool = False
    answer: Any = None
    event: Any = None
    media: str = "text/event-stream"
    query: Mapping[str, str] = field(default_factory=dict)
    example: Mapping[str, object] | None = None
    group: str = ""


def describes(summary: str, **fields: Any) -> Callable[[H], H]:
    """Say what a handler takes and gives; fields: as Described has them."""

    def mark(handler: H) -> H:
        return mark_as(handler, Described(summary=summary, **fields))

    return mark


def mark_as(handler: H, *described: Described) -> H:
    """Say it of a handler that hands on to several others, one for each of them."""
    setattr(handler, _ATTRIBUTE, described)
    return handler


def described_of(handler: object) -> tuple[Described, ...]:
    """What was said of a handler: one entry for each way of asking it, none where nothing was said."""
    found: tuple[Described, ...] = getattr(handler, _ATTRIBUTE, ())
    return found
