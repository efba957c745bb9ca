"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing
from functools import partial

from aiohttp import web

from console.api.anthropic.answers import (
    EVENTS,
    Block,
    Ending,
    Event,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    StopReason,
    TokensCounted,
    usage_of,
)
from console.api.anthropic.blocks import BlockWriter, blocks_of
from console.api.anthropic.body import ConversationBody, MessagesBody
from console.api.anthropic.conversation import goes_on, read_conversation
from console.api.body import read
from console.api.chat_prompt import chat_prompt
from console.api.context import ApiContext
from console.api.conversation import read_messages
from console.api.described import describes
from console.api.errors import json_response
from console.api.generation import Generation, StoppedBy
from console.api.prompts import Prompt
from console.api.received import of_body
from console.api.sampling import sampling_params
from console.api.served import ServedModel
from console.api.stream import ChunkStream
from console.api.tools import CallReader, ToolUse, finish_of
from engine.backends.base import FinishReason
from engine.config import SamplingParams

_QUIET = {"enable_thinking": False}
"""For templates that know thinking: this dialect's answers have none."""

_COUNTED = {"messages": [{"role": "user", "content": "Hello"}]}
_EXAMPLE = {**_COUNTED, "max_tokens": 16}


class Messages:
    """The endpoints."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [web.post("/v1/messages", self._post), web.post("/v1/messages/count_tokens", self._count)]

    @describes("Answer a conversation", body=MessagesBody, answer=Message, event=Event, example=_EXAMPLE)
    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, MessagesBody)
        model = await self._context.served(request, body)
        use = await _tool_use(body, model)
        params = use.applied(sampling_params(body, model, max_tokens=body.max_tokens))
        prompt = await _prompt(request, body, model, use)
        call = _Call(model, params, use.reader("toolu_"))
        async with self._context.generate(request, call.id, body, model, [prompt], params) as generation:
            if not body.stream:
                return json_response(await call.whole(generation))
            async with ChunkStream(request, self._context.settings, EVENTS) as chunks:
                await call.send(generation, chunks)
            return chunks.response

    @describes("Count a conversation's tokens", body=ConversationBody, answer=TokensCounted, example=_COUNTED)
    async def _count(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, ConversationBody)
        model = await self._context.served(request, body)
        prompt = await _prompt(request, body, model, await _tool_use(body, model))
        return json_response(TokensCounted(len(prompt.ids)))


async def _tool_use(body: ConversationBody, model: ServedModel) -> ToolUse:
    return await asyncio.to_thread(body.tool_use, model) if body.tools else body.tool_use(model)


async def _prompt(request: web.Request, body: ConversationBody, model: ServedModel, use: ToolUse) -> Prompt:
    model.check_length(len(body.messages), "messages")
    said = await of_body(request, partial(read_conversation, body.system, body.messages))
    turns = await of_body(request, partial(read_messages, said))
    return await chat_prompt(model, turns, continue_final=goes_on(said), variables=_QUIET, tools=use.definitions)


class _Call:
    """One request on its way to its answer. reader: what finds calls of tools in it."""

    def __init__(self, model: ServedModel, params: SamplingParams, reader: CallReader | None) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._params = params
        self._reader = reader

    async def whole(self, generation: Generation) -> Message:
        """The answer at once."""
        [answer] = await generation.answers()
        content = blocks_of(answer.text, self._reader)
        return self._message(generation, content, self._ending(generation, answer.finish, answer.stop_reason))

    async def send(self, generation: Generation, chunks: ChunkStream) -> None:
        """Every piece as it comes."""
        blocks: BlockWriter | None = None
        async with aclosing(generation.deltas()) as deltas:
            async for _, delta in deltas:
                if blocks is None:
                    await chunks.send(MessageStart(self._message(generation, [], None)))
                    blocks = BlockWriter(chunks, self._reader)
                await blocks.text(delta.text)
                if delta.finish is not None:
                    await blocks.finish()
                    ending = self._ending(generation, delta.finish, generation.stop_reason(delta))
                    await chunks.send(MessageDelta(ending, usage_of(generation)))
                    await chunks.send(MessageStop())

    def _ending(self, generation: Generation, finish: FinishReason | None, stopped: StoppedBy) -> Ending:
        stop = stopped if isinstance(stopped, str) else None
        if stop is None and finish_of(self._reader, finish) == "tool_calls":
            return Ending("tool_use", None)
        return Ending(_stop_reason(finish, stop, generation.tokens.output, self._params.max_tokens), stop)

    def _message(self, generation: Generation, content: list[Block], ending: Ending | None) -> Message:
        return Message(
            id=self.id,
            model=self._model.name,
            content=content,
            stop_reason=None if ending is None else ending.stop_reason,
            stop_sequence=None if ending is None else ending.stop_sequence,
            usage=usage_of(generation),
        )


def _stop_reason(finish: FinishReason | None, stop: str | None, output_tokens: int, limit: int | None) -> StopReason:
    """Why an answer ended, in Anthropic's words."""
    if stop is not None:
        return "stop_sequence"
    match finish:
        case "length" if limit is not None and output_tokens < limit:
            return "model_context_window_exceeded"
        case "length":
            return "max_tokens"
        case "timeout":
            return "pause_turn"
        case _:
            return "end_turn"
