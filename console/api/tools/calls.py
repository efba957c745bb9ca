"""Tools, the calls that models make of them, and what a reader of answers finds."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic_core import from_json

from console.api.tools.formats import ToolFormat
from engine.errors import InvalidRequest

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


# Calls and their results as turns of a conversation, in the form that chat templates take.

Turn = dict[str, object]

_SHORT_ID = 9
_ALPHABET = string.digits + string.ascii_letters


def calling_turn(content: str, calls: Sequence[ToolCall], where: str) -> Turn:
    """An assistant's turn with the calls that it made; its content is None where it said nothing.

    where: what the client called the calls, for errors. Raises InvalidRequest for arguments that are no JSON object.
    """
    past = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": _read(call.arguments, f"{where}[{i}].function.arguments")},
        }
        for i, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": past}


def result_turn(call_id: str, content: str, name: str = "") -> Turn:
    """What a call gave. name: the tool's, where it is known; see `named`."""
    turn: Turn = {"role": "tool", "content": content, "tool_call_id": call_id}
    return turn | {"name": name} if name else turn


def named(turns: Sequence[Turn]) -> list[Turn]:
    """The same, each result under its tool's name, which some templates want, where the call is in the conversation."""
    names: dict[object, object] = {}
    whole: list[Turn] = []
    for turn in turns:
        for call in _calls(turn):
            names[call["id"]] = call["function"]["name"]
        name = names.get(turn.get("tool_call_id"))
        whole.append({"name": name, **turn} if turn["role"] == "tool" and name is not None else turn)
    return whole


def fitting(turns: Sequence[Turn], written: ToolFormat | None) -> list[Turn]:
    """The same, with ids of calls as the model's template takes them: a conversation may have begun with another."""
    if written is None or not written.short_ids:
        return list(turns)
    fitted: list[Turn] = []
    for turn in turns:
        if calls := _calls(turn):
            fitted.append(turn | {"tool_calls": [call | {"id": _short(str(call["id"]))} for call in calls]})
        elif "tool_call_id" in turn:
            fitted.append(turn | {"tool_call_id": _short(str(turn["tool_call_id"]))})
        else:
            fitted.append(turn)
    return fitted


def spoken(turns: Sequence[Turn]) -> list[Turn]:
    """The same, each with text, if an empty one: templates differ in what they can put together."""
    return [turn | {"content": ""} if turn["content"] is None else turn for turn in turns]


def _calls(turn: Mapping[str, object]) -> list[dict[str, dict[str, object]]]:
    calls = turn.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _read(text: str, where: str) -> dict[str, object]:
    """Arguments out of their text; none where there is none, as clients put it together from a stream."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} should be a JSON object, as text", param=where)
    return value


def _short(call_id: str) -> str:
    """Nine letters and digits, the same for the same id; an id that is such is left as it is."""
    if len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode(errors="surrogatepass")).digest()[:8])
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(_SHORT_ID))
