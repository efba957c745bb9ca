"""Throughput of the same inputs by number of clients, with and without n-gram speculation."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from console.bench.kinds.base import BenchPart, SkipPart, Traced, at_least_one, enough
from console.bench.measure import BenchContext, Values, columns, summarize
from console.bench.result import Column, Published
from console.bench.target import EngineHere, Target
from engine.errors import InvalidRequest, ModelLoadFailed
from engine.simulation.lengths import fixed

_STUDY = "a study of text-generation-inference, fixed inputs"
_SECONDS = {24: 664.0, 64: 561.0, 128: 554.0, 256: 568.0}


class Threads(Traced, frozen=True, kw_only=True):
    """24..512 clients that send the same inputs but for the first tokens, so that no prefix is found in a cache.

    Clients are tasks of one process, which cost less than threads.
    """

    name: ClassVar[str] = "threads"
    about: ClassVar[str] = "throughput of fixed inputs by number of clients, with and without n-gram speculation"
    form: ClassVar = ("clients", "requests", "prompt_tokens", "output_tokens", "trace", "repeats")
    keys: ClassVar = (
        Column(name="guessed", title="draft tokens", digits=0),
        Column(name="clients", title="clients", digits=0),
    )
    columns: ClassVar = (
        Column(name="total_s", title="total", unit="s", digits=1, better="lower"),
        Column(name="acceptance", title="accepted", unit="%", better="higher"),
        *columns("output_throughput", "median_ttft_ms", "median_itl_ms", "p99_e2el_ms"),
    )
    published: ClassVar = tuple(
        Published(who="TGI", device="not stated", source=_STUDY, keys={"clients": clients}, values={"total_s": seconds})
        for clients, seconds in _SECONDS.items()
    )
    quick: ClassVar = {"clients": (4, 16), "requests": 32, "guessed": (0, 2), "output_tokens": fixed(32)}

    clients: Annotated[tuple[int, ...], Meta(description="numbers of clients")] = (24, 64, 128, 256, 512)
    requests: Annotated[
        int, Meta(ge=1, le=10**6, description="inputs, the same in every row but for the first tokens")
    ] = 512
    guessed: Annotated[
        tuple[int, ...], Meta(ge=0, le=100, description="max draft tokens of n-gram speculation; 0 is without")
    ] = (0, 1, 2, 8)

    def check(self) -> None:
        super().check()
        at_least_one("clients", self.clients)
        enough(self.requests, max(self.clients))

    @property
    def max_concurrent_requests(self) -> int:
        return max(self.clients)

    def parts(self, target: Target) -> list[BenchPart]:
        """Plan: of a server, whose speculation cannot be changed, those without."""
        guessed = self.guessed if isinstance(target, EngineHere) else (0,)
        return [
            BenchPart(keys={"guessed": tokens, "clients": clients}, requests=self.requests)
            for tokens in guessed
            for clients in self.clients
        ]

    async def measure(self, part: BenchPart, context: BenchContext) -> Values:
        tokens, clients = int(part.keys["guessed"]), int(part.keys["clients"])
        here = context.target if isinstance(context.target, EngineHere) else None
        if here is None:
            context.note("The speculation of a server cannot be changed over HTTP.")
        else:
            await _set_draft_tokens(here, tokens)
        before = here.totals() if here else None
        sent = iter(context.items(self.mix(context), self.requests, alike=True))
        run = await context.closed_loop([sent] * clients)
        acceptance = None
        if here and before:
            after = here.totals()
            guesses = after.draft_tokens - before.draft_tokens
            acceptance = 100 * (after.draft_accepted - before.draft_accepted) / guesses if guesses else None
        return {"total_s": run.seconds, "acceptance": acceptance, **summarize(run)}


async def _set_draft_tokens(here: EngineHere, tokens: int) -> None:
    try:
        await here.set_draft_tokens(tokens)
    except (InvalidRequest, ModelLoadFailed) as error:
        raise SkipPart(f"{tokens} draft tokens were not measured: {error.message}") from error
