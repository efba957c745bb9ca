"""The body of /v1/responses: items of a conversation as the messages of a chat, tools, format and thinking."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import from_json

from console.api.http.json_bounds import JsonBounds
from console.api.requests.parameters import NO_DEFAULT_LENGTH, NOT_CUT, SAMPLING_CLAMPED, TEXT_ONLY, Refusal
from console.api.requests.sampling import SamplingFields
from console.api.requests.schemas import ANY_TEXT, SOME_TEXT, TEXT_OR_NULL, closed_object, text_or_parts
from console.api.requests.served_model import ServedModel
from console.api.requests.structured_output import RequestedFormat, json_grammar, json_object_grammar
from console.api.requests.thinking import Effort, ThinkingOptions
from console.api.tools import Tool, ToolChoice, ToolUse, tool_use
from console.api.tools.openai import MAX_TOOLS, FunctionField, read_choice, read_tool
from engine.config import MAX_LOGPROBS
from engine.errors import InvalidRequest

Message = dict[str, Any]
"""A message as chat has it."""

_HOSTED = "this server runs no tools of its own; send type function"
_UNTYPED = "a call has the arguments of a function; send type function"

_UNSEEN = "(an image, which this model cannot see: it reads text only)"
"""What the model reads in place of an image in the output of a call."""

_REFUSED: Mapping[str, Refusal] = {
    "background": Refusal("answers are given while the client waits", (False,)),
    "context_management": Refusal("conversations are not compacted"),
    "conversation": Refusal("use previous_response_id, or send the items"),
    "moderation": Refusal("nothing is moderated"),
    "prompt": Refusal("prompts are not stored; use instructions and input"),
    "truncation": Refusal(NOT_CUT, ("disabled",)),
}

_INERT = frozenset(
    {
        "client_metadata",  # labels of the client's own
        "max_tool_calls",  # of hosted tools, of which there are none
        "prompt_cache_key",  # a hint: prefixes are cached by what they are
        "prompt_cache_options",  # likewise
        "prompt_cache_retention",  # likewise
        "safety_identifier",  # labels of the client's own
        "service_tier",  # there is one
        "user",  # labels of the client's own
    }
)

_ECHOED = frozenset(
    {
        "id",
        "status",
        "phase",
        "annotations",
        "logprobs",
        "encrypted_content",
        "created_by",
        "agent",
        "internal_chat_message_metadata_passthrough",  # Codex's own
    }
)
"""Fields of an answer's items that say nothing to the model, which clients send back with them."""

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)


class FunctionTool(BaseModel):
    """A function that the client runs. parameters: JSON Schema of an object; strict: True to enforce it."""

    model_config = _STRICT

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FormatField(BaseModel):
    """Any text, any JSON object, or JSON that a schema describes."""

    model_config = _STRICT

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextField(BaseModel):
    """Format of the answer. verbosity changes nothing, and is part of what some clients send with every request."""

    model_config = _STRICT

    format: FormatField | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningField(BaseModel):
    """effort: how hard to think; it has no effect on a model that does not think.  summary: the thinking comes as the
    summary of its item, else as its content."""

    model_config = _STRICT

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(BaseModel):
    """include_obfuscation: chunks are never padded."""

    model_config = _STRICT

    include_obfuscation: Literal[False] | None = None


Include = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]


