"""POST /api/chat: Ollama's answer to a conversation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from console.api.context import ApiContext, new_id
from console.api.dialects.ollama.answers import (
    AnswerMessage,
    AnswerPart,
    AnswerWriter,
    Chatted,
    Stopwatch,
    ToolCalled,
    no_answer,
    send_whole,
)
from console.api.dialects.ollama.body import MESSAGE_REFUSED, ChatBody, options_params
from console.api.http.errors import json_response
from console.api.http.request_body import run_offloaded
from console.api.requests.body import read
from console.api.requests.chat_prompt import chat_prompt
from console.api.requests.conversation import read_messages
from console.api.requests.parameters import NOTHING
from console.api.requests.schemas import describes
from console.api.requests.stream import JSON_LINES
from engine.errors import InvalidRequest

# Ollama's messages as OpenAI's, which chat templates take.

Message = dict[str, Any]
"""One of OpenAI's messages."""

_FIELDS_BY_ROLE = {
    "system": frozenset({"role", "content"}),
    "user": frozenset({"role", "content"}),
    "assistant": frozenset({"role", "content", "thinking", "tool_calls"}),
    "tool": frozenset({"role", "content", "tool_name", "tool_call_id"}),
}


def read_conversation(messages: Sequence[object]) -> list[Message]:
    """Return all messages. Calls without an id get one; results without one belong to the first open call of the tool
    that they name. Raises InvalidRequest naming the field at fault."""
    converted: list[Message] = []
    open_calls = _OpenCalls()
    for i, message in enumerate(messages):
        turn = _message(message, f"messages[{i}]")
        for j, call in enumerate(turn.get("tool_calls", ())):
            call["id"] = call["id"] or f"call_{i}_{j}"
            open_calls.add(call["id"], call["function"]["name"])
        if turn["role"] == "tool":
            turn["tool_call_id"] = _close_call(turn, open_calls, f"messages[{i}]")
        converted.append(turn)
    return converted


def goes_on(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last turn is the beginning of the answer, to be continued."""
    last = turns[-1]
    return bool(last["role"] == "assistant" and last["content"] and not last.get("tool_calls"))


class _OpenCalls:
    """The calls without a result, in their order."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._open: set[int] = set()
        self._of_id: dict[str, list[int]] = {}
        self._of_tool: dict[str, deque[int]] = {}

    def add(self, call_id: str, tool: str) -> None:
        """Add a call."""
        number = len(self._ids)
        self._ids.append(call_id)
        self._open.add(number)
        self._of_id.setdefault(call_id, []).append(number)
        for name in {"", tool}:
            self._of_tool.setdefault(name, deque()).append(number)

    def close(self, call_id: str) -> None:
        """Close all calls of this id."""
        self._open.difference_update(self._of_id.pop(call_id, ()))

    def first(self, tool: str) -> str | None:
        """Close the first open call of a tool, "" for any, and return its id."""
        calls = self._of_tool.get(tool, deque())
        while calls:
            number = calls.popleft()
            if number in self._open:
                self._open.remove(number)
                return self._ids[number]
        return None


def _close_call(result: Message, open_calls: _OpenCalls, where: str) -> str:
    """Close the call that a result belongs to, and return its id."""
    call_id, tool = result.pop("tool_call_id"), result.pop("tool_name")
    if call_id:
        open_calls.close(call_id)
        return str(call_id)
    found = open_calls.first(tool)
    if found is None:
        raise InvalidRequest(f"{where} is the result of an unknown call", param=where)
    return found


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} should be an object with role and content", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _FIELDS_BY_ROLE:
        raise InvalidRequest(f"{where}.role should be one of {', '.join(_FIELDS_BY_ROLE)}", param=f"{where}.role")
    for name, value in message.items():
        if name in MESSAGE_REFUSED:
            MESSAGE_REFUSED[name].check(f"{where}.{name}", value)
        elif name not in _FIELDS_BY_ROLE[role] and value not in NOTHING:
            raise InvalidRequest(f"{where}.{name} is not a field of a {role} message", param=f"{where}.{name}")
    turn: Message = {"role": role, "content": _string(message, "content", where)}
    if role == "tool":
        return turn | {name: _string(message, name, where) for name in ("tool_name", "tool_call_id")}
    if thought := _string(message, "thinking", where):
        turn["reasoning_content"] = thought
    if calls := message.get("tool_calls"):
        turn["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return turn


def _calls(calls: object, where: str) -> list[Message]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} should be an array", param=where)
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(arguments, dict):
        raise InvalidRequest(f"{where} should have a function with a name and arguments, an object", param=where)
    name = _string(function, "name", f"{where}.function")
    text = msgspec.json.encode(arguments).decode()
    return {"id": _string(call, "id", where), "type": "function", "function": {"name": name, "arguments": text}}


def _string(fields: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that is text, "" where it is absent."""
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} should be a string", param=f"{where}.{name}")
    return value or ""


class Chat:
    """POST /api/chat."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return its place and handler."""
        return [web.post("/api/chat", self._post)]

    @describes(
        "Answer a conversation",
        body=ChatBody,
        answer=Chatted,
        event=Chatted,
        media="application/x-ndjson",
        example={
            "messages": [{"role": "user", "content": "Hello"}],
            "stream": False,
            "options": {"num_predict": 16},
        },
        operation="chat",
    )
    async def _post(self, request: web.Request) -> web.StreamResponse:
        watch = Stopwatch()
        body = await read(request, ChatBody)
        options = body.read()
        messages = await run_offloaded(request, partial(read_conversation, body.messages))
        if not messages and await body.unloads(request, self._context):
            return json_response(no_answer(body.model or "", watch, _shape, unloads=True))
        model = body.with_client_name(
            await watch.loading(self._context.served_model(request, options, JSON_LINES if body.stream else None))
        )
        body.keep_loaded(request, self._context.engine, model, stops=not messages)
        if not messages:
            ending = no_answer(model.name, watch, _shape, unloads=body.keep_alive_s == 0)
            return await send_whole(request, self._context.settings, ending)
        model.check_length(len(messages), "messages")
        thinking = body.thinking(model)
        use = await asyncio.to_thread(body.tool_use, model) if body.tools else body.tool_use(model)
        prompt = await chat_prompt(
            model,
            await run_offloaded(request, partial(read_messages, messages)),
            continue_final=goes_on(messages),
            variables=thinking.variables(model),
            tools=use,
        )
        params = await use.apply_to(options_params(options, model, len(prompt.ids), logprobs=body.wanted_logprobs))
        params = thinking.apply_to(params, model, prompt)
        text = prompt.answer_text(model.tokenizer, params) if body.logprobs else None
        writer = AnswerWriter(model, watch, _shape, logprobs=text, reader=use.reader())
        async with self._context.generate(request, new_id("chat"), options, model, [prompt], params) as generation:
            return await writer.answer(request, self._context.settings, generation, body.stream)


def _shape(text: str, thinking: str, calls: list[ToolCalled], ids: list[int] | None, /, **fields: Any) -> AnswerPart:
    message = AnswerMessage(content=text, thinking=thinking or UNSET, tool_calls=calls or UNSET)
    return Chatted(message=message, **fields)
