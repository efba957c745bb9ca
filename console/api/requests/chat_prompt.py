"""The prompt that a model's chat template makes of a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import Field

from console.api.requests.body import Body
from console.api.requests.conversation import Turn, render
from console.api.requests.parameters import MESSAGE_REFUSED, Refusal
from console.api.requests.prompts import Prompt, Truncation
from console.api.requests.schemas import MESSAGES, TOOL_CHOICE
from console.api.requests.served_model import ServedModel
from console.api.requests.thinking import Effort, ThinkingOptions
from console.api.tools import NO_TOOLS, ToolUse, tool_use
from console.api.tools.openai import MAX_TOOLS, ToolField, read_choice, read_tools
from engine.errors import InvalidRequest
from engine.requests.request import compact_ids
from engine.text.thinking import begun_in
from engine.text.tokenizer import Tokenizer

_QUESTION = "ThisIsWhereTheFirstQuestionBegins"
_NOTHING: Mapping[str, object] = MappingProxyType({})


async def chat_prompt(
    model: ServedModel,
    turns: Sequence[Turn],
    *,
    continue_final: bool = False,
    opens_answer: bool | None = None,
    variables: Mapping[str, object] = _NOTHING,
    tools: ToolUse = NO_TOOLS,
    truncation: Truncation | None = None,
) -> Prompt:
    """Return the prompt of a conversation, which another model can encode again unless it has tools: how calls are
    parsed depends on the model.

    continue_final: the last turn is the beginning of the answer.  opens_answer: the prompt ends with the start of an
    answer; None is the opposite of continue_final.  variables: for the template.  tools: that it has.
    Raises InvalidRequest where the template cannot render the turns.
    """
    definitions = tools.definitions
    as_text = partial(
        render,
        turns=turns,
        add_generation_prompt=not continue_final if opens_answer is None else opens_answer,
        continue_final=continue_final,
        variables=variables,
        tools=definitions,
        client=model.client,
        thinking=model.thinking,
    )
    text = whole = await as_text(model.tokenizer)
    if truncation is not None:
        text = await truncation.part_of(whole, model)
    (ids,) = await model.encode([text], add_special_tokens=False)
    remaining = ids if truncation is None else truncation.cut(ids)
    if is_cut := text != whole or len(remaining) < len(ids):
        ids, text = (
            remaining,
            await model.offload(partial(model.tokenizer.decode, remaining, skip_special_tokens=False)),
        )
    return Prompt(
        compact_ids(ids),
        text,
        None if definitions else partial(_encode, as_text, truncation),
        continues=continue_final,
        begun=begun_in(turns) if continue_final else "",
        tool_headers=tools.headers,
        shared_tokens=await _system_tokens(model, turns, text, ids, variables, definitions)
        if model.shares_system and not is_cut
        else 0,
    )


async def _system_tokens(
    model: ServedModel,
    turns: Sequence[Turn],
    text: str,
    ids: list[int],
    variables: Mapping[str, object],
    tools: Sequence[Mapping[str, object]] | None,
) -> int:
    """Return the number of ids before the first question: the system messages that the conversation begins with, the
    tools, and the template's text around them. They are found by rendering another question after them: the ids before
    that one do not depend on the question. 0 where the template puts them elsewhere."""
    system = list(takewhile(lambda turn: turn["role"] == "system", turns))
    try:
        other = await render(
            model.tokenizer,
            turns=[*system, {"role": "user", "content": _QUESTION}],
            add_generation_prompt=False,
            continue_final=False,
            variables=variables,
            tools=tools,
            client=model.client,
        )
    except InvalidRequest:
        return 0
    start, question, _ = other.partition(_QUESTION)
    if not question or not text.startswith(start):
        return 0
    (prefix,) = await model.encode([start], add_special_tokens=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, ids, strict=False)))


async def _encode(
    as_text: Callable[[Tokenizer], Awaitable[str]], truncation: Truncation | None, tokenizer: Tokenizer
) -> list[int]:
    text = await as_text(tokenizer)
    ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)
    return ids if truncation is None else truncation.cut(ids)


# Fields of a conversation: its messages, its tools, and its rendering.

MAX_TEMPLATE_VARIABLES = 64
"""More than any template reads."""


class ConversationFields(Body):
    """A conversation, and its rendering with the model's chat template.

    tools: functions that the model may call.  tool_choice: none, auto (the model decides), required, or a function by
    its name.  parallel_tool_calls: one answer may make several calls.
    add_generation_prompt: the prompt ends with the start of an answer, which is the default.
    continue_final_message: the last message is the beginning of the answer.
    chat_template_kwargs: variables for the model's own template.
    enable_thinking: think before the answer, or not; null leaves it to the model.
    reasoning_effort: how hard to think; for models without efforts of their own, minimal, low and medium are budgets of
    256, 1,024 and 4,096 tokens, and none switches thinking off.
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
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None

    @property
    def thinking(self) -> ThinkingOptions:
        """The client's wishes for the thinking, which chat_template_kwargs may have, too."""
        enabled, effort = self.enable_thinking, self.reasoning_effort or ""
        given = self.chat_template_kwargs
        if enabled is None and isinstance(wish := given.get("enable_thinking", given.get("thinking")), bool):
            enabled = wish
        return ThinkingOptions(enabled, effort)

    async def tool_use(self, model: ServedModel) -> ToolUse:
        """Return the tools for the prompt; raises InvalidRequest. Grammars are compiled in a thread."""
        return await asyncio.to_thread(self._tool_use, model) if self.tools else self._tool_use(model)

    async def prompt(self, model: ServedModel, turns: Sequence[Turn], use: ToolUse) -> Prompt:
        """Return the prompt of `turns`; raises InvalidRequest, also where two fields disagree."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        return await chat_prompt(
            model,
            turns,
            continue_final=self.continue_final_message,
            opens_answer=self.add_generation_prompt,
            variables=self.thinking.variables(model) | self.chat_template_kwargs,
            tools=use,
            truncation=self.prompt_truncation(model),
        )

    def prompt_truncation(self, model: ServedModel) -> Truncation | None:
        """Return how to truncate the prompt, None for not at all; raises InvalidRequest."""
        return None

    def _tool_use(self, model: ServedModel) -> ToolUse:
        choice = read_choice(self.tool_choice)
        return tool_use(model.tokenizer, read_tools(self.tools), choice, parallel=self.parallel_tool_calls)
