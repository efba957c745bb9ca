"""Answers under way that a client may look at or stop from another connection, as KoboldCpp's and
text-generation-webui's APIs have it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import NamedTuple

from console.api.errors import RequestCancelled
from console.api.generation import Generation
from engine.backends.base import FinishReason


class Piece(NamedTuple):
    """What came of one of several answers. finish: why it ended, None while it goes on."""

    choice: int
    text: str
    finish: FinishReason | None


class Live:
    """One generation and what has come of it."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._stopped = False
        self._texts: list[list[str]] = []

    def stop(self) -> None:
        """End it: whoever reads it keeps what has come."""
        self._stopped = True
        self._generation.cancel()

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

    def __init__(self) -> None:
        self._live: dict[tuple[str, str], list[Live]] = {}

    @contextmanager
    def added(self, client: str, key: str, generation: Generation) -> Iterator[Live]:
        """One while it runs."""
        live = Live(generation)
        here = self._live.setdefault((client, key), [])
        here.append(live)
        try:
            yield live
        finally:
            here.remove(live)
            if not here:
                self._live.pop((client, key), None)

    def text(self, client: str, key: str) -> str:
        """What has come of the client's latest with that key, "" where none is under way."""
        here = self._live.get((client, key))
        return here[-1].text if here else ""

    def stop(self, client: str, key: str) -> bool:
        """End the client's with that key; whether there were any."""
        here = list(self._live.get((client, key), ()))
        for live in here:
            live.stop()
        return bool(here)