_PARTS = text_or_parts(
    *(closed_object("type", "text", type={"const": kind}, text=ANY_TEXT) for kind in ("input_text", "output_text"))
)
_INPUT = WithJsonSchema(
    {
        "anyOf": [
            SOME_TEXT,
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "anyOf": [
                        closed_object(
                            "role",
                            "content",
                            type={"const": "message"},
                            role={"enum": ["user", "assistant", "system", "developer"]},
                            content=_PARTS,
                            id=TEXT_OR_NULL,
                            status=TEXT_OR_NULL,
                            phase=TEXT_OR_NULL,
                        ),
                        closed_object(
                            "type",
                            "call_id",
                            "name",
                            "arguments",
                            type={"const": "function_call"},
                            call_id=SOME_TEXT,
                            name=SOME_TEXT,
                            arguments={"type": "string", "contentMediaType": "application/json"},
                            namespace=TEXT_OR_NULL,
                            id=TEXT_OR_NULL,
                        ),
                        closed_object(
                            "type",
                            "call_id",
                            "output",
                            type={"const": "function_call_output"},
                            call_id=SOME_TEXT,
                            output=_PARTS,
                            id=TEXT_OR_NULL,
                        ),
                    ]
                },
            },
        ]
    }
)
_CHOICE = WithJsonSchema(
    {
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            closed_object("type", "name", type={"const": "function"}, name=ANY_TEXT),
        ]
    }
)
_NAMESPACE = closed_object(
    "type",
    "name",
    "tools",
    type={"const": "namespace"},
    name=SOME_TEXT,
    description=TEXT_OR_NULL,
    tools={"type": "array", "items": FunctionTool.model_json_schema()},
)
_TOOLS = WithJsonSchema(
    {
        "anyOf": [
            {"type": "array", "items": {"anyOf": [FunctionTool.model_json_schema(), _NAMESPACE]}},
            {"type": "null"},
        ]
    }
)


class ResponsesBody(SamplingFields):
    """A conversation to answer.

    input: a text, or items: messages, calls of functions and their outputs, and what the model thought.
    instructions: a system message before them; previous_response_id: a stored response that they follow.
    text: format of the answer.  reasoning: how hard the model thinks.  include: message.output_text.logprobs adds
    log-probabilities; items of thinking always have all of it, so that reasoning.encrypted_content adds nothing.
    store: keep the response for previous_response_id and GET; null is true for programs on this machine alone.
    metadata: labels, which come back.  n: each request has one answer.
    """

    refused = _REFUSED
    inert = _INERT
    clamped: ClassVar[Mapping[str, str]] = {**SAMPLING_CLAMPED, "max_output_tokens": NO_DEFAULT_LENGTH}
    prompt_field = "input"
    max_entries: ClassVar[Mapping[str, int]] = {"tools": MAX_TOOLS, "metadata": 16}

    input: Annotated[str | list[Any], _INPUT]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[Any] | None, _TOOLS] = None
    tool_choice: Annotated[object, _CHOICE] = None
    parallel_tool_calls: bool = True
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    include: list[Include] | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1

    @property
    def asks_for_format(self) -> bool:
        """True if the answer has a format."""
        return (self.text is not None and self.text.format is not None) or super().asks_for_format

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives per token, None for no log-probabilities at all."""
        return self.top_logprobs or 0 if "message.output_text.logprobs" in (self.include or ()) else None

    @property
    def thinking(self) -> ThinkingOptions:
        """The client's wishes for the thinking. Its effort passes for a model that does not think, too: SDKs send one
        that they choose by the model's name."""
        effort = (self.reasoning.effort if self.reasoning is not None else None) or ""
        return ThinkingOptions(None, effort, names=("reasoning.effort", "reasoning.effort"), default_effort=effort)

    @property
    def summarizes(self) -> bool:
        """True if thinking comes as a summary."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    def messages(self) -> list[Message]:
        """Return the input as messages. Raises InvalidRequest naming the item at fault."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not self.input:
            raise InvalidRequest("input is empty", param="input")
        return list(_messages(self.input))

    def tool_use(self, model: ServedModel) -> ToolUse:
        """Return the tools for the prompt. Raises InvalidRequest; compiling their grammars may take a while."""
        return tool_use(model.tokenizer, read_tools(self.tools), self._choice(), parallel=self.parallel_tool_calls)

    def _choice(self) -> ToolChoice:
        match self.tool_choice:
            case None | "none" | "auto" | "required":
                return read_choice(self.tool_choice)
            case {"type": "function", "name": str(name)}:
                return ToolChoice("required", name)
            case {"type": "allowed_tools", "mode": mode, "tools": tools}:
                return read_choice({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}})
            case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
                raise InvalidRequest(f"tool_choice of type {kind} is not supported: {_HOSTED}", param="tool_choice")
            case _:
                raise InvalidRequest(
                    'tool_choice should be none, auto, required or {"type": "function", "name": ...}',
                    param="tool_choice",
                )

    def _requested_formats(self, max_bytes: int) -> Iterator[RequestedFormat]:
        yield from super()._requested_formats(max_bytes)
        asked = self.text.format if self.text is not None else None
        if asked is None or asked.type == "text":
            return
        if asked.type == "json_object":
            yield "text.format", partial(json_object_grammar, "text.format")
            return
        name = "text.format.schema"
        if asked.json_schema is None:
            raise InvalidRequest(f"{name} is missing", param=name)
        lenient = asked.strict is False
        yield name, partial(json_grammar, asked.json_schema, name, lenient=lenient, max_bytes=max_bytes)


