"""A dialect: the body of a request, and a reader of its events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from console.bench.target import Chunk, TargetFailed
from console.bench.workload import Item
from engine.config import quote_value

_SHOWN = 300
Count = Annotated[int, Meta(ge=0, le=10**7)]
"""A number of tokens; a larger one is not the count of one request."""
UNREADABLE = (ValueError, RecursionError)
"""What decoding raises for what is no JSON, is nested too deep, or is of another shape."""


class Reader(Protocol):
    """Reads the events of one answer, in order."""

    def __call__(self, event: bytes) -> Chunk | None:
        """Return the tokens of an event, None where it has none. Raises TargetFailed for an error event."""


def bearer(key: str) -> dict[str, str]:
    """The key as a Bearer token."""
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a kind of server is asked, and how it answers.

    name: as --dialect takes it.  order: after which others it is listed.  path: where it is asked.
    server: the server that defines it, "" where many implement it.
    models_path: where models are listed; "" where a request need not name one.
    takes_ids: whether a prompt may be token ids.
    forces: True if the server can be made to generate the exact number of tokens.
    counted_by: source of token counts: reported usage, token ids, or the requested number, where that is forced.
    over: whether it is asked by POST and answers in lines, or both over a websocket.
    request: the fields that every server of the kind knows, of a request to a model ("" names none).
    extras: fields in addition to those, or in their place, that not every one does.
    reader: makes the reader of one answer.  headers: of every request, by the key ("" for none).
    """

    name: str
    order: int
    path: str
    server: str = ""
    models_path: str = ""
    takes_ids: bool = False
    forces: bool = True
    counted_by: Literal["usage", "ids", "asked"] = "usage"
    over: Literal["lines", "socket"] = "lines"
    request: Callable[[Item, str], dict[str, Any]]
    extras: Callable[[Item], dict[str, Any]]
    reader: Callable[[], Reader]
    headers: Callable[[str], dict[str, str]] = bearer

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """Return the body of a request. plain: without the fields that are not in every server of the kind."""
        body = self.request(item, model)
        return body if plain else body | self.extras(item)


def ids_or_text(item: Item) -> list[int] | str:
    """The prompt of a request, as ids where it has them."""
    return list(item.prompt.ids) or item.prompt.text


def user_message(item: Item) -> list[dict[str, str]]:
    """The prompt of a request as a conversation."""
    return [{"role": "user", "content": item.prompt.text}]


def model_field(model: str) -> dict[str, str]:
    """The field that names a model, none for ""."""
    return {"model": model} if model else {}


class _Named(msgspec.Struct):
    id: str = ""
    name: str = ""


class _Listed(msgspec.Struct):
    data: list[_Named] = []
    models: list[_Named] = []


def first_model(listed: bytes) -> str:
    """The first of a list as OpenAI's or Ollama's API gives it; "" where there is none."""
    try:
        found = msgspec.json.decode(listed, type=_Listed)
    except UNREADABLE:
        return ""
    return next((model.id or model.name for model in (*found.data, *found.models)), "")


def refuse_error(error: object) -> None:
    """Raise TargetFailed for an event with an error, as most servers have it: a text, or an object with a message."""
    if error:
        message = error.get("message") or error.get("msg") or error if isinstance(error, dict) else error
        raise TargetFailed(f"the server sent an error: {quote_value(message, _SHOWN)}")
