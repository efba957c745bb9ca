"""The prompt that a model's chat template makes of a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from types import MappingProxyType

from console.api.conversation import Turn, render
from console.api.prompts import Prompt
from console.api.served import ServedModel
from engine.errors import InvalidRequest
from engine.request import compact
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
    tools: Sequence[Mapping[str, object]] | None = None,
) -> Prompt:
    """The conversation as the model's template and tokenizer have it, and how another model would; with tools no other
    would do, for how calls are read depends on the model.

    continue_final: the last turn is an answer begun, which goes on.  opens_answer: the prompt ends with the start of an
    answer; None is where none goes on.  variables: for the template; tools: definitions, as `ToolUse` has them.
    Raises InvalidRequest where the template cannot render the turns.
    """
    as_text = partial(
        render,
        turns=turns,
        add_generation_prompt=not continue_final if opens_answer is None else opens_answer,
        continue_final=continue_final,
        variables=variables,
        tools=tools,
        client=model.client,
    )
    text = await as_text(model.tokenizer)
    ids = (await model.encode([text], add_special_tokens=False))[0]
    return Prompt(
        compact(ids),
        text,
        None if tools else partial(_encode, as_text),
        continues=continue_final,
        shared_tokens=await _system_tokens(model, turns, text, ids, variables, tools) if model.shares_system else 0,
    )


async def _system_tokens(
    model: ServedModel,
    turns: Sequence[Turn],
    text: str,
    ids: list[int],
    variables: Mapping[str, object],
    tools: Sequence[Mapping[str, object]] | None,
) -> int:
    """How many of the ids come before all that was asked and answered: the system messages that the conversation begins
    with, the tools, and what the template says around them. It is found by rendering another question after them: what
    comes before that one cannot tell what was asked. 0 where the template puts them elsewhere."""
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
    (known,) = await model.encode([start], add_special_tokens=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, ids, strict=False)))


async def _encode(as_text: Callable[[Tokenizer], Awaitable[str]], tokenizer: Tokenizer) -> list[int]:
    text = await as_text(tokenizer)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)
