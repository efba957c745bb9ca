"""Bodies of /v1/messages and /v1/messages/count_tokens: conversations, tools, output formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from console.api.requests.body import as_integer
from console.api.requests.parameters import ROOM, SAMPLING_CLAMPED, TEXT_ONLY, Refusal
from console.api.requests.sampling import SamplingFields
from console.api.requests.schemas import (
    ANY_TEXT,
    TEXT_OR_NULL,
    JsonSchema,
    conversation_schema,
    message_schema,
    text_or_parts,
)
from console.api.requests.served_model import ServedModel
from console.api.requests.structured_output import RequestedFormat, json_grammar
from console.api.requests.thinking import ThinkingOptions
from console.api.tools import Tool, ToolChoice, ToolUse, tool_use
from console.api.tools.openai import MAX_TOOLS, FunctionField, read_tool
from engine.errors import InvalidRequest

_REFUSED: Mapping[str, Refusal] = {
    "container": Refusal("containers are not supported"),
    "context_management": Refusal(
        "conversations are not edited here",
        ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ),
    "diagnostics": Refusal("see GET /metrics for the prefix cache"),
    "inference_geo": Refusal("the region cannot be chosen"),
    "mcp_servers": Refusal("this server calls no other servers"),
    "output_format": Refusal("use output_config.format, which replaced it"),
    "speed": Refusal("there is only one speed", ("standard",)),
}

_TOOLS_REFUSED: Mapping[str, Refusal] = {
    "allowed_callers": Refusal("only the model calls tools", (["direct"],)),
    "defer_loading": Refusal("all tools are put into the prompt", (False,)),
    "input_examples": Refusal("put them into the description"),
}
"""Fields of a tool."""

BLOCKS_REFUSED: Mapping[str, Refusal] = {
    "document": Refusal(TEXT_ONLY),
    "image": Refusal(TEXT_ONLY),
    "search_result": Refusal("put search results into text blocks"),
}
"""Blocks of a message's content."""

_INERT = frozenset(
    {
        "cache_control",  # prefixes are cached by what they are
        "metadata",  # labels of the client's own
        "service_tier",  # there is one
    }
)

# Tools as Anthropic's clients send them, and the output format that they may ask for instead.

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)


class ToolField(BaseModel):
    """A tool that the client runs. input_schema: JSON Schema of an object; strict: inputs are held to it.

    cache_control and eager_input_streaming change nothing: prefixes are cached by what they are, and inputs are
    streamed as they come.
    """

    model_config = _STRICT

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    allowed_callers: object = None
    defer_loading: object = None
    input_examples: object = None


class ChoiceField(BaseModel):
    """Which tools the answer calls: auto is up to the model, any is at least one, tool is the one of that name."""

    model_config = _STRICT

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def choice(self) -> ToolChoice:
        """As all dialects have it; raises InvalidRequest."""
        if (self.name is not None) != (self.type == "tool"):
            raise InvalidRequest("tool_choice.name is for the type tool, which needs it", param="tool_choice.name")
        match self.type:
            case "tool":
                return ToolChoice("required", self.name or "")
            case "any":
                return ToolChoice("required")
            case mode:
                return ToolChoice(mode)


class FormatField(BaseModel):
    """The format of the answer: JSON by a schema."""

    model_config = _STRICT

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    """Format of the answer, and how hard to think before it."""

    model_config = _STRICT

    format: FormatField | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None

    def requested_formats(self, max_bytes: int) -> Iterator[RequestedFormat]:
        """Yield the format under its field's name; raises InvalidRequest."""
        if self.format is not None:
            name = "output_config.format.schema"
            yield name, partial(json_grammar, self.format.json_schema, name, max_bytes=max_bytes)


class ThinkingField(BaseModel):
    """Thinking before the answer. enabled: for max budget_tokens; adaptive: for as long as the model likes.

    display: omitted leaves the text out of the answer's thinking blocks.
    """

    model_config = ConfigDict(
        **_STRICT,
        json_schema_extra={
            "if": {"properties": {"type": {"const": "enabled"}}},
            "then": {"required": ["budget_tokens"], "properties": {"budget_tokens": {"type": "integer"}}},
            "else": {"properties": {"budget_tokens": {"type": "null"}}},
        },
    )

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1), BeforeValidator(as_integer)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    def check(self) -> None:
        """Raise InvalidRequest where the budget is missing, or has no meaning."""
        if (self.budget_tokens is None) == (self.type == "enabled"):
            raise InvalidRequest(
                "thinking.budget_tokens is for the type enabled, which needs it", param="thinking.budget_tokens"
            )


def read_tools(fields: Sequence[ToolField] | None) -> tuple[Tool, ...]:
    """Return the tools of a body. Raises InvalidRequest naming the field at fault."""
    return tuple(_read(field, f"tools[{i}]") for i, field in enumerate(fields or ()))


def _read(field: ToolField, where: str) -> Tool:
    for name, refusal in _TOOLS_REFUSED.items():
        refusal.check(f"{where}.{name}", getattr(field, name))
    if field.input_schema.get("type", "object") != "object":
        raise InvalidRequest(f"{where}.input_schema should be that of an object", param=f"{where}.input_schema")
    function = FunctionField(
        name=field.name, description=field.description, parameters=field.input_schema, strict=field.strict
    )
    return read_tool(function, where)


# A conversation's messages, as /openapi.json describes them.


