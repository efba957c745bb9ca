"""Shared by KoboldAI's and text-generation-webui's dialects: truncated prompts, and answers under way that a client
reads or stops from another connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from aiohttp import web

from console.api.context import ApiContext, new_id
from console.api.http.auth import client_of
from console.api.http.errors import RequestCancelled
from console.api.http.traffic import call_of
from console.api.requests.generation import Generation, WhyField
from console.api.requests.prompts import Prompt, negative_prompt_ids
from console.api.requests.sampler_order import dynamic_temperature_only
from console.api.requests.sampling import SamplingFields, limit_length, sampling_params
from console.api.requests.served_model import ServedModel
from console.api.requests.stream import Framing
from engine.backends.base import FinishReason
from engine.config import SamplingParams, format_number
from engine.errors import EngineError, InvalidRequest
from engine.requests.request import compact_ids
from engine.text.tokenizer import Tokenizer

# Prompts of dialects that truncate: the end of a long prompt is kept.


@dataclass(frozen=True, slots=True)
class TruncatedPrompt:
    """A text as a prompt. limit: max tokens to keep, the last ones, besides a start token and `head`.

    head: text before it, never truncated.  add_special_tokens: with those that the model expects around it.
    """

    text: str
    limit: int
    head: str = ""
    add_special_tokens: bool = True

    async def __call__(self, tokenizer: Tokenizer) -> list[int]:
        """Return the ids for a model, maybe another than that of the limit."""
        return await asyncio.to_thread(self._encode, tokenizer)

    def _encode(self, tokenizer: Tokenizer) -> list[int]:
        start = tokenizer.encode(self.head, add_special_tokens=self.add_special_tokens) if self.head else []
        return self._with_start(
            start, tokenizer.encode(self.text, add_special_tokens=self._adds_special_tokens), tokenizer
        )

    async def prompt(self, model: ServedModel) -> Prompt:
        """Return the prompt; a long one is tokenized in a thread. Raises InvalidRequest where nothing is left."""
        text = await model.part(self.text, self.limit, end=True)
        [start] = await model.encode([self.head], add_special_tokens=self.add_special_tokens) if self.head else [[]]
        [ids] = await model.encode([text], add_special_tokens=self._adds_special_tokens)
        if len(start) >= self.limit:
            raise InvalidRequest(
                f"memory has {len(start)} tokens; the limit with the prompt is {self.limit}", param="memory"
            )
        whole = self._with_start(start, ids, model.tokenizer)
        if not whole:
            raise InvalidRequest("prompt is empty", param="prompt")
        return Prompt(compact_ids(whole), self.head + self.text, replace(self, text=text))

    @property
    def _adds_special_tokens(self) -> bool:
        """True if the text itself, after its head, gets special tokens."""
        return self.add_special_tokens and not self.head

    def _with_start(self, start: list[int], ids: list[int], tokenizer: Tokenizer) -> list[int]:
        if not start and ids[:1] == [tokenizer.bos_token_id]:
            start, ids = ids[:1], ids[1:]
        return [*start, *ids[-max(1, self.limit - len(start)) :]]


def room_for_prompt(
    max_tokens: int, context_tokens: int | None, model: ServedModel, *, answer: str, context: str
) -> int:
    """Return the max tokens of a prompt that leaves room for an answer of `max_tokens`.

    context_tokens: of both, None for the model's context.  answer, context: the client's names of the two limits.
    Raises InvalidRequest where no room is left.
    """
    most = model.loaded.max_model_len
    limit = most if context_tokens is None else min(context_tokens, most)
    if max_tokens >= limit:
        raise InvalidRequest(
            f"{answer} is {format_number(max_tokens)}; of the {limit} tokens of {context} that leaves none for the "
            "prompt",
            param=answer,
        )
    return limit - max_tokens


# Bodies of text frontends (KoboldAI's, text-generation-webui's): a text and its settings, with a default length of the
# answer and a prompt that is truncated.


class FrontendBody(SamplingFields):
    """A prompt and its settings.

    length_field, context_field: the dialect's names for the max tokens of the answer, and of both together.
    """

    length_field: ClassVar[str]
    context_field: ClassVar[str]

    prompt: str

    async def params(self, model: ServedModel) -> SamplingParams:
        """Return the engine's parameters; raises InvalidRequest."""
        negative_ids = await negative_prompt_ids(self, model)
        most = getattr(self, self.length_field)
        return dynamic_temperature_only(
            sampling_params(self._sampling_fields(), model, max_tokens=most, negative_prompt_ids=negative_ids)
        )

    async def prompt_for(self, model: ServedModel) -> Prompt:
        """Return the end of the prompt that leaves room for the answer; raises InvalidRequest."""
        answer, context = self.length_field, self.context_field
        room = room_for_prompt(getattr(self, answer), getattr(self, context), model, answer=answer, context=context)
        return await self._truncated(room).prompt(model)

    def _sampling_fields(self) -> SamplingFields:
        """Return the sampling fields, with those of the dialect's own applied."""
        return self

    def _truncated(self, room: int) -> TruncatedPrompt:
        """Return the prompt with its last `room` tokens."""
        return TruncatedPrompt(self.prompt, room)


