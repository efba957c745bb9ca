"""POST /v1/chat/completions: OpenAI's chat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from pydantic import Field

from console.api.body import read
from console.api.context import ApiContext, new_id
from console.api.conversation import Turn, guided_away_from, read_messages, render
from console.api.errors import json_response
from console.api.generation import Generation
from console.api.logprobs import ChatLogprobs, chat_logprobs
from console.api.openai import OpenAiFields, Usage, UsageField, now, usage_of
from console.api.parameters import CHAT_REFUSED, OPENAI_INERT
from console.api.prompts import Prompt
from console.api.sampling import sampling_params
from console.api.served import ServedModel
from console.api.stream import DONE, ChunkStream
from engine.backends.base import FinishReason, TokenLogprob
from engine.config import MAX_LOGPROBS
from engine.errors import InvalidRequest
from engine.request import compact
from engine.text.tokenizer import Tokenizer

MANY_MESSAGES = 256
"""More are rendered beside the event loop: a template is a program, and runs for each of them."""


class ChatBody(OpenAiFields):
    """What the endpoint takes. max_tokens and max_completion_tokens are the same; None is up to the context's end.

    chat_template_kwargs: variables for the model's own template (enable_thinking, say).
    """

    refused = CHAT_REFUSED
    inert = OPENAI_INERT

    messages: list[Any]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]

    @property
    def token_limit(self) -> int | None:
        """Whichever limit was given; raises InvalidRequest where they differ."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives per token, None for no log-probabilities at all; raises InvalidRequest."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends with the start of an answer; raises InvalidRequest where two fields disagree."""
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


class ChatAnswer(msgspec.Struct, frozen=True):
    """The message that answers."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds. role comes with the first of a choice only."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """A piece of one answer."""

    index: int
    delta: ChatPiece
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. usage is left out, or asked for: null until the last one."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageField = msgspec.UNSET


class Chat:
    """The endpoint."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Where it is found."""
        return [web.post("/v1/chat/completions", self._post)]

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, ChatBody)
        model = await self._context.served(body)
        params = sampling_params(
            body,
            model,
            max_tokens=body.token_limit,
            logprobs=body.wanted_logprobs,
            negative_prompt_ids=await _negative_prompt_ids(body, model),
        )
        call = _Call(body, model, body.include_usage)
        prompts = [await _prompt(body, model, read_messages(body.messages))]
        with self._context.generate(request, call.id, body, model, prompts, params) as generation:
            if not body.stream:
                return json_response(await call.whole(generation))
            async with ChunkStream(request, self._context.settings) as chunks:
                await call.send(generation, chunks)
            return chunks.response


async def _negative_prompt_ids(body: ChatBody, model: ServedModel) -> list[int]:
    """What is guided away from: the same conversation under another system message. Empty without guidance."""
    if body.cfg_scale == 1.0:
        return []
    turns = guided_away_from(read_messages(body.messages), body.negative_prompt)
    return list((await _prompt(body, model, turns)).ids)


async def _prompt(body: ChatBody, model: ServedModel, turns: Sequence[Turn]) -> Prompt:
    """The conversation as the model's template and tokenizer have it, and how another model would."""
    as_text = partial(
        render,
        turns=turns,
        add_generation_prompt=body.opens_answer,
        continue_final=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    many = len(turns) > MANY_MESSAGES
    text = await asyncio.to_thread(as_text, model.tokenizer) if many else as_text(model.tokenizer)
    ids = (await model.encode([text], add_special_tokens=False))[0]
    return Prompt(compact(ids), "", partial(_encode, as_text))


def _encode(as_text: Callable[[Tokenizer], str], tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(as_text(tokenizer), add_special_tokens=False)


class _Call:
    """One request on its way to its answer."""

    def __init__(self, body: ChatBody, model: ServedModel, include_usage: bool) -> None:
        self.id = new_id("chatcmpl")
        self._body = body
        self._model = model
        self._include_usage = include_usage
        self._created = now()

    async def whole(self, generation: Generation) -> ChatCompletion:
        """All answers at once."""
        answers = await generation.answers()
        choices = [
            ChatChoice(i, ChatAnswer(answer.text), self._logprobs(answer.logprobs), answer.finish)
            for i, answer in enumerate(answers)
        ]
        return ChatCompletion(
            id=self.id, created=self._created, model=self._model.name, choices=choices, usage=usage_of(generation)
        )

    async def send(self, generation: Generation, chunks: ChunkStream) -> None:
        """The role, every piece as it comes, the reason why it ended, and what ends the stream."""
        so_far = partial(self._body.usage_so_far, generation)
        opened: set[int] = set()
        async with aclosing(generation.deltas()) as deltas:
            async for i, delta in deltas:
                if i not in opened:
                    opened.add(i)
                    opening = ChatChunkChoice(i, ChatPiece(role="assistant", content=""))
                    await chunks.send(self._chunk([opening], so_far()))
                if delta.text or delta.logprobs:
                    piece = ChatChunkChoice(i, ChatPiece(content=delta.text), self._logprobs(delta.logprobs))
                    await chunks.send(self._chunk([piece], so_far()))
                if delta.finish:
                    end = ChatChunkChoice(i, ChatPiece(), finish_reason=delta.finish)
                    await chunks.send(self._chunk([end], so_far()))
        if self._include_usage:
            await chunks.send(self._chunk([], usage_of(generation)))
        await chunks.send_raw(DONE)

    def _logprobs(self, records: list[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(records, self._model.tokenizer) if self._body.logprobs else None

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageField) -> ChatChunk:
        return ChatChunk(id=self.id, created=self._created, model=self._model.name, choices=choices, usage=usage)
