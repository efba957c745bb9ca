"""Chat messages as clients send them, and their rendering with the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from console.api.http.json_bounds import JsonBounds
from console.api.requests.parameters import MESSAGE_REFUSED, NOTHING
from console.api.tools import (
    allows_one_call,
    as_plain_turns,
    convert_call_ids,
    format_of,
    has_tools,
    split_calls,
    tool_calls_turn,
    tool_result_turn,
    with_instructions,
    with_tool_names,
    without_null_content,
)
from console.api.tools.openai import read_calls
from engine.errors import InvalidRequest
from engine.text.thinking import format_of as thinking_format
from engine.text.thinking import reopened, thinking_to_continue
from engine.text.tokenizer import Tokenizer

Turn = dict[str, object]

_THINKING = ("reasoning_content", "reasoning")
"""Fields of an assistant's message with what it thought, of which templates may show the newest."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS: Mapping[str, frozenset[str]] = {
    "assistant": frozenset({"role", "content", "name", "tool_calls", *_THINKING}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
}
_FIELDS_OF_OTHERS = frozenset({"role", "content", "name"})
_RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final", "tools", "documents"})


def read_messages(messages: Sequence[object]) -> list[Turn]:
    """Return the turns for a template, each with plain text; raises InvalidRequest naming the message at fault."""
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    _check_arguments(messages)
    return with_tool_names([_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)])


def with_negative_prompt(turns: Sequence[Turn], negative_prompt: str) -> list[Turn]:
    """Return the conversation with `negative_prompt` as its system message; without any where that is empty.

    Raises InvalidRequest where nothing is left then.
    """
    system: list[Turn] = [{"role": "system", "content": negative_prompt}] if negative_prompt else []
    guided = [*system, *(turn for turn in turns if turn["role"] != "system")]
    if not guided:
        raise InvalidRequest(
            "cfg_scale needs a negative_prompt if the only message is a system message",
            param="negative_prompt",
        )
    return guided


async def render(
    tokenizer: Tokenizer,
    *,
    turns: Sequence[Turn],
    add_generation_prompt: bool,
    continue_final: bool,
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, object]] | None = None,
    client: str = "",
    thinking: str = "auto",
) -> str:
    """Return the prompt text. continue_final: it ends with the text of the last turn, or with its thinking where it has
    nothing else, which the answer continues.

    tools: their definitions for the template.  client: the sender of the request.  thinking: as in ServedModel.
    Raises InvalidRequest where the template cannot render the turns.
    """
    if reserved := sorted(_RESERVED & variables.keys()):
        raise InvalidRequest(f"chat_template_kwargs may not set {reserved[0]}", param="chat_template_kwargs")
    has_calls = any("tool_calls" in turn for turn in turns)
    described: Sequence[Mapping[str, object]] = ()
    if (tools or has_calls or any(turn["role"] == "tool" for turn in turns)) and not has_tools(tokenizer):
        turns, described, tools = as_plain_turns(turns), tools or (), None
    elif has_calls:
        turns = _with_calls(tokenizer, turns)
    if stopped := thinking_to_continue(turns) if continue_final else "":
        turns, continue_final, add_generation_prompt = turns[:-1], False, True
    rendered = partial(
        tokenizer.apply_chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final=continue_final,
        tools=tools,
        **variables,
    )
    plain, turns = turns, with_instructions(turns, described, "system") if described else turns
    has_null = any(turn["content"] is None for turn in turns)
    try:
        text: str = await rendered(turns, client)
    except InvalidRequest:
        if described:  # the template refuses system messages
            text = await rendered(with_instructions(plain, described, "user"), client)
        elif has_null:
            text, has_null = await rendered(without_null_content(turns), client), False
        else:
            raise
    if has_null and "None" in text:
        other: str = await rendered(without_null_content(turns), client)
        text = other if other.count("None") < text.count("None") else text  # some print the null as a word
    return reopened(thinking_format(tokenizer, thinking), text, stopped) if stopped else text


def _with_calls(tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[Turn]:
    """Return turns with calls as the model's template takes them; raises InvalidRequest for one that ignores calls."""
    template = tokenizer.tool_template
    if template is not None and "tool_calls" not in template.source:
        raise InvalidRequest("this model's chat template does not support tool_calls in messages", param="messages")
    turns = split_calls(turns) if allows_one_call(tokenizer) else turns
    return convert_call_ids(turns, format_of(tokenizer))


def _check_arguments(messages: Sequence[object]) -> None:
    """Raise InvalidRequest where arguments of calls, which are JSON within JSON, hold more than a body may."""
    calls = [call for message in messages if isinstance(message, dict) for call in _as_list(message.get("tool_calls"))]
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    texts = [function.get("arguments") for function in functions if isinstance(function, dict)]
    together = ",".join(text for text in texts if isinstance(text, str))
    JsonBounds().check(together.encode(), "messages[].tool_calls[].function.arguments")


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _read_message(message: object, where: str) -> Turn:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} should be an object with role and content", param=where)
    role = _read_role(message.get("role"), where)
    fields = _FIELDS.get(role, _FIELDS_OF_OTHERS)
    for name, value in message.items():
        if name in MESSAGE_REFUSED:
            MESSAGE_REFUSED[name].check(f"{where}.{name}", value)
        elif name not in fields and value not in NOTHING:
            raise InvalidRequest(f"{where}.{name} is not a field of this message", param=f"{where}.{name}")
    turn = _read_turn(role, message, where)
    if (name := message.get("name")) is not None:
        if not isinstance(name, str):
            raise InvalidRequest(f"{where}.name should be a string", param=f"{where}.name")
        turn["name"] = name
    if thought := next((text for field in _THINKING if (text := message.get(field)) is not None), None):
        if not isinstance(thought, str):
            raise InvalidRequest(f"{where}.reasoning_content should be a string", param=f"{where}.reasoning_content")
        turn |= {"reasoning_content": thought, "thinking": thought}
    return turn


def _read_turn(role: str, message: Mapping[str, object], where: str) -> Turn:
    """Return the turn by its role, with its calls, or the call that it answers."""
    content, calls = message.get("content"), message.get("tool_calls")
    text = "" if role == "assistant" and content is None else _read_content(content, where)
    if role == "assistant" and calls:
        at = f"{where}.tool_calls"
        return tool_calls_turn(text, read_calls(calls, at), at)
    if role != "tool":
        return {"role": role, "content": text}
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or not call_id:
        at = f"{where}.tool_call_id"
        raise InvalidRequest(f"{at} should be the id of the tool call", param=at)
    return tool_result_turn(call_id, text)


def _read_role(role: object, where: str) -> str:
    if not isinstance(role, str) or role not in _ROLES:
        but = "and is missing" if role is None else f"not {role!r}" if isinstance(role, str) else "as a string"
        raise InvalidRequest(f"{where}.role should be one of {', '.join(_ROLES)}, {but}", param=f"{where}.role")
    return _ROLES[role]


def _read_content(content: object, where: str) -> str:
    """Return the text, of all parts where it has several, each on a line of its own."""
    where = f"{where}.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} should be a string or an array of text parts", param=where)
    return "\n".join(_read_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _read_part(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidRequest(f"{where} should have the type text; other content is not supported", param=where)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text should be a string", param=f"{where}.text")
    return text