class TextPiece(NamedTuple):
    """A piece of one of several answers. finish: why it ended, None before its end."""

    choice: int
    text: str
    finish: FinishReason | None


class ClientProgram(NamedTuple):
    """The program that sends a request, by its address and user agent; distinguishes requests without a genkey."""

    address: str
    agent: str


class LiveGeneration:
    """One generation and its text so far. program: its client."""

    def __init__(self, generation: Generation, program: ClientProgram) -> None:
        self.program = program
        self._generation = generation
        self._stopped = False
        self._texts: list[list[str]] = []

    def stop(self) -> None:
        """Stop it: its reader keeps the text so far."""
        self._stopped = True
        self._generation.cancel()

    def cancel(self, reason: EngineError | None) -> None:
        """Cancel it; its reader gets `reason`, or RequestCancelled."""
        self._generation.cancel(reason)

    @property
    def why(self) -> WhyField:
        """Causes of its time, as Generation has them."""
        return self._generation.why

    @property
    def text(self) -> str:
        """Text of the first answer so far."""
        return "".join(self._texts[0]) if self._texts else ""

    async def pieces(self) -> AsyncGenerator[TextPiece, None]:
        """Yield pieces until the end or a stop; raises EngineError as Generation.deltas does."""
        try:
            async with aclosing(self._generation.deltas()) as deltas:
                async for choice, delta in deltas:
                    while len(self._texts) <= choice:
                        self._texts.append([])
                    self._texts[choice].append(delta.text)
                    if delta.text or delta.finish is not None:
                        yield TextPiece(choice, delta.text, delta.finish)
        except RequestCancelled:
            if not self._stopped:
                raise

    async def answers(self, count: int) -> list[tuple[str, FinishReason | None]]:
        """Return each whole text and why it ended; None for one that was stopped."""
        finishes: list[FinishReason | None] = [None] * count
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                finishes[piece.choice] = piece.finish
        texts = ["".join(text) for text in self._texts]
        return [(text, finish) for text, finish in zip([*texts, *[""] * count], finishes, strict=False)]


class LiveGenerations:
    """Generations under way, by client and genkey, "" for none."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._live: dict[tuple[str, str], list[LiveGeneration]] = {}

    @asynccontextmanager
    async def answering(
        self, request: web.Request, kind: str, body: FrontendBody, *, key: str = "", framing: Framing | None = None
    ) -> AsyncIterator[LiveGeneration]:
        """Generate for a body while the context lasts; raises EngineError. kind: prefix of its id.  framing: of the
        event stream that the answer will be; None for others."""
        context = self._context
        body = limit_length(body, body.length_field, context.settings.max_output_tokens)
        model = await context.served_model(request, body, framing)
        params, prompt = await body.params(model), await body.prompt_for(model)
        async with context.generate(request, new_id(kind), body, model, [prompt], params) as generation:
            with self._register(request, key, generation) as live:
                yield live

    @contextmanager
    def _register(self, request: web.Request, key: str, generation: Generation) -> Iterator[LiveGeneration]:
        """List a generation while it runs."""
        live, place = LiveGeneration(generation, _program_of(request)), (client_of(request), key)
        here = self._live.setdefault(place, [])
        here.append(live)
        try:
            yield live
        finally:
            here.remove(live)
            if not here:
                self._live.pop(place, None)

    def text(self, request: web.Request, key: str) -> str:
        """Return the text so far of the client's latest with that key, "" without any or where its owner is unclear."""
        here = [] if self.is_shared(request, key) else self._live.get((client_of(request), key))
        return here[-1].text if here else ""

    def stop(self, request: web.Request, key: str) -> bool:
        """Stop the client's with that key; return False without any, or where their owner is unclear."""
        here = [] if self.is_shared(request, key) else list(self._live.get((client_of(request), key), ()))
        for live in here:
            live.stop()
        return bool(here)

    def is_shared(self, request: web.Request, key: str) -> bool:
        """Return whether answers without a genkey may belong to other clients: several may share an API key, or, where
        none is required, an address."""
        here = self._live.get((client_of(request), key), ())
        return not key and any(live.program != _program_of(request) for live in here)


def _program_of(request: web.Request) -> ClientProgram:
    call = call_of(request)
    return ClientProgram(call.address, call.agent)
