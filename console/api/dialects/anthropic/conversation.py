"""Anthropic's messages as OpenAI's, which chat templates take.

Consecutive turns of one side become one turn. The result of a tool becomes a message of its own, and thinking a field
of the assistant's. Turns of the assistant at the end are parts of an answer to be continued, which may have paused more
than once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec

from console.api.dialects.anthropic.body import BLOCKS_REFUSED
from engine.errors import InvalidRequest

Message = dict[str, Any]
"""One of OpenAI's messages, or a block of Anthropic's."""

_BLOCK_FIELDS = {
    "text": frozenset({"type", "text", "cache_control", "citations"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
    "thinking": frozenset({"type", "thinking", "signature", "cache_control"}),
    "redacted_thinking": frozenset({"type", "data", "cache_control"}),
}
"""Fields of each block. cache_control changes nothing: prefixes are cached by what they are. No signature is checked,
and redacted thinking, which only Anthropic can read, is dropped."""

_BLOCKS_BY_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
_ONE_TURN = ("user", "assistant")


def read_conversation(system: object, messages: Sequence[object]) -> list[Message]:
    """Return all messages, the system prompt first. Raises InvalidRequest naming the field at fault."""
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    turns: list[Message] = []
    if system is not None and system != []:
        turns.append({"role": "system", "content": _text(_blocks(system, "system", ("text",)))})
    for i, message in enumerate(messages):
        turns.extend(_message(message, f"messages[{i}]"))
    turns = _merge_turns(turns)
    where = f"messages[{len(messages) - 1}]"
    if _is_empty(turns[-1]):
        turns.pop()
    if not turns:
        raise InvalidRequest(f"{where} starts the answer, and has no text", param=where)
    if goes_on(turns) and turns[-1].get("tool_calls"):
        raise InvalidRequest(f"{where} calls tools whose tool_result blocks are missing", param=where)
    return turns


def goes_on(turns: Sequence[Message]) -> bool:
    """Return whether the last turn is the beginning of the answer, to be continued."""
    return bool(turns[-1]["role"] == "assistant")


def _is_empty(turn: Message) -> bool:
    """Return whether a turn is an answer that paused before its first word."""
    has_more = turn["content"].strip() or turn.get("tool_calls") or turn.get("reasoning_content")
    return turn["role"] == "assistant" and not has_more


def _message(message: object, where: str) -> Iterable[Message]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} should be an object with role and content", param=where)
    sent = {name for name, value in message.items() if value is not None}
    if extra := sorted(sent - {"role", "content"}):
        raise InvalidRequest(f"{where}.{extra[0]} is not a field of a message", param=f"{where}.{extra[0]}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _BLOCKS_BY_ROLE:
        raise InvalidRequest(f"{where}.role should be one of {', '.join(_BLOCKS_BY_ROLE)}", param=f"{where}.role")
    content = message.get("content")
    if role == "assistant" and content == []:
        return [{"role": role, "content": ""}]
    blocks = _blocks(content, f"{where}.content", _BLOCKS_BY_ROLE[role])
    return _user_turns(blocks) if role == "user" else [_turn(role, blocks)]


def _turn(role: str, blocks: Sequence[Message]) -> Message:
    """Return a turn of the system or the assistant."""
    turn: Message = {"role": role, "content": _text(blocks)}
    if calls := [_call(block) for block in blocks if block["type"] == "tool_use"]:
        turn["tool_calls"] = calls
    if thought := _lines(block["thinking"] for block in blocks if block["type"] == "thinking"):
        turn["reasoning_content"] = thought
    return turn


def _user_turns(blocks: Sequence[Message]) -> list[Message]:
    """Return a turn for each text and each result of a tool, in their order."""
    return [
        {"role": "user", "content": block["text"]}
        if block["type"] == "text"
        else {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"]}
        for block in blocks
    ]


def _call(block: Message) -> Message:
    function = {"name": block["name"], "arguments": msgspec.json.encode(block["input"]).decode()}
    return {"id": block["id"], "type": "function", "function": function}


def _merge_turns(turns: Iterable[Message]) -> list[Message]:
    """Join consecutive turns of one side."""
    merged: list[Message] = []
    sides = [(role, list(group)) for role, group in groupby(turns, key=itemgetter("role"))]
    for i, (role, of_one_side) in enumerate(sides):
        is_answer = role == "assistant" and i == len(sides) - 1
        joined = [_join_turns(of_one_side, "" if is_answer else "\n")] if role in _ONE_TURN else of_one_side
        merged.extend(joined)
    return merged


def _join_turns(turns: Sequence[Message], between: str) -> Message:
    """Join turns of one side. between: their texts."""
    whole: Message = {**turns[0], "content": between.join(filter(None, (turn["content"] for turn in turns)))}
    if calls := [call for turn in turns for call in turn.get("tool_calls", ())]:
        whole["tool_calls"] = calls
    if thought := between.join(filter(None, (turn.get("reasoning_content", "") for turn in turns))):
        whole["reasoning_content"] = thought
    return whole


def _lines(texts: Iterable[str]) -> str:
    """Return the texts that are not empty, each on a line of its own."""
    return "\n".join(filter(None, texts))


def _text(blocks: Iterable[Message]) -> str:
    """Return the text of all text blocks, each on a line of its own."""
    return "\n".join(block["text"] for block in blocks if block["type"] == "text")


def _blocks(content: object, where: str, allowed: Sequence[str]) -> list[Message]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} should be a string or an array of blocks", param=where)
    if not content:
        raise InvalidRequest(f"{where} is empty", param=where)
    return [_block(block, f"{where}[{i}]", allowed) for i, block in enumerate(content)]


def _block(block: object, where: str, allowed: Sequence[str]) -> Message:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{where} should be an object with a type", param=where)
    if kind not in allowed:
        refusal = BLOCKS_REFUSED.get(kind)
        why = f"this may be {' or '.join(allowed)}" if refusal is None else refusal.reason
        raise InvalidRequest(f"{where} has the type {kind}, which is not supported: {why}", param=where)
    sent = {name for name, value in block.items() if value is not None}
    for name in sorted(sent - _BLOCK_FIELDS[kind]):
        raise InvalidRequest(f"{where}.{name} is not a field of a {kind} block", param=f"{where}.{name}")
    match kind:
        case "text":
            return _text_block(block, where)
        case "tool_use":
            return _tool_use(block, where)
        case "thinking":
            return {"type": "thinking", "thinking": _string(block, "thinking", where)}
        case "redacted_thinking":
            return {"type": "redacted_thinking"}
        case _:
            return _tool_result(block, where)


def _text_block(block: Message, where: str) -> Message:
    if block.get("citations"):
        raise InvalidRequest(f"{where}.citations is not supported: no citations", param=f"{where}.citations")
    return {"type": "text", "text": _string(block, "text", where)}


def _tool_use(block: Message, where: str) -> Message:
    if not isinstance(block.get("input"), dict):
        raise InvalidRequest(f"{where}.input should be an object", param=f"{where}.input")
    if block.get("caller") not in (None, {"type": "direct"}):
        raise InvalidRequest(f"{where}.caller is not supported: only the model calls tools", param=f"{where}.caller")
    return {**block, "id": _string(block, "id", where), "name": _string(block, "name", where)}


def _tool_result(block: Message, where: str) -> Message:
    """Return the block with its content as text, which begins with "Error" where the tool failed."""
    failed = block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        raise InvalidRequest(f"{where}.is_error should be true or false", param=f"{where}.is_error")
    content = block.get("content")
    text = _text(_blocks(content, f"{where}.content", ("text",))) if content not in (None, []) else ""
    return {
        "type": "tool_result",
        "tool_use_id": _string(block, "tool_use_id", where),
        "content": f"Error: {text}" if failed else text,
    }


def _string(block: Message, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} should be a string", param=f"{where}.{name}")
    return value
