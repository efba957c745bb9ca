"""Tools in requests of OpenAI's and Ollama's clients, as types for all dialects."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from console.api.tools.calls import Tool, ToolCall, ToolChoice
from engine.errors import InvalidRequest

MAX_TOOLS = 256

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MODES: Mapping[str, ToolChoice] = {
    "none": ToolChoice("none"),
    "auto": ToolChoice("auto"),
    "required": ToolChoice("required"),
}


class FunctionField(BaseModel):
    """A function. parameters: JSON Schema of an object; strict: True to enforce it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"})]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(BaseModel):
    """A tool; always a function."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Literal["function"]
    function: FunctionField


def read_tools(fields: Sequence[ToolField] | None) -> tuple[Tool, ...]:
    """Return the tools of a body. Raises InvalidRequest naming what is wrong."""
    return tuple(read_tool(field.function, f"tools[{i}].function") for i, field in enumerate(fields or ()))


def read_tool(field: FunctionField, where: str) -> Tool:
    """Return one tool. where: its path in the request."""
    if not _NAME.fullmatch(field.name):
        raise InvalidRequest(
            f"{where}.name should be 1 to 128 letters, digits and any of _ . : / -", param=f"{where}.name"
        )
    schema = field.parameters
    if schema is not None and schema.setdefault("type", "object") != "object":
        raise InvalidRequest(
            f"{where}.parameters should be the schema of an object: arguments have names", param=f"{where}.parameters"
        )
    return Tool(
        name=field.name,
        description=field.description or "",
        parameters=schema,
        strict=bool(field.strict),
    )


def read_choice(value: object) -> ToolChoice:
    """Return `tool_choice`: none, auto, required, {"type": "function", "function": {"name": ...}}, or, of some tools,
    {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}; None is auto."""
    match value:
        case None:
            return _MODES["auto"]
        case str() if value in _MODES:
            return _MODES[value]
        case {"type": "function", "function": {"name": str(name), **others}, **more} if not others and not more:
            return ToolChoice("required", name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            return ToolChoice(mode, allowed=frozenset(_allowed_name(tool) for tool in tools))
        case _:
            raise InvalidRequest(
                'tool_choice should be none, auto, required or {"type": "function", "function": {"name": ...}}',
                param="tool_choice",
            )


def _allowed_name(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
        case _:
            raise InvalidRequest("tool_choice should name allowed tools of type function", param="tool_choice")


def read_calls(value: object, where: str) -> list[ToolCall]:
    """Return the earlier calls of a message, `tool_calls`. Raises InvalidRequest naming what is wrong."""
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} should be an array of calls", param=where)
    return [_read_call(call, f"{where}[{i}]") for i, call in enumerate(value)]


def _read_call(value: object, where: str) -> ToolCall:
    match value:
        case {"id": str(call_id), "function": {"name": str(name), **function}, **others} if call_id and name:
            _refuse_others(others, {"type": "function"}, where)
            arguments = function.pop("arguments", None)
            _refuse_others(function, {}, f"{where}.function")
            if not isinstance(arguments, str | None):
                at = f"{where}.function.arguments"
                raise InvalidRequest(f"{at} should be a JSON object, as text", param=at)
            return ToolCall(id=call_id, name=name, arguments=arguments or "")
        case _:
            raise InvalidRequest(
                f'{where} should be a call: {{"id", "type": "function", "function": {{"name", "arguments"}}}}',
                param=where,
            )


def _refuse_others(function: Mapping[Any, object], neutral: Mapping[str, object], where: str) -> None:
    """Raise InvalidRequest for a field that a call does not have. index: where streams put a call."""
    for name, value in function.items():
        if name != "index" and value is not None and neutral.get(name) != value:
            raise InvalidRequest(f"{where}.{name} is not known here", param=f"{where}.{name}")
