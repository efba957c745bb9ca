"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing
from functools import partial
from typing import Literal

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.anthropic.body import ConversationBody, MessagesBody
from console.api.dialects.anthropic.conversation import goes_on, read_conversation
from console.api.http.errors import json_response
from console.api.http.request_body import run_offloaded
from console.api.requests.body import read
from console.api.requests.chat_prompt import chat_prompt
from console.api.requests.conversation import read_messages
from console.api.requests.generation import Generation, StoppedBy, WhyField
from console.api.requests.prompts import Prompt
from console.api.requests.sampling import sampling_params
from console.api.requests.schemas import describes
from console.api.requests.served_model import ServedModel
from console.api.requests.stream import ChunkStream, Framing, named_event
from console.api.tools import (
    AnswerPiece,
    CallArguments,
    CallMalformed,
    CallReader,
    CallStart,
    JsonObject,
    TextPiece,
    ToolUse,
    arguments_of,
    finish_of,
    read_answer,
)
from engine.backends.base import FinishReason
from engine.config import SamplingParams
from engine.errors import EngineError

# Answers: a message, or the events of one. The `type` of each is its first field.

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "model_context_window_exceeded"
]
"""pause_turn: the time was up; a client that sends the answer back as the last message gets its continuation. An answer
with calls, whose results would have to follow it, ends with tool_use instead. max_tokens: also where an answer ends
within a call for another reason, as clients know from it that the last call is incomplete."""


class TextBlock(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    """Text of the answer."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking", tag_field="type"):
    """Thinking of the model before its answer. signature: always empty, for nothing verifies it."""

    thinking: str
    signature: str = ""


class Caller(msgspec.Struct, frozen=True, tag="direct", tag_field="type"):
    """Only the model calls tools."""


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use", tag_field="type"):
    """A call of a tool. input: by the tool's own schema; empty at the start of a streamed one."""

    id: str
    name: str
    input: JsonObject
    caller: Caller = Caller()


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputDetails(msgspec.Struct, frozen=True):
    """thinking_tokens: those of the answer's tokens that are thinking."""

    thinking_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. input_tokens: computed tokens of the prompt; the others came from the prefix cache.

    why: what the time of the message went into, where requested.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails
    cache_creation: None = None
    inference_geo: None = None
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"
    why: WhyField = msgspec.UNSET


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    """The answer. stop_sequence: the one that ended it."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None
    usage: Usage


class TokensCounted(msgspec.Struct, frozen=True):
    """The tokens of a conversation as a prompt."""

    input_tokens: int


class MessageStart(msgspec.Struct, frozen=True, tag="message_start", tag_field="type"):
    """The message, still empty."""

    message: Message


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start", tag_field="type"):
    """A block begins, empty."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta", tag_field="type"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta", tag_field="type"):
    """More thinking."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta", tag_field="type"):
    """The signature of a thinking block, which is complete."""

    signature: str = ""


class InputDelta(msgspec.Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    """More of a call's input as JSON text."""

    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta", tag_field="type"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop", tag_field="type"):
    """A block is complete."""

    index: int


