"""Answers under way that a client may look at or stop from another connection, as KoboldCpp's and
text-generation-webui's APIs have it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import NamedTuple

from aiohttp import web

from console.api.authorizing import client_of
from console.api.context import ApiContext, new_id
from console.api.errors import RequestCancelled
from console.api.failing import call_of
from console.api.frontends import FrontendBody
from console.api.generation import Generation
from console.api.sampling import limited
from engine.backends.base import FinishReason
from engine.errors import EngineError


class Piece(NamedTuple):
    """What came of one of several answers. finish: why it ended, None while it goes on."""

    choice: int
    text: str
    finish: FinishReason | None


class Program(NamedTuple):
    """Who asks, as far as requests without a genkey are told apart: from where, and what it calls itself."""

    address: str
    agent: str


class Live:
    """One generation and what has come of it. program: who asked for it."""

    def __init__(self, generation: Generation, program: Program) -> None:
        self.program = program
        self._generation = generation
        self._stopped = False
        self._texts: list[list[str]] = []

    def stop(self) -> None:
        """End it: whoever reads it keeps what has come."""
        self._stopped = True
        self._generation.cancel()

    def cancel(self, reason: EngineError | None) -> None:
        """End it; whoever reads it gets `reason`, or RequestCancelled."""
        self._generation.cancel(reason)

    @property
    def text(self) -> str:
        """The first answer so far."""
        return "".join(self._texts[0]) if self._texts else ""

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """What comes, until it ends or is stopped; raises EngineError as Generation.deltas does."""
        try:
            async with aclosing(self._generation.deltas()) as deltas:
                async for choice, delta in deltas:
                    while len(self._texts) <= choice:
                        self._texts.append([])
                    self._texts[choice].append(delta.text)
                    if delta.text or delta.finish is not None:
                        yield Piece(choice, delta.text, delta.finish)
        except RequestCancelled:
            if not self._stopped:
                raise

    async def answers(self, count: int) -> list[tuple[str, FinishReason | None]]:
        """Each whole text and why it ended; one that was stopped has no reason of its own."""
        finishes: list[FinishReason | None] = [None] * count
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                finishes[piece.choice] = piece.finish
        texts = ["".join(text) for text in self._texts]
        return [(text, finish) for text, finish in zip([*texts, *[""] * count], finishes, strict=False)]


class Running:
    """Those under way, by whom they are for and the key that the client gave each, "" for none."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._live: dict[tuple[str, str], list[Live]] = {}

    @asynccontextmanager
    async def answering(
        self, request: web.Request, kind: str, body: FrontendBody, *, key: str = ""
    ) -> AsyncIterator[Live]:
        """What a body asks for, while it is under way; raises EngineError. kind: what its id begins with."""
        context = self._context
        body = limited(body, body.length_field, context.settings.max_output_tokens)
        model = await context.served(request, body)
        params, prompt = await body.params(model), await body.prompt_for(model)
        async with context.generate(request, new_id(kind), body, model, [prompt], params) as generation:
            with self._added(request, key, generation) as live:
                yield live

    @contextmanager
    def _added(self, request: web.Request, key: str, generation: Generation) -> Iterator[Live]:
        """One while it runs."""
        live, place = Live(generation, _program_of(request)), (client_of(request), key)
        here = self._live.setdefault(place, [])
        here.append(live)
        try:
            yield live
        finally:
            here.remove(live)
            if not here:
                self._live.pop(place, None)

    def text(self, request: web.Request, key: str) -> str:
        """What has come of the client's latest with that key, "" where none is under way, or it is not known whose."""
        here = [] if self.is_shared(request, key) else self._live.get((client_of(request), key))
        return here[-1].text if here else ""

    def stop(self, request: web.Request, key: str) -> bool:
        """End the client's with that key; False where there are none, or it is not known whose they are."""
        here = [] if self.is_shared(request, key) else list(self._live.get((client_of(request), key), ()))
        for live in here:
            live.stop()
        return bool(here)

    def is_shared(self, request: web.Request, key: str) -> bool:
        """Return whether answers without a key of their own belong to others than who asks: one key, or one address
        where none is needed, may be that of several people."""
        here = self._live.get((client_of(request), key), ())
        return not key and any(live.program != _program_of(request) for live in here)


def _program_of(request: web.Request) -> Program:
    call = call_of(request)
    return Program(call.address, call.agent)
