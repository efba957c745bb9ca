"""POST /v1/chat/completions: OpenAI's chat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Literal

import msgspec
from aiohttp import web

from console.api.context import ApiContext, new_id
from console.api.dialects.openai.common import (
    TokenIds,
    Usage,
    UsageField,
    now,
    prompt_logprobs_of,
    usage_of,
    usage_so_far,
)
from console.api.http.request_body import run_offloaded
from console.api.requests.body import read
from console.api.requests.chat_body import ChatBody
from console.api.requests.conversation import Turn, read_messages, with_negative_prompt
from console.api.requests.generation import GeneratedAnswer, Generation, StoppedBy, respond
from console.api.requests.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs
from console.api.requests.progress import PromptProgressField, prompt_progress_field
from console.api.requests.prompts import Prompt
from console.api.requests.sampler_order import apply_samplers
from console.api.requests.sampling import sampling_params
from console.api.requests.schemas import describes
from console.api.requests.served_model import ServedModel
from console.api.requests.stream import DONE, SSE, ChunkStream
from console.api.tools import (
    AnswerPiece,
    CallArguments,
    CallReader,
    CallStart,
    TextPiece,
    ToolCall,
    ToolUse,
    finish_of,
    read_answer,
)
from engine.backends.base import FinishReason, TokenLogprob
from engine.engine import PromptProgress, StreamDelta
from engine.text.tokenizer import IncrementalDetokenizer

# Answers: messages, chunks of them, and the tool calls in both.


class CalledFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    """Name and arguments of a call; in a stream the name comes with the first piece of a call only."""

    name: str | None = None
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class ChatCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call for the client to make."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatCallPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a tool call in a chunk. id and type come with the first piece only."""

    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatAnswer(msgspec.Struct, frozen=True):
    """The answering message. content: null where it has tool calls alone.

    reasoning_content, reasoning: what the model thought before it; clients read one or the other.
    """

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    annotations: list[None] = []
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ChatCall] | msgspec.UnsetType = msgspec.UNSET


class ChatPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of the message in a chunk. role comes with the first of a choice only.

    reasoning_content, reasoning: as in ChatAnswer.
    """

    role: Literal["assistant"] | None = None
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ChatCallPiece] | msgspec.UnsetType = msgspec.UNSET


ChatFinish = FinishReason | Literal["tool_calls"]


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer. stop_reason: vLLM's, the stop string or the id of the stop token that ended it.

    token_ids: where requested.
    """

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    stop_reason: StoppedBy = None
    token_ids: TokenIds = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """A piece of one answer. stop_reason: as in ChatChoice, with the end of the answer.  token_ids: where requested."""

    index: int
    delta: ChatPiece
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: StoppedBy | msgspec.UnsetType = msgspec.UNSET
    token_ids: TokenIds = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. prompt_logprobs: where requested, as vLLM gives them.

    system_fingerprint: of model and server; where it changes, answers to requests with a seed may change.
    """

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. usage: absent, or, where requested, null until the last event.

    system_fingerprint: as in ChatCompletion.  prompt_progress: where requested, before the first token.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageField = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET
    prompt_progress: PromptProgressField | msgspec.UnsetType = msgspec.UNSET


def message_of(text: str, calls: Sequence[ToolCall], thinking: str = "") -> ChatAnswer:
    """Return the message with a text, tool calls and thinking."""
    thought = thinking or msgspec.UNSET
    if not calls:
        return ChatAnswer(text, reasoning_content=thought, reasoning=thought)
    called = [ChatCall(id=call.id, function=CalledFunction(call.name, call.arguments)) for call in calls]
    return ChatAnswer(text or None, reasoning_content=thought, reasoning=thought, tool_calls=called)


def piece_of(found: AnswerPiece) -> ChatPiece | None:
    """Return what a chunk carries of a parsed piece; None for the end of a call, which shows by itself."""
    match found:
        case TextPiece(text=text):
            return ChatPiece(content=text)
        case CallStart(index=index, id=call_id, name=name):
            began = ChatCallPiece(index=index, id=call_id, type="function", function=CalledFunction(name, ""))
            return ChatPiece(tool_calls=[began])
        case CallArguments(index=index, text=text):
            return ChatPiece(tool_calls=[ChatCallPiece(index=index, function=CalledFunction(arguments=text))])
        case _:
            return None


_EXAMPLE = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}


class Chat:
    """POST /v1/chat/completions."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return its place and handler."""
        return [web.post("/v1/chat/completions", self._post)]

    @describes(
        "Answer a conversation",
        body=ChatBody,
        answer=ChatCompletion,
        event=ChatChunk,
        example=_EXAMPLE,
        operation="chat",
    )
    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, ChatBody)
        body.check_prompt_logprobs()
        model = await self._context.served_model(request, body, SSE if body.stream else None)
        model.check_length(len(body.messages), "messages")
        turns = await run_offloaded(request, partial(read_messages, body.messages))
        use = await body.tool_use(model)
        params = sampling_params(
            body,
            model,
            max_tokens=body.token_limit,
            logprobs=body.wanted_logprobs,
            prompt_logprobs=body.prompt_logprobs,
            negative_prompt_ids=await _negative_prompt_ids(body, model, turns, use),
        )
        if body.samplers:
            params = apply_samplers(params, body.samplers, "samplers")
        params = await use.apply_to(params)
        prompt = await body.prompt(model, turns, use)
        params = body.thinking.apply_to(params, model, prompt)
        call = _Call(body, model, use, prompt, partial(prompt.answer_text, model.tokenizer, params))
        async with self._context.generate(request, call.id, body, model, [prompt], params) as generation:
            if not body.stream:
                return await call.answer(generation)
            async with ChunkStream(request, self._context.settings) as chunks:
                await call.send(generation, chunks)
            return chunks.response


