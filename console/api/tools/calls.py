"""Tools, the calls that models make of them, and what a reader of answers finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic_core import from_json

ToolMode = Literal["none", "auto", "required"]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the client would run. parameters: JSON Schema of its arguments, None for none.

    strict: arguments are held to that schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """Of its arguments, whatever the client left out."""
        return self.parameters or {"type": "object", "properties": {}}

    def definition(self) -> dict[str, object]:
        """As chat templates take it: OpenAI's shape. Nothing is left out, for templates put these together blindly."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.schema)}
        return {"type": "function", "function": function}


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether tools are called: never, as the model likes, at least one; name: this one, where mode is "required"."""

    mode: ToolMode = "auto"
    name: str = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call. arguments: a JSON object, as text.  cut: the answer ended within the call, and so does that text."""

    id: str
    name: str
    arguments: str
    cut: bool = False


JsonObject = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
"""A JSON object as it was written, which nothing reads on its way."""


def arguments_of(text: str, *, cut: bool = False) -> JsonObject:
    """A call's arguments as a part of a JSON document that has one line. Within strings, line breaks are escaped.

    cut: the text ends too early: the object has the values that are whole, as clients read a stream that ends there.
    """
    if cut:
        return msgspec.Raw(msgspec.json.encode(from_json(text, allow_partial=True) if text else {}))
    return msgspec.Raw(text.replace("\r", " ").replace("\n", " ").encode())


class Said(msgspec.Struct, frozen=True, tag=True):
    """Text that belongs to no call."""

    text: str


class CallBegan(msgspec.Struct, frozen=True, tag=True):
    """A call, by its number in the answer from 0; its arguments follow."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, tag=True):
    """More of a call's arguments: all of them in a row are a JSON object."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True, tag=True):
    """The call is whole."""

    index: int


class CallBroken(msgspec.Struct, frozen=True, tag=True):
    """The call is none: the model went astray within it. Its text follows as `Said`."""

    index: int


class CallCut(msgspec.Struct, frozen=True, tag=True):
    """The answer ended within the call, which stays as far as it came."""

    index: int


Piece = Said | CallBegan | CallArguments | CallEnded | CallBroken | CallCut
