"""POST /v1/chat/completions: OpenAI's chat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated

from aiohttp import web
from pydantic import Field

from console.api.body import read
from console.api.body_schema import ANSWER_TOKENS
from console.api.chat_fields import ConversationFields
from console.api.chat_shapes import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatPiece,
    message_of,
    piece_of,
)
from console.api.clamped import CHAT_CLAMPED
from console.api.context import ApiContext, new_id
from console.api.conversation import Turn, guided_away_from, read_messages
from console.api.described import describes
from console.api.generation import Answer, Generation, respond
from console.api.logprobs import ChatLogprobs, chat_logprobs
from console.api.openai import OpenAiFields, Usage, UsageField, now, prompt_logprobs_of, usage_of
from console.api.parameters import CHAT_REFUSED, OPENAI_INERT
from console.api.received import of_body
from console.api.sampling import sampling_params
from console.api.served import ServedModel
from console.api.stream import DONE, ChunkStream
from console.api.tools import CallReader, ToolUse, finish_of, whole
from engine.backends.base import TokenLogprob
from engine.config import MAX_LOGPROBS
from engine.engine import StreamDelta
from engine.errors import InvalidRequest
from engine.text.detokenizer import IncrementalDetokenizer

_EXAMPLE = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}


class ChatBody(OpenAiFields, ConversationFields):
    """What the endpoint takes. max_tokens and max_completion_tokens are the same; None is up to the context's end."""

    refused = CHAT_REFUSED
    inert = OPENAI_INERT
    clamped = CHAT_CLAMPED

    max_tokens: Annotated[int | None, ANSWER_TOKENS] = None
    max_completion_tokens: Annotated[int | None, ANSWER_TOKENS] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

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


class Chat:
    """The endpoint."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Where it is found."""
        return [web.post("/v1/chat/completions", self._post)]

    @describes("Answer a conversation", body=ChatBody, answer=ChatCompletion, event=ChatChunk, example=_EXAMPLE)
    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, ChatBody)
        body.check_prompt_logprobs()
        model = await self._context.served(request, body)
        model.check_length(len(body.messages), "messages")
        turns = await of_body(request, partial(read_messages, body.messages))
        use = await body.tool_use(model)
        params = sampling_params(
            body,
            model,
            max_tokens=body.token_limit,
            logprobs=body.wanted_logprobs,
            prompt_logprobs=body.prompt_logprobs,
            negative_prompt_ids=await _negative_prompt_ids(body, model, turns, use),
        )
        params = use.applied(params)
        prompt = await body.prompt(model, turns, use)
        call = _Call(body, model, use, partial(prompt.answer_text, model.tokenizer, params))
        async with self._context.generate(request, call.id, body, model, [prompt], params) as generation:
            if not body.stream:
                return await call.whole(generation)
            async with ChunkStream(request, self._context.settings) as chunks:
                await call.send(generation, chunks)
            return chunks.response


async def _negative_prompt_ids(body: ChatBody, model: ServedModel, turns: Sequence[Turn], use: ToolUse) -> list[int]:
    """What is guided away from: the same conversation under another system message. Empty without guidance."""
    if body.cfg_scale == 1.0:
        return []
    guided = guided_away_from(turns, body.negative_prompt)
    return list((await body.prompt(model, guided, use)).ids)


class _Call:
    """One request on its way to its answer. answer_text: makes what makes the text of one answer."""

    def __init__(
        self, body: ChatBody, model: ServedModel, use: ToolUse, answer_text: Callable[[], IncrementalDetokenizer]
    ) -> None:
        self.id = new_id("chatcmpl")
        self._body = body
        self._model = model
        self._use = use
        self._texts = defaultdict[int, IncrementalDetokenizer](answer_text)
        self._include_usage = body.include_usage
        self._created = now()
        self._fingerprint = model.fingerprint

    async def whole(self, generation: Generation) -> web.Response:
        """All answers at once."""
        answers = await generation.answers()
        return await respond(answers, partial(self._completion, answers, usage_of(generation)), self._model)

    def _completion(self, answers: Sequence[Answer], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._model.name,
            system_fingerprint=self._fingerprint,
            choices=[self._choice(i, answer) for i, answer in enumerate(answers)],
            usage=usage,
            prompt_logprobs=prompt_logprobs_of(answers[0].prompt_logprobs, self._model, self._body),
        )

    async def send(self, generation: Generation, chunks: ChunkStream) -> None:
        """The role, every piece as it comes, the reason why it ended, and what ends the stream."""
        so_far = partial(self._body.usage_so_far, generation)
        opened: dict[int, CallReader | None] = {}
        async with aclosing(generation.deltas()) as deltas:
            async for i, delta in deltas:
                if i not in opened:
                    opened[i] = self._use.reader()
                    opening = ChatChunkChoice(i, ChatPiece(role="assistant", content=""))
                    await chunks.send(self._chunk([opening], so_far()))
                for piece in self._pieces(i, delta, opened[i]):
                    await chunks.send(self._chunk([piece], so_far()))
                if delta.finish:
                    reason, stopped = finish_of(opened[i], delta.finish), generation.stop_reason(delta)
                    end = ChatChunkChoice(i, ChatPiece(), finish_reason=reason, stop_reason=stopped)
                    await chunks.send(self._chunk([end], so_far()))
        if self._include_usage:
            await chunks.send(self._chunk([], usage_of(generation)))
        await chunks.send_raw(DONE)

    def _choice(self, i: int, answer: Answer) -> ChatChoice:
        reader = self._use.reader()
        message = ChatAnswer(answer.text) if reader is None else message_of(*whole(reader, answer.text))
        finish = finish_of(reader, answer.finish)
        return ChatChoice(i, message, self._logprobs(i, answer.logprobs), finish, answer.stop_reason)

    def _pieces(self, i: int, delta: StreamDelta, reader: CallReader | None) -> Iterator[ChatChunkChoice]:
        """What a delta adds to an answer; its log-probabilities go with the first piece."""
        logprobs = self._logprobs(i, delta.logprobs)
        added = [ChatPiece(content=delta.text)] if delta.text else []
        if reader is not None:
            read = reader.feed(delta.text) + (reader.finish() if delta.finish else [])
            added = [piece for found in read if (piece := piece_of(found)) is not None]
        if not added and delta.logprobs:
            added = [ChatPiece(content="")]
        for piece in added:
            yield ChatChunkChoice(i, piece, logprobs)
            logprobs = None

    def _logprobs(self, i: int, records: list[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(records, self._texts[i]) if self._body.logprobs else None

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageField) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self._created,
            model=self._model.name,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )
