"""Puts requests to a target and keeps when what tokens: by clients that ask again once answered, or by the clock."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from console.bench.target import Chunk, Target, TargetFailed
from console.bench.workload import Item
from engine.errors import EngineError

NO_TOKENS = "the answer had no tokens"
_POLL_S = 0.05
_LOOK_S = 0.005
_T = TypeVar("_T")


class BenchCancelled(Exception):
    """The bench was cancelled."""


@dataclass(slots=True)
class Record:
    """One request as its client saw it.

    sent_s: since the run began.  chunks: seconds since it was sent, and the tokens that came then; none where the
    model ended its answer before it began.  measured_gaps_s: seconds between tokens, where the target measured them.
    end_s: when its stream ended, since it was sent.  output_tokens: as the target reported, else as they arrived.
    error: "" where answered.
    """

    item: Item
    sent_s: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    measured_gaps_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None where none came."""
        return self.chunks[0][0] if self.chunks else None

    @property
    def e2e_s(self) -> float:
        """Seconds to the last token."""
        return self.chunks[-1][0] if self.chunks else self.end_s

    @property
    def times_s(self) -> list[float]:
        """Seconds from sending it to each of its tokens, as the target measured what lies between them; where it
        measured nothing, to each chunk."""
        if not self.measured_gaps_s or self.ttft_s is None:
            return [at_s for at_s, _ in self.chunks]
        return list(itertools.accumulate(self.measured_gaps_s, initial=self.ttft_s))

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between tokens as the target measured them; where it did not, between chunks."""
        return self.measured_gaps_s or [after - before for before, after in itertools.pairwise(self.times_s)]


@dataclass(frozen=True, slots=True)
class Run:
    """Records of a run. seconds: from the first request to the end of the last."""

    records: tuple[Record, ...]
    seconds: float

    @property
    def answered(self) -> list[Record]:
        """Those without an error."""
        return [record for record in self.records if not record.error]

    def or_failed(self) -> Run:
        """Return itself; raises TargetFailed, with the error of the first request, where none got a token."""
        if self.records and not any(record.chunks for record in self.answered):
            raise TargetFailed(self.records[0].error or NO_TOKENS)
        return self


class ClientPool:
    """The clients of a target. done: called with each request that ended.  cancelled: asked now and then."""

    def __init__(
        self,
        target: Target,
        done: Callable[[Record | None], None] = lambda record: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._target = target
        self._done = done
        self._cancelled = cancelled

    async def closed(self, clients: Sequence[Iterator[Item]]) -> Run:
        """Each client sends its requests one after the other; clients may share an iterator.

        Raises BenchCancelled, and TargetFailed where no request was answered.
        """
        began_s, records = time.perf_counter(), list[Record]()

        async def client(own: Iterator[Item]) -> None:
            for item in own:
                await self._ask(item, began_s, records)

        await unless_cancelled(_together([client(own) for own in clients]), self._cancelled)
        return Run(tuple(records), time.perf_counter() - began_s).or_failed()

    async def opened(self, items: Sequence[Item], max_concurrent: int | None = None) -> Run:
        """Each request is sent when it arrives, or once fewer than `max_concurrent` are under way.

        Raises BenchCancelled, and TargetFailed where no request was answered.
        """
        began_s, records = time.perf_counter(), list[Record]()
        places = asyncio.Semaphore(max_concurrent or len(items) or 1)

        async def client(item: Item) -> None:
            await asyncio.sleep(began_s + item.at_s - time.perf_counter())
            async with places:
                await self._ask(item, began_s, records)

        await unless_cancelled(_together([client(item) for item in items]), self._cancelled)
        return Run(tuple(records), time.perf_counter() - began_s).or_failed()

    async def during_streams(
        self, streams: Sequence[Iterator[Item]], late: Item, settle_tokens: int
    ) -> tuple[list[Record], Record]:
        """Keep streams going, and send one more once each has had some tokens; the streams, and that one.

        The streams end once each has had as many more after the late one was read. Raises BenchCancelled, and
        TargetFailed where a stream is not answered.
        """
        began_s, records = time.perf_counter(), list[Record]()
        late_one = Record(late)

        async def client(own: Iterator[Item]) -> None:
            for item in own:
                records.append(record := Record(item))
                await ask(self._target, record, began_s)
                if record.error or not record.chunks:
                    raise TargetFailed(record.error or NO_TOKENS)

        async def watch() -> None:
            await _have(records, len(streams), settle_tokens)
            await ask(self._target, late_one, began_s)
            self._done(late_one)
            await _have(
                records, len(streams), sum(_tokens(record) for record in records) // len(streams) + settle_tokens
            )

        async def both() -> None:
            clients = asyncio.ensure_future(_together([client(own) for own in streams]))
            watching = asyncio.ensure_future(watch())
            try:
                done, _ = await asyncio.wait({clients, watching}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in (clients, watching):
                    task.cancel()
                await asyncio.gather(clients, watching, return_exceptions=True)

        await unless_cancelled(both(), self._cancelled)
        return records, late_one

    async def _ask(self, item: Item, began_s: float, records: list[Record]) -> None:
        record = Record(item)
        await ask(self._target, record, began_s)
        records.append(record)
        self._done(record)


async def unless_cancelled(work: Awaitable[_T], cancelled: Callable[[], bool]) -> _T:
    """Return its result; where the bench is cancelled meanwhile, cancel it and raise BenchCancelled."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_POLL_S)
            if cancelled():
                raise BenchCancelled
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return task.result()


async def ask(target: Target, record: Record, began_s: float) -> None:
    """One request, read to its end into its record. An error of the target is kept there."""
    sent_s, item = time.perf_counter(), record.item
    record.sent_s, record.prompt_tokens = sent_s - began_s, item.prompt.tokens
    counted = 0
    try:
        async with aclosing(target.send(item)) as chunks:
            async for chunk in chunks:
                now_s = time.perf_counter() - sent_s
                tokens = max(chunk.tokens, (chunk.output_tokens or 0) - counted) if chunk.tokens else 0
                if tokens:
                    record.chunks.append((now_s, tokens))
                    record.measured_gaps_s += chunk.gaps_s
                counted += tokens
                _note(record, chunk, counted)
    except EngineError as error:
        record.error = error.message
    record.end_s = time.perf_counter() - sent_s


def _tokens(record: Record) -> int:
    return sum(tokens for _, tokens in record.chunks)


async def _have(records: Sequence[Record], streams: int, tokens: int) -> None:
    """Wait until streams have a number of tokens each, on average, and every stream some."""
    while True:
        begun = [record for record in records if record.chunks]
        if len(begun) >= streams and sum(map(_tokens, begun)) >= streams * tokens:
            return
        await asyncio.sleep(_LOOK_S)


def _note(record: Record, chunk: Chunk, counted: int) -> None:
    record.output_tokens = max(record.output_tokens, counted) if chunk.output_tokens is None else chunk.output_tokens
    record.prompt_tokens = record.prompt_tokens if chunk.prompt_tokens is None else chunk.prompt_tokens
    record.cached_tokens = record.cached_tokens if chunk.cached_tokens is None else chunk.cached_tokens


async def _together(work: Sequence[Awaitable[None]]) -> None:
    """All at once; one that breaks takes the others with it."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