def read_tools(fields: Sequence[object] | None) -> tuple[Tool, ...]:
    """Return the tools of a body, those of a namespace by their full names. Raises InvalidRequest, for hosted tools by
    their name."""
    tools = tuple(tool for i, field in enumerate(fields or ()) for tool in _tools_of(field, f"tools[{i}]"))
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} functions; the limit is {MAX_TOOLS}", param="tools")
    return tools


def full_name(namespace: str, name: str) -> str:
    """Return the name that the model knows a function by."""
    return f"{namespace}.{name}" if namespace else name


def namespaces_of(fields: Sequence[object] | None) -> Mapping[str, tuple[str, str]]:
    """Return the namespace and the name in it of each function that has one, by its full name. fields: tools that
    `read_tools` takes."""
    return {
        full_name(field["name"], tool["name"]): (field["name"], tool["name"])
        for field in fields or ()
        if isinstance(field, dict) and field["type"] == "namespace"
        for tool in field["tools"]
    }


def _tools_of(field: object, where: str) -> Iterator[Tool]:
    if not isinstance(field, dict) or field.get("type") != "namespace":
        yield _read_tool(field, where)
        return
    _check_fields(field, {"type", "name", "description", "tools"}, where)
    name, tools = _string(field, "name", where), field.get("tools")
    about = _string(field, "description", where) if field.get("description") else ""
    if not isinstance(tools, list):
        raise InvalidRequest(f"{where}.tools should be an array of functions", param=f"{where}.tools")
    for i, each in enumerate(tools):
        tool = _read_tool(each, f"{where}.tools[{i}]", name)
        yield msgspec.structs.replace(tool, description=f"{about}\n{tool.description}".strip())


