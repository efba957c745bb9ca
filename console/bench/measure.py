"""Requests put to a target by clients that ask again once answered, or by the clock; when their tokens came; and the
numbers made of that, under the names that vLLM's serving bench gives them, so that results compare.

TTFT: to the first token.  TPOT: a request's time after its first token, per further token.  ITL: between two chunks of
a stream; of an engine in this process between two tokens, as its worker made them.  E2EL: to the last token.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from console.bench.result import Column
from console.bench.target import Chunk, EngineHere, Target, TargetFailed
from console.bench.workload import MARK_TOKENS, Exchange, Item, Mix, items, read_trace, usable
from engine.errors import EngineError, InvalidRequest
from engine.metrics.distributions import percentiles
from engine.metrics.slo import Slo
from engine.models.files import home_expanded
from engine.simulation.lengths import Length

Values = dict[str, float | None]
"""The numbers of a row, by column."""
NO_TOKENS = "the answer had no tokens"
_POLL_S = 0.005
_PERCENTILES = (90, 95, 99)
_TIMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "response"}


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


class BenchContext:
    """The target of a plan, its clients, and the repeat and part under way.

    trace: the exchanges of the trace that was read last; those that fit the target.
    note: adds a note for readers of the numbers.  done: called with each request, None for a step without one.
    """

    def __init__(
        self,
        target: Target,
        seed: int = 0,
        *,
        note: Callable[[str], None] = lambda text: None,
        done: Callable[[Record | None], None] = lambda record: None,
    ) -> None:
        self.target = target
        self.note = note
        self.done = done
        self.trace: tuple[Exchange, ...] = ()
        self._salt = self._repeat_salt = "warm"
        self._first: dict[str, float] = {}
        self._seed = seed
        self._material = target.material

    def begin(self, repeat: int, part: int) -> None:
        """Begin a part of a repeat."""
        self._repeat_salt = f"{repeat}"
        self._salt = f"{repeat}/{part}"
        if part == 0:
            self._first.clear()

    def items(self, mix: Mix, count: int, *, first: int = 0, also: str = "", alike: bool = False) -> list[Item]:
        """Requests whose contents differ from those of other rows, repeats and values of `also`.

        alike: as those of the other rows of this repeat, but for their first tokens.
        """
        check_fits(self.target, mix)
        own = f"{self._salt}/{also}" if also else self._salt
        salt, lead = (self._repeat_salt, own) if alike else (own, "")
        return items(mix, self._material, seed=self._seed, salt=salt, lead=lead, count=count, first=first)

    def endless(self, mix: Mix, clients: int) -> list[Iterator[Item]]:
        """Requests without end for a number of clients."""

        def of_client(client: int) -> Iterator[Item]:
            for turn in itertools.count():
                yield from self.items(mix, 1, first=turn * clients + client)

        return [of_client(client) for client in range(clients)]

    async def closed_loop(self, clients: Sequence[Iterator[Item]]) -> Run:
        """Each client sends its requests one after the other; clients may share an iterator.

        Raises TargetFailed where no request was answered.
        """
        began_s, records = time.perf_counter(), list[Record]()

        async def client(own: Iterator[Item]) -> None:
            for item in own:
                await self._ask(item, began_s, records)

        await _together([client(own) for own in clients])
        return Run(tuple(records), time.perf_counter() - began_s).or_failed()

    async def open_loop(self, items: Sequence[Item], max_concurrent: int | None = None) -> Run:
        """Each request is sent when it arrives, or once fewer than `max_concurrent` are under way.

        Raises TargetFailed where no request was answered.
        """
        began_s, records = time.perf_counter(), list[Record]()
        places = asyncio.Semaphore(max_concurrent or len(items) or 1)

        async def client(item: Item) -> None:
            await asyncio.sleep(began_s + item.at_s - time.perf_counter())
            async with places:
                await self._ask(item, began_s, records)

        await _together([client(item) for item in items])
        return Run(tuple(records), time.perf_counter() - began_s).or_failed()

    async def during_streams(
        self, streams: Sequence[Iterator[Item]], late: Item, settle_tokens: int
    ) -> tuple[list[Record], Record]:
        """Keep streams going, and send one more once each has had some tokens; the streams, and that one.

        The streams end once each has had as many more after the late one was read. Raises TargetFailed where a stream
        is not answered.
        """
        began_s, records = time.perf_counter(), list[Record]()
        late_one = Record(late)

        async def client(own: Iterator[Item]) -> None:
            for item in own:
                records.append(record := Record(item))
                await ask(self.target, record, began_s)
                if record.error or not record.chunks:
                    raise TargetFailed(record.error or NO_TOKENS)

        async def watch() -> None:
            await _have(records, len(streams), settle_tokens)
            await ask(self.target, late_one, began_s)
            self.done(late_one)
            await _have(records, len(streams), sum(map(_tokens, records)) // len(streams) + settle_tokens)

        clients = asyncio.ensure_future(_together([client(own) for own in streams]))
        watching = asyncio.ensure_future(watch())
        try:
            done, _ = await asyncio.wait({clients, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            clients.cancel()
            watching.cancel()
            await asyncio.gather(clients, watching, return_exceptions=True)
        return records, late_one

    async def _ask(self, item: Item, began_s: float, records: list[Record]) -> None:
        record = Record(item)
        await ask(self.target, record, began_s)
        records.append(record)
        self.done(record)

    def first_of_repeat(self, name: str, value: float) -> float:
        """The first value of this name in this repeat, to which later rows are compared."""
        return self._first.setdefault(name, value)

    async def read(self, path: str) -> None:
        """Read a trace on another thread, as the loop may serve others. Raises InvalidRequest."""
        limit = self.target.max_model_len

        def exchanges() -> tuple[Exchange, ...]:
            return tuple(usable(read_trace(home_expanded(path)), self._material, limit, MARK_TOKENS))

        self.trace = await asyncio.to_thread(exchanges)

    @property
    def engine(self) -> EngineHere:
        """The target as an engine in this process. Raises InvalidRequest."""
        if not isinstance(self.target, EngineHere):
            raise InvalidRequest("this benchmark needs an engine in this process", param="url")
        return self.target


def check_fits(target: Target, mix: Mix) -> None:
    """Raise InvalidRequest where requests can be longer than the target's context."""
    check_lengths(target.max_model_len, mix.prompt, mix.output, mix.prefix.tokens if mix.prefix else 0)


