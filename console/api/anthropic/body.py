"""What /v1/messages takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec.structs import replace
from pydantic import Field

from console.api.anthropic.tools import ChoiceField, OutputConfig, ToolField, read_tools
from console.api.body_schema import MESSAGES
from console.api.parameters import ANTHROPIC_INERT, ANTHROPIC_REFUSED
from console.api.sampling import SamplingFields, sampling_params
from console.api.served import ServedModel
from console.api.tools import ToolChoice, ToolUse, tool_use
from engine.config import SamplingParams


class ConversationBody(SamplingFields):
    """A conversation to answer, or to count the tokens of.

    system: a string or text blocks.  stop_sequences: `stop` by its name here.  n: each request has one answer.
    include_stop_str_in_output: a stop sequence is told apart from the answer.
    """

    refused = ANTHROPIC_REFUSED
    inert = ANTHROPIC_INERT
    aliases: ClassVar[Mapping[str, str]] = {**SamplingFields.aliases, "stop_sequences": "stop"}

    messages: Annotated[list[Any], MESSAGES]
    system: object = None
    tools: list[ToolField] | None = None
    tool_choice: ChoiceField | None = None
    output_config: OutputConfig | None = None
    n: Literal[1] = 1
    include_stop_str_in_output: Literal[False] = False

    def tool_use(self, model: ServedModel) -> ToolUse:
        """The tools that the model is told of; raises InvalidRequest. It may take a while where there are tools."""
        asked = self.tool_choice
        choice = ToolChoice() if asked is None else asked.choice
        parallel = asked is None or not asked.disable_parallel_tool_use
        return tool_use(model.tokenizer, read_tools(self.tools), choice, parallel=parallel)


class MessagesBody(ConversationBody):
    """A conversation to answer."""

    max_tokens: Annotated[int, Field(ge=1)]

    def params(self, model: ServedModel) -> SamplingParams:
        """What the engine is told; raises InvalidRequest. It may take a while where there is an output format.

        The answer has the stop sequence that ended it, to be told by.
        """
        params = replace(sampling_params(self, model, max_tokens=self.max_tokens), include_stop=True)
        grammar = None if self.output_config is None else self.output_config.grammar()
        return params if grammar is None else replace(params, grammar=grammar)