def _read_tool(field: object, where: str, namespace: str = "") -> Tool:
    kind = field.get("type") if isinstance(field, dict) else None
    if not isinstance(field, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{where} should be an object with type, name and parameters", param=where)
    if kind != "function":
        reason = _UNTYPED if kind in ("custom", "local_shell") else _HOSTED
        raise InvalidRequest(f"{where} of type {kind} is not supported: {reason}", param=where)
    types = {"name": str, "description": str, "parameters": dict, "strict": bool}
    given = {name: value for name, value in field.items() if name != "type" and value is not None}
    for name, value in given.items():
        if not isinstance(value, types.get(name, ())):
            wrong = "has a wrong type" if name in types else "is not a field of a function"
            raise InvalidRequest(f"{where}.{name} {wrong}", param=f"{where}.{name}")
    if "name" not in given:
        raise InvalidRequest(f"{where}.name is missing", param=f"{where}.name")
    return read_tool(FunctionField(**given | {"name": full_name(namespace, given["name"])}), where)


# Items as messages: calls and thinking belong to the assistant's message that they stand by.


def _messages(items: Iterable[object]) -> Iterator[Message]:
    turn: Message = {}
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise InvalidRequest(f"{where} should be an object", param=where)
        read = _message(item, where)
        calls = [*turn.get("tool_calls", ()), *read.get("tool_calls", ())]
        if read["role"] != "assistant" or ("content" in read and "content" in turn and not calls):
            yield from _ended(turn)
            turn, calls = {}, []
        if read["role"] != "assistant":
            yield read
            continue
        if "content" in read and "content" in turn:  # text after the calls of the same answer
            read["content"] = turn["content"] + read["content"]
        turn |= read | ({"tool_calls": calls} if calls else {})
    yield from _ended(turn)


def _ended(turn: Message) -> Iterator[Message]:
    """Yield an assistant's message; thinking alone is none."""
    if "content" in turn or "tool_calls" in turn:
        yield {"content": None, **turn}


def _message(item: Mapping[str, object], where: str) -> Message:
    match item.get("type", "message"):
        case "message":
            _check_fields(item, {"type", "role", "content"}, where)
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise InvalidRequest(
                    f"{where}.role should be one of user, assistant, system, developer", param=f"{where}.role"
                )
            return {"role": role, "content": _text(item.get("content"), f"{where}.content")}
        case "function_call":
            _check_fields(item, {"type", "call_id", "name", "arguments", "namespace"}, where)
            call_id, name, arguments = (_string(item, field, where) for field in ("call_id", "name", "arguments"))
            arguments = _arguments(arguments, f"{where}.arguments")
            namespace = _string(item, "namespace", where) if item.get("namespace") else ""
            function = {"name": full_name(namespace, name), "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            _check_fields(item, {"type", "call_id", "output"}, where)
            output = _output(item.get("output"), f"{where}.output")
            return {"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output}
        case "reasoning":
            _check_fields(item, {"type", "summary", "content"}, where)
            thought = _text(item.get("content") or item.get("summary") or "", f"{where}.content")
            return {"role": "assistant", **({"reasoning_content": thought} if thought else {})}
        case kind:
            raise InvalidRequest(f"{where} of type {kind} is not supported", param=f"{where}.type")


def _arguments(text: str, where: str) -> str:
    """Return a call's arguments. Raises InvalidRequest where they are no JSON object, nor the beginning of one."""
    JsonBounds().check(text.encode(), where)
    try:
        is_whole = not text.strip() or isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_whole = False
    arguments = text if is_whole else complete_part(text)
    if arguments is None:
        raise InvalidRequest(f"{where} should be a JSON object, as text", param=where)
    return arguments


def complete_part(arguments: str) -> str | None:
    """Return the complete values of arguments that the end of an answer cut, as a JSON object; None of other text."""
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        return None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


def _check_fields(item: Mapping[str, object], allowed: set[str], where: str) -> None:
    for name, value in item.items():
        if name not in allowed and name not in _ECHOED and value is not None:
            raise InvalidRequest(f"{where}.{name} is not a field of this item", param=f"{where}.{name}")


def _string(item: Mapping[str, object], field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or (not value and field != "arguments"):
        raise InvalidRequest(f"{where}.{field} should be a string", param=f"{where}.{field}")
    return value


def _output(content: object, where: str) -> str:
    """Return the text of a call's output. An image in it, which the client did not choose to send, is named to the
    model: refused, it would end a conversation that keeps it."""
    if not isinstance(content, list):
        return _text(content, where)
    is_image = [isinstance(part, dict) and part.get("type") == "input_image" for part in content]
    texts = (
        _UNSEEN if image else _part(part, f"{where}[{i}]")
        for i, (part, image) in enumerate(zip(content, is_image, strict=True))
    )
    return "\n".join(texts)


def _text(content: object, where: str) -> str:
    """Return the text, of all parts where it has several, each on a line of its own."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} should be a string or an array of parts", param=where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in _TEXT_PARTS:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(kind)} if kind not in _TEXT_PARTS:
            raise InvalidRequest(f"{where} of type {kind} is not supported: {TEXT_ONLY}", param=where)
        case _:
            raise InvalidRequest(f"{where} should be an object with type and text", param=where)


def format_of(body: ResponsesBody) -> dict[str, object]:
    """Return the format of the answer as a response repeats it."""
    asked = body.text.format if body.text is not None else None
    if asked is None or asked.type != "json_schema":
        return {"type": asked.type if asked is not None else "text"}
    return {
        "type": "json_schema",
        "name": asked.name or "",
        "description": asked.description,
        "schema": asked.json_schema,
        "strict": bool(asked.strict),
    }


def size_of(value: object) -> int:
    """Return the bytes of a value as JSON."""
    return len(msgspec.json.encode(value))
