"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from contextlib import aclosing

from aiohttp import web
from msgspec.structs import replace

from console.api.anthropic.answers import (
    EVENTS,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Ending,
    Event,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    StopReason,
    TextBlock,
    TextDelta,
    TokensCounted,
    usage_of,
)
from console.api.anthropic.body import ConversationBody, MessagesBody
from console.api.anthropic.conversation import goes_on, read_conversation
from console.api.body import read
from console.api.chat_prompt import chat_prompt
from console.api.context import ApiContext, new_id
from console.api.conversation import read_messages
from console.api.described import describes
from console.api.errors import json_response
from console.api.generation import Generation
from console.api.prompts import Prompt
from console.api.sampling import sampling_params
from console.api.served import ServedModel
from console.api.stopping import without_stop
from console.api.stream import ChunkStream
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
        model = await self._context.served(body)
        params = replace(sampling_params(body, model, max_tokens=body.max_tokens), include_stop=True)
        prompt = await _prompt(body, model)
        call = _Call(model, params)
        with self._context.generate(request, call.id, body, model, [prompt], params) as generation:
            if not body.stream:
                return json_response(await call.whole(generation))
            async with ChunkStream(request, self._context.settings, EVENTS) as chunks:
                await call.send(generation, chunks)
            return chunks.response

    @describes("Count a conversation's tokens", body=ConversationBody, answer=TokensCounted, example=_COUNTED)
    async def _count(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, ConversationBody)
        prompt = await _prompt(body, await self._context.served(body))
        return json_response(TokensCounted(len(prompt.ids)))


async def _prompt(body: ConversationBody, model: ServedModel) -> Prompt:
    said = read_conversation(body.system, body.messages)
    return await chat_prompt(model, read_messages(said), continue_final=goes_on(said), variables=_QUIET)


class _Call:
    """One request on its way to its answer."""

    def __init__(self, model: ServedModel, params: SamplingParams) -> None:
        self.id = new_id("msg")
        self._model = model
        self._params = params

    async def whole(self, generation: Generation) -> Message:
        """The answer at once."""
        [answer] = await generation.answers()
        text, stop = without_stop(answer.text, answer.finish, self._params.stop)
        ending = self._ending(generation, answer.finish, stop)
        return self._message(generation, [TextBlock(text)] if text else [], ending)

    async def send(self, generation: Generation, chunks: ChunkStream) -> None:
        """Every piece as it comes, each block between its start and its stop."""
        begun = False
        async with aclosing(generation.deltas()) as deltas:
            async for _, delta in deltas:
                if not begun:
                    begun = True
                    await chunks.send(MessageStart(self._message(generation, [], None)))
                    await chunks.send(BlockStart(0, TextBlock("")))
                text, stop = without_stop(delta.text, delta.finish, self._params.stop)
                if text:
                    await chunks.send(BlockDelta(0, TextDelta(text)))
                if delta.finish is not None:
                    await chunks.send(BlockStop(0))
                    ending = self._ending(generation, delta.finish, stop)
                    await chunks.send(MessageDelta(ending, usage_of(generation)))
                    await chunks.send(MessageStop())

    def _ending(self, generation: Generation, finish: FinishReason | None, stop: str | None) -> Ending:
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
