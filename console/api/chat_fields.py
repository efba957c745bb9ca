"""What a conversation is asked with, whatever is to become of it: its messages, its tools, and how it is rendered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from console.api.body import Body
from console.api.body_schema import MESSAGES, TOOL_CHOICE
from console.api.chat_prompt import chat_prompt
from console.api.conversation import Turn
from console.api.parameters import MESSAGE_REFUSED, Refusal
from console.api.prompts import Prompt
from console.api.served import ServedModel
from console.api.tools import ToolUse, tool_use
from console.api.tools.openai import MAX_TOOLS, ToolField, read_choice, read_tools
from engine.errors import InvalidRequest

MAX_TEMPLATE_VARIABLES = 64
"""More than any template looks at."""


class ConversationFields(Body):
    """A conversation, and how the model's chat template makes a prompt of it.

    tools: functions that the model may call.  tool_choice: none, auto (which is as the model likes), required, or a
    function by its name.  parallel_tool_calls: whether one answer may make several calls.
    add_generation_prompt: the prompt ends with the start of an answer; it does where nothing is said.
    continue_final_message: the last message is an answer begun, which goes on.
    chat_template_kwargs: variables for the model's own template (enable_thinking, say).
    """

    refused_within: ClassVar[Mapping[str, Mapping[str, Refusal]]] = {"messages[].": MESSAGE_REFUSED}
    prompt_field = "messages"
    max_entries: ClassVar[Mapping[str, int]] = {"tools": MAX_TOOLS, "chat_template_kwargs": MAX_TEMPLATE_VARIABLES}

    messages: Annotated[list[Any], MESSAGES]
    tools: list[ToolField] | None = None
    tool_choice: Annotated[object, TOOL_CHOICE] = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]

    async def tool_use(self, model: ServedModel) -> ToolUse:
        """The tools that the model is told of; raises InvalidRequest. Grammars are made beside the event loop."""
        return await asyncio.to_thread(self._tool_use, model) if self.tools else self._tool_use(model)

    async def prompt(self, model: ServedModel, turns: Sequence[Turn], use: ToolUse) -> Prompt:
        """`turns` as the model's template and tokenizer have them; raises InvalidRequest."""
        return await chat_prompt(
            model,
            turns,
            continue_final=self.continue_final_message,
            opens_answer=self._opens_answer,
            variables=self.chat_template_kwargs,
            tools=use.definitions,
        )

    def _tool_use(self, model: ServedModel) -> ToolUse:
        choice = read_choice(self.tool_choice)
        return tool_use(model.tokenizer, read_tools(self.tools), choice, parallel=self.parallel_tool_calls)

    @property
    def _opens_answer(self) -> bool:
        """Whether the prompt ends with the start of an answer; raises InvalidRequest where two fields disagree."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