def check_lengths(limit: int | None, prompt_tokens: Length, output_tokens: Length, shared: int) -> None:
    """Raise InvalidRequest where a prompt behind a shared prefix and its answer can have more than `limit` tokens."""
    prompt, output = prompt_tokens.most, output_tokens.most
    if limit is None or prompt is None or output is None:
        return
    if shared + prompt + output > limit:
        with_prefix = f" behind a prefix of {shared}" if shared else ""
        raise InvalidRequest(
            f"prompts of up to {prompt} tokens{with_prefix} and answers of up to {output} do not fit the model's "
            f"{limit}",
            param="prompt_tokens",
        )


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
        await asyncio.sleep(_POLL_S)


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


def tpot_s(record: Record) -> float | None:
    """Seconds per token after the first; 0 for an answer of one token, None where none output_tokens."""
    if record.ttft_s is None:
        return None
    return (record.e2e_s - record.ttft_s) / (record.output_tokens - 1) if record.output_tokens > 1 else 0.0


def summarize(run: Run, slo: Slo | None = None) -> Values:
    """All numbers of a run; None where no request has one."""
    slo, done, seconds = slo or Slo(), run.answered, run.seconds
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    within_slo = sum(_is_met(slo, record) for record in done)
    chunks = sum(len(record.chunks) for record in done)
    return {
        "completed": len(done),
        "failed": len(run.records) - len(done),
        "duration": seconds,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / seconds,
        "request_goodput": within_slo / seconds if slo.is_set else None,
        "slo_attainment": 100 * within_slo / len(run.records) if slo.is_set and run.records else None,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (prompt_tokens + output_tokens) / seconds,
        "tokens_per_chunk": output_tokens / chunks if chunks else None,
        **_times("ttft", (record.ttft_s for record in done)),
        **_times("tpot", (tpot_s(record) for record in done if record.output_tokens > 1)),
        **_times("itl", (gap for record in done for gap in record.gaps_s)),
        **_times("e2el", (record.e2e_s for record in done)),
    }


def _is_met(slo: Slo, record: Record) -> bool:
    """Return whether an answer kept the SLO; one without a token keeps no limit on the times between them."""
    itl_s = tpot_s(record)
    return not record.error and slo.is_met(record.ttft_s, math.inf if itl_s is None else itl_s, record.e2e_s)


def _times(name: str, seconds: Iterable[float | None]) -> Values:
    """Mean, median, deviation and percentiles in milliseconds."""
    numbers = [1000 * each for each in seconds if each is not None]
    found: Values = {
        f"mean_{name}_ms": statistics.fmean(numbers) if numbers else None,
        f"median_{name}_ms": statistics.median(numbers) if numbers else None,
        f"std_{name}_ms": statistics.pstdev(numbers) if numbers else None,
    }
    values = percentiles(numbers, *(percent / 100 for percent in _PERCENTILES), interpolate=True)
    found.update({f"p{percent}_{name}_ms": value for percent, value in zip(_PERCENTILES, values, strict=True)})
    return found


def columns(*shown: str) -> tuple[Column, ...]:
    """Columns of `summarize`; the table shows the named ones."""
    return tuple(msgspec.structs.replace(column, shown=column.name in shown) for column in (*_COUNTS, *_time_columns()))


_COUNTS = (
    Column(name="completed", title="answered", digits=0),
    Column(name="failed", title="failed", digits=0, better="lower"),
    Column(name="duration", title="took", unit="s"),
    Column(name="total_input_tokens", title="prompt tokens", digits=0),
    Column(name="total_output_tokens", title="tokens", digits=0),
    Column(name="request_throughput", title="requests", unit="req/s", digits=2, better="higher"),
    Column(name="request_goodput", title="goodput", unit="req/s", digits=2, better="higher"),
    Column(name="slo_attainment", title="within SLO", unit="%", better="higher"),
    Column(name="output_throughput", title="output", unit="tok/s", better="higher"),
    Column(name="total_token_throughput", title="in + out", unit="tok/s", better="higher"),
    Column(name="tokens_per_chunk", title="tokens per chunk", digits=2),
)


def _time_columns() -> Iterable[Column]:
    kinds = {"mean": "mean", "median": "p50", "std": "deviation"} | {f"p{each}": f"p{each}" for each in _PERCENTILES}
    for name, title in _TIMES.items():
        for kind, statistic in kinds.items():
            yield Column(name=f"{kind}_{name}_ms", title=f"{title} {statistic}", unit="ms", better="lower")
