"""Anthropic's messages, put as OpenAI's: that is what templates and everything behind them know.

Turns of one side that follow each other are one turn. A result of a tool is a message of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec

from console.api.dialects.anthropic.body import BLOCKS_REFUSED
from engine.errors import InvalidRequest

Spoken = dict[str, Any]
"""One of OpenAI's messages."""

_KNOWN = {
    "text": frozenset({"type", "text", "cache_control", "citations"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
}
"""Fields of each block. cache_control changes nothing: prefixes are cached by what they are."""

_ALLOWED = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use"), "system": ("text",)}
_ONE_TURN = ("user", "assistant")


def read_conversation(system: object, messages: Sequence[object]) -> list[Spoken]:
    """All that was said, the system's part first. Raises InvalidRequest naming what is wrong."""
    if not messages:
        raise InvalidRequest("messages is empty; there is nothing to answer", param="messages")
    said: list[Spoken] = []
    if system is not None and system != []:
        said.append({"role": "system", "content": _text(_blocks(system, "system", ("text",)))})
    for i, message in enumerate(messages):
        said.extend(_message(message, f"messages[{i}]"))
    turns = _merged(said)
    _check_last(turns[-1], f"messages[{len(messages) - 1}]")
    return turns


def goes_on(turns: Sequence[Spoken]) -> bool:
    """Whether the last turn is an answer begun, from which the answer goes on."""
    return bool(turns[-1]["role"] == "assistant")


def _check_last(turn: Spoken, where: str) -> None:
    """What an answer can go on from."""
    if turn["role"] != "assistant":
        return
    if turn.get("tool_calls"):
        raise InvalidRequest(f"{where} calls tools whose tool_result blocks are missing", param=where)
    if not turn["content"] or turn["content"][-1].isspace():
        wrong = "ends with white space" if turn["content"] else "is empty"
        raise InvalidRequest(f"{where} is the answer's beginning, and {wrong}", param=where)


def _message(message: object, where: str) -> Iterable[Spoken]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} should be an object with role and content", param=where)
    if extra := sorted(message.keys() - {"role", "content"}):
        raise InvalidRequest(f"{where}.{extra[0]} is not a field of a message", param=f"{where}.{extra[0]}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ALLOWED:
        raise InvalidRequest(f"{where}.role should be one of {', '.join(_ALLOWED)}", param=f"{where}.role")
    blocks = _blocks(message.get("content"), f"{where}.content", _ALLOWED[role])
    return _user_turns(blocks) if role == "user" else [_turn(role, blocks)]


def _turn(role: str, blocks: Sequence[Spoken]) -> Spoken:
    """A turn of the system or the assistant."""
    turn: Spoken = {"role": role, "content": _text(blocks)}
    if calls := [_call(block) for block in blocks if block["type"] == "tool_use"]:
        turn["tool_calls"] = calls
    return turn


def _user_turns(blocks: Sequence[Spoken]) -> list[Spoken]:
    """Each text and each result of a tool, in their order."""
    return [
        {"role": "user", "content": block["text"]}
        if block["type"] == "text"
        else {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"]}
        for block in blocks
    ]


def _call(block: Spoken) -> Spoken:
    function = {"name": block["name"], "arguments": msgspec.json.encode(block["input"]).decode()}
    return {"id": block["id"], "type": "function", "function": function}


def _merged(said: Iterable[Spoken]) -> list[Spoken]:
    """Turns of one side that follow each other as one."""
    turns: list[Spoken] = []
    for role, group in groupby(said, key=itemgetter("role")):
        together = list(group)
        turns.extend([_joined(together)] if role in _ONE_TURN else together)
    return turns


def _joined(turns: Sequence[Spoken]) -> Spoken:
    """Several turns of one side as one."""
    whole: Spoken = {**turns[0], "content": "\n".join(turn["content"] for turn in turns if turn["content"])}
    if calls := [call for turn in turns for call in turn.get("tool_calls", ())]:
        whole["tool_calls"] = calls
    return whole


def _text(blocks: Iterable[Spoken]) -> str:
    """The text of all blocks that are text, each on a line of its own."""
    return "\n".join(block["text"] for block in blocks if block["type"] == "text")


def _blocks(content: object, where: str, allowed: Sequence[str]) -> list[Spoken]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} should be a string or an array of blocks", param=where)
    if not content:
        raise InvalidRequest(f"{where} is empty", param=where)
    return [_block(block, f"{where}[{i}]", allowed) for i, block in enumerate(content)]


def _block(block: object, where: str, allowed: Sequence[str]) -> Spoken:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{where} should be an object with a type", param=where)
    if kind not in allowed:
        refusal = BLOCKS_REFUSED.get(kind)
        why = f"this may be {' or '.join(allowed)}" if refusal is None else refusal.reason
        raise InvalidRequest(f"{where} has the type {kind}, which is not supported: {why}", param=where)
    for name in sorted(block.keys() - _KNOWN[kind]):
        raise InvalidRequest(f"{where}.{name} is not a field of a {kind} block", param=f"{where}.{name}")
    match kind:
        case "text":
            return _text_block(block, where)
        case "tool_use":
            return _tool_use(block, where)
        case _:
            return _tool_result(block, where)


def _text_block(block: Spoken, where: str) -> Spoken:
    if block.get("citations"):
        raise InvalidRequest(f"{where}.citations is not supported: nothing is cited here", param=f"{where}.citations")
    return {"type": "text", "text": _string(block, "text", where)}


def _tool_use(block: Spoken, where: str) -> Spoken:
    if not isinstance(block.get("input"), dict):
        raise InvalidRequest(f"{where}.input should be an object", param=f"{where}.input")
    if block.get("caller") not in (None, {"type": "direct"}):
        raise InvalidRequest(f"{where}.caller is not supported: the model itself calls tools", param=f"{where}.caller")
    return {**block, "id": _string(block, "id", where), "name": _string(block, "name", where)}


def _tool_result(block: Spoken, where: str) -> Spoken:
    """Its content as text; that of a tool that failed says so."""
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


def _string(block: Spoken, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} should be a string", param=f"{where}.{name}")
    return value