class Ending(msgspec.Struct, frozen=True):
    """Why the message ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta", tag_field="type"):
    """The message ends. usage: of all of it."""

    delta: Ending
    usage: Usage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop", tag_field="type"):
    """The end of the stream."""


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


def usage_of(generation: Generation) -> Usage:
    """Return the tokens that the generation used so far."""
    tokens = generation.tokens
    return Usage(
        input_tokens=tokens.prompt - tokens.cached,
        cache_read_input_tokens=tokens.cached,
        output_tokens=tokens.output,
        output_tokens_details=OutputDetails(tokens.thinking),
        why=generation.why,
    )


EVENTS = Framing("text/event-stream", named_event, named_event(b'{"type":"ping"}'))


# The blocks of a message: its text and its tool calls.


class MalformedCall(EngineError):
    """The model wrote a malformed call, whose beginning was sent; details: tool."""

    code = "malformed_call"
    http_status = 500


def blocks_of(text: str, reader: CallReader | None) -> list[Block]:
    """Return the blocks of a whole answer. reader: parses tool calls; None without tools."""
    prose, calls = (text, ()) if reader is None else read_answer(reader, text)
    used = [ToolUseBlock(call.id, call.name, arguments_of(call.arguments, truncated=call.truncated)) for call in calls]
    return [TextBlock(prose), *used] if prose else [*used]


class BlockWriter:
    """Sends the blocks of a streamed answer one after the other, each between its start and its stop. Raises
    MalformedCall within the block of a malformed call: clients make the call of every block that stops.

    has_calls: True once one of them is a call, complete or not.
    """

    def __init__(self, chunks: ChunkStream, reader: CallReader | None) -> None:
        self.has_calls = False
        self._chunks = chunks
        self._reader = reader
        self._index = 0
        self._open: type[Block] | None = None
        self._tool = ""

    async def thinking(self, text: str, *, omitted: bool) -> None:
        """Send more of the thinking, which comes before the text. omitted: send the block without it."""
        if text:
            await self._begin(ThinkingBlock(""))
            if not omitted:
                await self._chunks.send(BlockDelta(self._index, ThinkingDelta(text)))

    async def text(self, text: str) -> None:
        """Send more of the answer."""
        for piece in [TextPiece(text)] if self._reader is None else self._reader.feed(text):
            await self._piece(piece)

    async def finish(self) -> None:
        """Send what is left, and end the last block."""
        for piece in [] if self._reader is None else self._reader.finish():
            await self._piece(piece)
        await self._close()

    async def _piece(self, piece: AnswerPiece) -> None:
        match piece:
            case TextPiece(text=text):
                if text:
                    await self._begin(TextBlock(""))
                    await self._chunks.send(BlockDelta(self._index, TextDelta(text)))
            case CallStart(id=call_id, name=name):
                self.has_calls, self._tool = True, name
                await self._close()
                await self._begin(ToolUseBlock(call_id, name, arguments_of("{}")))
            case CallArguments(text=text):
                await self._chunks.send(BlockDelta(self._index, InputDelta(text)))
            case CallMalformed():
                raise MalformedCall(f"the model wrote a malformed call of the tool {self._tool}", tool=self._tool)
            case _:
                await self._close()

    async def _begin(self, block: Block) -> None:
        """Open a block of that kind, unless one is open."""
        if self._open is not type(block):
            await self._close()
            self._open = type(block)
            await self._chunks.send(BlockStart(self._index, block))

    async def _close(self) -> None:
        if self._open is ThinkingBlock:
            await self._chunks.send(BlockDelta(self._index, SignatureDelta()))
        if self._open is not None:
            self._open = None
            await self._chunks.send(BlockStop(self._index))
            self._index += 1


_COUNTED = {"messages": [{"role": "user", "content": "Hello"}]}
_EXAMPLE = {**_COUNTED, "max_tokens": 16}


class Messages:
    """POST /v1/messages and /v1/messages/count_tokens."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [web.post("/v1/messages", self._post), web.post("/v1/messages/count_tokens", self._count)]

    @describes(
        "Answer a conversation", body=MessagesBody, answer=Message, event=Event, example=_EXAMPLE, operation="chat"
    )
    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, MessagesBody)
        model = await self._context.served_model(request, body, EVENTS if body.stream else None)
        use = await _tool_use(body, model)
        params = await use.apply_to(sampling_params(body, model, max_tokens=body.max_tokens))
        prompt = await _prompt(request, body, model, use)
        params = body.thinking_options.apply_to(params, model, prompt)
        call = _Call(model, params, use.reader("toolu_"), omits_thinking=body.omits_thinking)
        async with self._context.generate(request, call.id, body, model, [prompt], params) as generation:
            if not body.stream:
                return json_response(await call.answer(generation))
            async with ChunkStream(request, self._context.settings, EVENTS) as chunks:
                await call.send(generation, chunks)
            return chunks.response

    @describes("Count the tokens of a conversation", body=ConversationBody, answer=TokensCounted, example=_COUNTED)
    async def _count(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, ConversationBody)
        model = await self._context.served_model(request, body)
        prompt = await _prompt(request, body, model, await _tool_use(body, model))
        return json_response(TokensCounted(len(prompt.ids)))


async def _tool_use(body: ConversationBody, model: ServedModel) -> ToolUse:
    return await asyncio.to_thread(body.tool_use, model) if body.tools else body.tool_use(model)


async def _prompt(request: web.Request, body: ConversationBody, model: ServedModel, use: ToolUse) -> Prompt:
    model.check_length(len(body.messages), "messages")
    messages = await run_offloaded(request, partial(read_conversation, body.system, body.messages))
    turns = await run_offloaded(request, partial(read_messages, messages))
    variables = body.thinking_options.variables(model)
    return await chat_prompt(model, turns, continue_final=goes_on(messages), variables=variables, tools=use)


class _Call:
    """One request and its answer. reader: parses tool calls; None without tools.

    omits_thinking: thinking blocks come without their text.
    """

    def __init__(
        self, model: ServedModel, params: SamplingParams, reader: CallReader | None, *, omits_thinking: bool
    ) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._params = params
        self._reader = reader
        self._omits_thinking = omits_thinking

    async def answer(self, generation: Generation) -> Message:
        """Return the whole answer."""
        [answer] = await generation.answers()
        thought = [ThinkingBlock("" if self._omits_thinking else answer.thinking)] if answer.thinking else []
        content = [*thought, *blocks_of(answer.text, self._reader)]
        has_calls = any(isinstance(block, ToolUseBlock) for block in content)
        ending = self._ending(generation, answer.finish, answer.stop_reason, has_calls=has_calls)
        return self._message(generation, content, ending)

    async def send(self, generation: Generation, chunks: ChunkStream) -> None:
        """Send each piece as it comes."""
        blocks: BlockWriter | None = None
        async with aclosing(generation.deltas()) as deltas:
            async for _, delta in deltas:
                if blocks is None:
                    await chunks.send(MessageStart(self._message(generation, [], None)))
                    blocks = BlockWriter(chunks, self._reader)
                await blocks.thinking(delta.thinking, omitted=self._omits_thinking)
                await blocks.text(delta.text)
                if delta.finish is not None:
                    await blocks.finish()
                    stopped = generation.stop_reason(delta)
                    ending = self._ending(generation, delta.finish, stopped, has_calls=blocks.has_calls)
                    await chunks.send(MessageDelta(ending, usage_of(generation)))
                    await chunks.send(MessageStop())

    def _ending(
        self, generation: Generation, finish: FinishReason | None, stopped: StoppedBy, *, has_calls: bool
    ) -> Ending:
        stop = stopped if isinstance(stopped, str) else None
        if stop is None and has_calls and finish in ("stop", "timeout"):
            return Ending("tool_use" if finish_of(self._reader, "stop") == "tool_calls" else "max_tokens", None)
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
    """Return why an answer ended, in Anthropic's words."""
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
