"""A dialect: the body of a request, and a reader of its events."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from console.bench.target import Chunk, TargetFailed
from console.bench.workload import Item
from engine.config import quote_value

_SHOWN = 300
CountedBy = Literal["usage", "ids", "asked"]
Over = Literal["lines", "socket"]
Count = Annotated[int, Meta(ge=0, le=10**7)]
"""A number of tokens; a larger one is not the count of one request."""
UNREADABLE = (ValueError, RecursionError)
"""What decoding raises for what is no JSON, is nested too deep, or is of another shape."""


class Reader(Protocol):
    """Reads the events of one answer, in order."""

    def __call__(self, event: bytes) -> Chunk | None:
        """Return the tokens of an event, None where it has none. Raises TargetFailed for an error event."""


class Dialect(Protocol):
    """How a kind of server is asked, and how it answers.

    path: where.  models_path: where models are listed.  takes_ids: whether a prompt may be token ids.
    forces: True if the server can be made to generate the exact number of tokens.
    over: whether it is asked by POST and answers in lines, or both over a websocket.
    counted_by: source of token counts: reported usage, token ids, or the requested number, where that is forced.
    """

    @property
    def name(self) -> str:
        """As --dialect takes it."""

    @property
    def path(self) -> str:
        """Where it is asked."""

    @property
    def server(self) -> str:
        """Server that defines it, "" where many implement it."""

    @property
    def models_path(self) -> str:
        """Where the server lists its models; "" where a request need not name one."""

    @property
    def takes_ids(self) -> bool:
        """True if prompts may be token ids."""

    @property
    def forces(self) -> bool:
        """True if the exact number of tokens can be forced."""

    @property
    def counted_by(self) -> CountedBy:
        """Source of its token counts."""

    @property
    def over(self) -> Over:
        """How it is asked."""

    def headers(self, key: str) -> dict[str, str]:
        """Headers of every request. key: "" for none."""

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """The request. plain: without the fields that are not in every server of the kind."""

    def reader(self) -> Reader:
        """For one answer."""


class Posted:
    """Base of most dialects: POST, with the key as a Bearer token."""

    server = ""
    over: Over = "lines"

    def headers(self, key: str) -> dict[str, str]:
        """Dialect."""
        return {"Authorization": f"Bearer {key}"} if key else {}


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
