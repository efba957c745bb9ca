"""What /v1/messages takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from console.api.anthropic.tools import ChoiceField, OutputConfig, ToolField, read_tools
from console.api.body_schema import ANTHROPIC_MESSAGES, ANTHROPIC_SYSTEM
from console.api.clamped import ANTHROPIC_CLAMPED
from console.api.formats import Named
from console.api.parameters import (
    ANTHROPIC_BLOCKS_REFUSED,
    ANTHROPIC_INERT,
    ANTHROPIC_OUTPUT_REFUSED,
    ANTHROPIC_REFUSED,
    ANTHROPIC_TOOLS_REFUSED,
    Refusal,
)
from console.api.sampling import SamplingFields
from console.api.served import ServedModel
from console.api.tools import ToolChoice, ToolUse, tool_use
from console.api.tools.openai import MAX_TOOLS


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
