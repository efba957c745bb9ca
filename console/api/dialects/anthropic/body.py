"""What /v1/messages takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from console.api.requests.parameters import (
    ANTHROPIC_BLOCKS_REFUSED,
    ANTHROPIC_CLAMPED,
    ANTHROPIC_INERT,
    ANTHROPIC_OUTPUT_REFUSED,
    ANTHROPIC_REFUSED,
    ANTHROPIC_TOOLS_REFUSED,
    Refusal,
)
from console.api.requests.response_format import Named
from console.api.requests.sampling import SamplingFields
from console.api.requests.schemas import ANTHROPIC_MESSAGES, ANTHROPIC_SYSTEM
from console.api.requests.served_model import ServedModel
from console.api.requests.structured_output import json_grammar
from console.api.tools import Tool, ToolChoice, ToolUse, tool_use
from console.api.tools.openai import MAX_TOOLS, FunctionField, read_tool
from engine.errors import InvalidRequest

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
    """Whether tools are called: as the model likes, some, this one, or none."""

    model_config = _STRICT

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def choice(self) -> ToolChoice:
        """The same as every dialect has it; raises InvalidRequest."""
        if (self.name is not None) != (self.type == "tool"):
            raise InvalidRequest("tool_choice.name belongs to the type tool, which needs it", param="tool_choice.name")
        match self.type:
            case "tool":
                return ToolChoice("required", self.name or "")
            case "any":
                return ToolChoice("required")
            case mode:
                return ToolChoice(mode)


class FormatField(BaseModel):
    """What the answer is held to: JSON by a schema."""

    model_config = _STRICT

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    """How the answer is to be."""

    model_config = _STRICT

    format: FormatField | None = None
    effort: Annotated[object, WithJsonSchema({"enum": [*ANTHROPIC_OUTPUT_REFUSED["effort"].neutral, None]})] = None

    def named(self, max_bytes: int) -> Iterator[Named]:
        """What it asks for; raises InvalidRequest."""
        ANTHROPIC_OUTPUT_REFUSED["effort"].check("output_config.effort", self.effort)
        if self.format is not None:
            name = "output_config.format.schema"
            yield name, partial(json_grammar, self.format.json_schema, name, max_bytes=max_bytes)


def read_tools(fields: Sequence[ToolField] | None) -> tuple[Tool, ...]:
    """The tools of a body. Raises InvalidRequest naming what is wrong."""
    return tuple(_read(field, f"tools[{i}]") for i, field in enumerate(fields or ()))


def _read(field: ToolField, where: str) -> Tool:
    for name, refusal in ANTHROPIC_TOOLS_REFUSED.items():
        refusal.check(f"{where}.{name}", getattr(field, name))
    if field.input_schema.get("type", "object") != "object":
        raise InvalidRequest(f"{where}.input_schema should be that of an object", param=f"{where}.input_schema")
    function = FunctionField(
        name=field.name, description=field.description, parameters=field.input_schema, strict=field.strict
    )
    return read_tool(function, where)


class ConversationBody(SamplingFields):
    """A conversation to answer, or to count the tokens of.

    system: a string or text blocks.  stop_sequences: `stop` by its name here.  n: each request has one answer.
    include_stop_str_in_output: a stop sequence is told apart from the answer.
    """

    refused = ANTHROPIC_REFUSED
    inert = ANTHROPIC_INERT
    refused_within: ClassVar[Mapping[str, Mapping[str, Refusal]]] = {
        "messages[].content[] of type ": ANTHROPIC_BLOCKS_REFUSED,
        "output_config.": ANTHROPIC_OUTPUT_REFUSED,
        "tools[].": ANTHROPIC_TOOLS_REFUSED,
    }
    aliases: ClassVar[Mapping[str, str]] = {**SamplingFields.aliases, "stop_sequences": "stop"}

    max_entries: ClassVar[Mapping[str, int]] = {"tools": MAX_TOOLS}

    messages: Annotated[list[Any], ANTHROPIC_MESSAGES]
    system: Annotated[object, ANTHROPIC_SYSTEM] = None
    tools: list[ToolField] | None = None
    tool_choice: ChoiceField | None = None
    output_config: OutputConfig | None = None
    n: Literal[1] = 1
    include_stop_str_in_output: Literal[False] = False

    @property
    def asks_for_format(self) -> bool:
        """Whether `format` has anything to do."""
        return self.output_config is not None or super().asks_for_format

    def tool_use(self, model: ServedModel) -> ToolUse:
        """The tools that the model is told of; raises InvalidRequest. It may take a while where there are tools."""
        asked = self.tool_choice
        choice = ToolChoice() if asked is None else asked.choice
        parallel = asked is None or not asked.disable_parallel_tool_use
        return tool_use(model.tokenizer, read_tools(self.tools), choice, parallel=parallel)

    def _named(self, max_bytes: int) -> Iterator[Named]:
        yield from super()._named(max_bytes)
        if self.output_config is not None:
            yield from self.output_config.named(max_bytes)


class MessagesBody(ConversationBody):
    """A conversation to answer."""

    clamped = ANTHROPIC_CLAMPED

    max_tokens: Annotated[int, Field(ge=1)]