async def _negative_prompt_ids(body: ChatBody, model: ServedModel, turns: Sequence[Turn], use: ToolUse) -> list[int]:
    """Return the prompt to guide away from: the conversation under another system message. Empty without guidance."""
    if body.cfg_scale == 1.0:
        return []
    guided = with_negative_prompt(turns, body.negative_prompt)
    return list((await body.prompt(model, guided, use)).ids)


class _Call:
    """One request and its answer. answer_text: makes the detokenizer of one choice."""

    def __init__(
        self,
        body: ChatBody,
        model: ServedModel,
        use: ToolUse,
        prompt: Prompt,
        answer_text: Callable[[], IncrementalDetokenizer],
    ) -> None:
        self.id = new_id("chatcmpl")
        self._body = body
        self._model = model
        self._use = use
        self._texts = defaultdict[int, IncrementalDetokenizer](answer_text)
        self._include_usage = body.include_usage
        self._prompt_ids: TokenIds = list(prompt.ids) if body.return_token_ids else msgspec.UNSET
        self._created = now()
        self._fingerprint = model.fingerprint

    async def answer(self, generation: Generation) -> web.Response:
        """Return all choices in one response."""
        answers = await generation.answers()
        usage = usage_of(generation)
        return await respond(answers, partial(self._completion, answers, usage), self._model)

    def _completion(self, answers: Sequence[GeneratedAnswer], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._model.name,
            system_fingerprint=self._fingerprint,
            choices=[self._choice(i, answer) for i, answer in enumerate(answers)],
            usage=usage,
            prompt_logprobs=prompt_logprobs_of(answers[0].prompt_logprobs, self._model, self._body),
            prompt_token_ids=self._prompt_ids,
        )

    async def send(self, generation: Generation, chunks: ChunkStream) -> None:
        """Send each choice's role, pieces and finish reason as they come, then the end of the stream."""
        so_far = partial(usage_so_far, self._body, generation)
        opened: dict[int, CallReader | None] = {}
        async with aclosing(generation.deltas()) as deltas:
            async for i, delta in deltas:
                if delta.prompt_progress is not None:
                    await chunks.send(self._prompt_chunk(i, delta.prompt_progress, so_far()))
                    if delta.is_progress_alone:
                        continue
                if i not in opened:
                    opened[i] = self._use.reader()
                    opening = ChatChunkChoice(i, ChatPiece(role="assistant", content=""))
                    first = self._prompt_ids if len(opened) == 1 else msgspec.UNSET
                    await chunks.send(self._chunk([opening], so_far(), first))
                for piece in self._pieces(i, delta, opened[i]):
                    await chunks.send(self._chunk([piece], so_far()))
                if delta.finish:
                    reason, stopped = finish_of(opened[i], delta.finish), generation.stop_reason(delta)
                    end = ChatChunkChoice(i, ChatPiece(), finish_reason=reason, stop_reason=stopped)
                    await chunks.send(self._chunk([end], so_far()))
        if self._include_usage:
            await chunks.send(self._chunk([], usage_of(generation)))
        await chunks.send_raw(DONE)

    def _choice(self, i: int, answer: GeneratedAnswer) -> ChatChoice:
        reader = self._use.reader()
        text, calls = (answer.text, []) if reader is None else read_answer(reader, answer.text)
        message = message_of(text, calls, answer.thinking if self._body.include_reasoning else "")
        finish = finish_of(reader, answer.finish)
        ids: TokenIds = answer.token_ids if self._body.return_token_ids else msgspec.UNSET
        return ChatChoice(i, message, self._logprobs(i, answer.logprobs), finish, answer.stop_reason, ids)

    def _pieces(self, i: int, delta: StreamDelta, reader: CallReader | None) -> Iterator[ChatChunkChoice]:
        """Yield the chunks of a delta; its log-probabilities and ids go with the first."""
        logprobs = self._logprobs(i, delta.logprobs)
        ids: TokenIds = delta.token_ids if self._body.return_token_ids else msgspec.UNSET
        added = [ChatPiece(content=delta.text)] if delta.text else []
        if reader is not None:
            read = reader.feed(delta.text) + (reader.finish() if delta.finish else [])
            added = [piece for found in read if (piece := piece_of(found)) is not None]
        if delta.thinking and self._body.include_reasoning:
            added.insert(0, ChatPiece(reasoning_content=delta.thinking, reasoning=delta.thinking))
        if not added and (delta.logprobs or ids):
            added = [ChatPiece(content="")]
        for piece in added:
            yield ChatChunkChoice(i, piece, logprobs, token_ids=ids)
            logprobs, ids = None, msgspec.UNSET

    def _prompt_chunk(self, i: int, progress: PromptProgress, usage: UsageField) -> ChatChunk:
        """Return llama.cpp's chunk about a prompt, whose piece is an empty message."""
        piece = ChatChunkChoice(i, ChatPiece(role="assistant", content=None))
        return msgspec.structs.replace(self._chunk([piece], usage), prompt_progress=prompt_progress_field(progress))

    def _logprobs(self, i: int, records: list[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(records, self._texts[i]) if self._body.logprobs else None

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: UsageField, prompt_ids: TokenIds = msgspec.UNSET
    ) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self._created,
            model=self._model.name,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_ids,
        )
