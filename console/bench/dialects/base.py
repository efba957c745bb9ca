"""What a dialect is: a body that asks, and events that are read."""

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
"""Of tokens: what a server tells beyond is no count of one request."""
UNREADABLE = (ValueError, RecursionError)
"""What decoding raises for what is no JSON, is nested too deep, or is of another shape."""


class Reader(Protocol):
    """Reads the events of one answer, in order."""

    def __call__(self, event: bytes) -> Chunk | None:
        """What an event says; None where it says nothing of tokens. Raises TargetFailed where it tells an error."""


class Dialect(Protocol):
    """How a kind of server is asked, and how it answers.

    path: where.  models_path: where models are listed.  takes_ids: whether a prompt may be token ids.
    forces: whether the server can be told to go on to the last token that was asked for.
    over: whether it is asked by POST and answers in lines, or both over a websocket.
    counted_by: what counts of tokens rest on, where the server knows all that it is asked: what it told, its token
    ids, or, since a length is forced, what was asked for.
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
        """Whether prompts may be token ids."""

    @property
    def forces(self) -> bool:
        """Whether it can be told to give every token that was asked for."""

    @property
    def counted_by(self) -> CountedBy:
        """What its counts rest on, where it tells all that it can."""

    @property
    def over(self) -> Over:
        """How it is asked."""

    def headers(self, key: str) -> dict[str, str]:
        """What every request has; key: "" for none."""

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """The request. plain: without the fields that are not in every server of the kind."""

    def reader(self) -> Reader:
        """For one answer."""


class Posted:
    """What most dialects have in common: asked by POST, with a key as a Bearer token."""

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
    """Raise TargetFailed where an event tells an error, as most servers do: a text, or an object with a message."""
    if error:
        said = error.get("message") or error.get("msg") or error if isinstance(error, dict) else error
        raise TargetFailed(f"the server told an error: {quote_value(said, _SHOWN)}")
