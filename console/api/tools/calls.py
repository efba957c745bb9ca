"""Tools, calls of them, and the pieces that a CallReader finds in answers."""

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
    """A function of the client. parameters: JSON Schema of its arguments, None for none.

    strict: True to enforce that schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """Schema of its arguments; an empty object without parameters."""
        return self.parameters or {"type": "object", "properties": {}}

    def definition(self) -> dict[str, object]:
        """Return the definition for chat templates, in OpenAI's shape, with all members, as templates do not check."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.schema)}
        return {"type": "function", "function": function}


class ToolChoice(msgspec.Struct, frozen=True):
    """Choice of the client: no calls, as the model decides, or at least one. name: of the tool, with mode
    "required".  allowed: names of the tools that may be called, None for all."""

    mode: ToolMode = "auto"
    name: str = ""
    allowed: frozenset[str] | None = None

    def allows(self, name: str) -> bool:
        """Return whether that tool may be called."""
        return name == self.name if self.name else self.allowed is None or name in self.allowed


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call. arguments: a JSON object, as text.  truncated: True if the answer, and so that text, ended within the
    call."""

    id: str
    name: str
    arguments: str
    truncated: bool = False


JsonObject = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]
"""A JSON object as the model wrote it, passed on unparsed."""


def arguments_of(text: str, *, truncated: bool = False) -> JsonObject:
    """Return a call's arguments as part of a one-line JSON document. Within strings, line breaks are escaped.

    truncated: True for truncated text: the object has only its complete values.
    """
    if truncated:
        return msgspec.Raw(msgspec.json.encode(from_json(text, allow_partial=True) if text else {}))
    return msgspec.Raw(text.replace("\r", " ").replace("\n", " ").encode())


class TextPiece(msgspec.Struct, frozen=True):
    """Text outside of calls."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """Start of a call. index: in the answer, from 0; its arguments follow."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """Part of a call's arguments, which together are a JSON object."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """End of a complete call."""

    index: int


class CallMalformed(msgspec.Struct, frozen=True):
    """End of a malformed call. Its text follows as `TextPiece`."""

    index: int


class CallTruncated(msgspec.Struct, frozen=True):
    """End of a call that the end of the answer truncated."""

    index: int


AnswerPiece = TextPiece | CallStart | CallArguments | CallEnd | CallMalformed | CallTruncated


# Calls and their results as turns of a conversation, as chat templates need them.

Turn = dict[str, object]

_SHORT_ID = 9
_ALPHABET = string.digits + string.ascii_letters


def tool_calls_turn(content: str, calls: Sequence[ToolCall], where: str) -> Turn:
    """Return an assistant's turn with its calls; its content is None without text.

    where: path of the calls in the request, for errors. Raises InvalidRequest for arguments that are no JSON object.
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


def tool_result_turn(call_id: str, content: str, name: str = "") -> Turn:
    """Return the turn of a call's result. name: of the tool, if known; see `with_tool_names`."""
    turn: Turn = {"role": "tool", "content": content, "tool_call_id": call_id}
    return turn | {"name": name} if name else turn


def with_tool_names(turns: Sequence[Turn]) -> list[Turn]:
    """Add the tool's name, which some templates need, to results whose call is in the conversation."""
    names: dict[object, object] = {}
    result: list[Turn] = []
    for turn in turns:
        for call in _calls(turn):
            names[call["id"]] = call["function"]["name"]
        name = names.get(turn.get("tool_call_id"))
        result.append({"name": name, **turn} if turn["role"] == "tool" and name is not None else turn)
    return result


def convert_call_ids(turns: Sequence[Turn], tool_format: ToolFormat | None) -> list[Turn]:
    """Convert ids of calls for the model's template, as a conversation may have started with another model."""
    if tool_format is None or not tool_format.short_ids:
        return list(turns)
    converted: list[Turn] = []
    for turn in turns:
        if calls := _calls(turn):
            converted.append(turn | {"tool_calls": [call | {"id": _short(str(call["id"]))} for call in calls]})
        elif "tool_call_id" in turn:
            converted.append(turn | {"tool_call_id": _short(str(turn["tool_call_id"]))})
        else:
            converted.append(turn)
    return converted


def split_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Give each call a turn of its own, followed by its results, for templates that render one call per turn."""
    result: list[Turn] = []
    rest = list(turns)
    while rest:
        turn, *rest = rest
        calls = _calls(turn)
        if len(calls) < 2:
            result.append(turn)
            continue
        count = next((i for i, each in enumerate(rest) if each["role"] != "tool"), len(rest))
        answers, rest = rest[:count], rest[count:]
        for call in calls:
            result.append(turn | {"tool_calls": [call]})
            result += [each for each in answers if each.get("tool_call_id") == call["id"]]
            turn = {"role": turn["role"], "content": None}
        ids = [call["id"] for call in calls]
        result += [each for each in answers if each.get("tool_call_id") not in ids]
    return result


_INSTRUCTIONS = """You may call functions to answer. Their signatures, as JSON schemas:
<tools>
{}
</tools>

To call one, write a JSON object with its name and arguments between these tags, and nothing after them:
<tool_call>
{{"name": "function", "arguments": {{"argument": "value"}}}}
</tool_call>

The results come back between <tool_response> and </tool_response>."""


def with_instructions(turns: Sequence[Turn], definitions: Sequence[Mapping[str, object]], role: str) -> list[Turn]:
    """Describe tools in a conversation for a chat template that has none: in the first turn of this role, "user", or in
    the system message at the start, "system"; one is added where there is none."""
    text = _INSTRUCTIONS.format("\n".join(map(json.dumps, definitions)))
    if role == "system":
        has_system = bool(turns) and turns[0]["role"] == "system"
        system = f"{turns[0]['content']}\n\n{text}" if has_system else text
        return [{"role": "system", "content": system}, *turns[has_system:]]
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": text}, *turns]
    question = turns[first] | {"content": f"{text}\n\n{turns[first]['content']}"}
    return [*turns[:first], question, *turns[first + 1 :]]


def as_plain_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Return a conversation whose calls and results are text, for a chat template without tools."""
    plain: list[Turn] = []
    for turn in turns:
        if turn["role"] == "tool":
            result = f"<tool_response>\n{turn['content']}\n</tool_response>"
            if plain and plain[-1].get("is_result"):
                plain[-1]["content"] = f"{plain[-1]['content']}\n{result}"
            else:
                plain.append({"role": "user", "content": result, "is_result": True})
            continue
        calls = [
            "<tool_call>\n"
            + json.dumps({name: call["function"][name] for name in ("name", "arguments")}, ensure_ascii=False)
            + "\n</tool_call>"
            for call in _calls(turn)
        ]
        text = "\n".join([*([str(turn["content"])] if turn["content"] else []), *calls])
        plain.append({**{name: value for name, value in turn.items() if name != "tool_calls"}, "content": text})
    return [{name: value for name, value in turn.items() if name != "is_result"} for turn in plain]


def without_null_content(turns: Sequence[Turn]) -> list[Turn]:
    """Replace content None by "", which not all templates accept."""
    return [turn | {"content": ""} if turn["content"] is None else turn for turn in turns]


def _calls(turn: Mapping[str, object]) -> list[dict[str, dict[str, object]]]:
    calls = turn.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _read(text: str, where: str) -> dict[str, object]:
    """Parse arguments; empty text, as clients make it from a stream, is none."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} should be a JSON object, as text", param=where)
    return value


def _short(call_id: str) -> str:
    """Return nine letters and digits, the same for the same id; such an id is returned unchanged."""
    if len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode(errors="surrogatepass")).digest()[:8])
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(_SHORT_ID))