def _block_schema(kind: str, **fields: JsonSchema) -> JsonSchema:
    """Return the schema of a block. Optional fields have null in their type."""
    required = [name for name, field in fields.items() if "null" not in field.get("type", ())]
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **fields, "cache_control": {"type": ["object", "null"]}},
        "required": ["type", *required],
        "additionalProperties": False,
    }


_TEXT_BLOCK = _block_schema("text", text=ANY_TEXT, citations={"enum": [None, []], "type": ["null", "array"]})
_RESULT_BLOCK = _block_schema(
    "tool_result",
    tool_use_id=ANY_TEXT,
    content={"anyOf": [*text_or_parts(_TEXT_BLOCK)["anyOf"], {"type": "null"}], "type": ["string", "array", "null"]},
    is_error={"type": ["boolean", "null"]},
)
_USE_BLOCK = _block_schema(
    "tool_use",
    id=ANY_TEXT,
    name=ANY_TEXT,
    input={"type": "object"},
    caller={"enum": [None, {"type": "direct"}], "type": ["null", "object"]},
)
_THINKING_BLOCK = _block_schema("thinking", thinking=ANY_TEXT, signature=TEXT_OR_NULL)
_REDACTED_BLOCK = _block_schema("redacted_thinking", data=TEXT_OR_NULL)


def _message_schema(role: str, *blocks: JsonSchema, least: int = 1) -> JsonSchema:
    return {**message_schema(role, content=text_or_parts(*blocks, least=least)), "additionalProperties": False}


_MESSAGES = conversation_schema(
    _message_schema("user", _TEXT_BLOCK, _RESULT_BLOCK),
    _message_schema("assistant", _TEXT_BLOCK, _USE_BLOCK, _THINKING_BLOCK, _REDACTED_BLOCK, least=0),
    _message_schema("system", _TEXT_BLOCK),
)
"""A conversation as Anthropic has it."""

_SYSTEM = WithJsonSchema({"anyOf": [*text_or_parts(_TEXT_BLOCK)["anyOf"], {"type": "null"}]})
"""System prompt of such a conversation."""


class ConversationBody(SamplingFields):
    """A conversation to answer, or to count the tokens of.

    system: a string or text blocks.  stop_sequences: `stop` by its name here.  n: each request has one answer.
    thinking: enabled, adaptive or disabled; left out, it is up to the model.
    output_config: format is JSON by a schema; effort is how hard to think: for models without efforts of their own,
    low and medium are budgets of 1,024 and 4,096 tokens.
    include_stop_str_in_output: the stop sequence is a field of the answer, not part of its text.
    """

    refused = _REFUSED
    inert = _INERT
    refused_within: ClassVar[Mapping[str, Mapping[str, Refusal]]] = {
        "messages[].content[] of type ": BLOCKS_REFUSED,
        "tools[].": _TOOLS_REFUSED,
    }
    aliases: ClassVar[Mapping[str, str]] = {**SamplingFields.aliases, "stop_sequences": "stop"}

    max_entries: ClassVar[Mapping[str, int]] = {"tools": MAX_TOOLS}

    messages: Annotated[list[Any], _MESSAGES]
    system: Annotated[object, _SYSTEM] = None
    tools: list[ToolField] | None = None
    tool_choice: ChoiceField | None = None
    output_config: OutputConfig | None = None
    thinking: ThinkingField | None = None
    n: Literal[1] = 1
    include_stop_str_in_output: Literal[False] = False

    @property
    def asks_for_format(self) -> bool:
        """True if the answer has a format."""
        return (self.output_config is not None and self.output_config.format is not None) or super().asks_for_format

    @property
    def thinking_options(self) -> ThinkingOptions:
        """The thinking that is requested; raises InvalidRequest."""
        field, effort = self.thinking, self.output_config.effort if self.output_config is not None else None
        if field is not None:
            field.check()
        return ThinkingOptions(
            enabled=None if field is None else field.type != "disabled",
            effort=effort or "",
            budget=None if field is None else field.budget_tokens,
            names=("output_config.effort", "thinking.budget_tokens"),
            default_effort="high",
        )

    def tool_use(self, model: ServedModel) -> ToolUse:
        """Return the tools for the prompt; raises InvalidRequest. Compiling their grammars may take a while."""
        field = self.tool_choice
        choice = ToolChoice() if field is None else field.choice
        parallel = field is None or not field.disable_parallel_tool_use
        return tool_use(model.tokenizer, read_tools(self.tools), choice, parallel=parallel)

    def _requested_formats(self, max_bytes: int) -> Iterator[RequestedFormat]:
        yield from super()._requested_formats(max_bytes)
        if self.output_config is not None:
            yield from self.output_config.requested_formats(max_bytes)


class MessagesBody(ConversationBody):
    """A conversation to answer."""

    clamped: ClassVar[Mapping[str, str]] = {**SAMPLING_CLAMPED, "max_tokens": ROOM}

    max_tokens: Annotated[int, Field(ge=1)]

    @property
    def omits_thinking(self) -> bool:
        """True if thinking blocks come without their text."""
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def thinking_options(self) -> ThinkingOptions:
        """The thinking that is requested; raises InvalidRequest, also for a budget with no room for the answer."""
        options = super().thinking_options
        if options.budget is not None and options.budget >= self.max_tokens:
            raise InvalidRequest(
                f"thinking.budget_tokens is {options.budget}; it must be less than max_tokens, {self.max_tokens}",
                param="thinking.budget_tokens",
            )
        return options
