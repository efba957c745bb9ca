"""Our whole engine (queue, worker process, text, streams) against the library's generator driven directly."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

from engine.config import ModelSpec
from tests.gpu.direct import MAX_SEQ_LEN, DirectProcess
from tests.gpu.load import as_they_come, engine_rate, requests_for, serving
from tests.gpu.models import BILLION, Shape, exl2_model
from tests.gpu.place import Place
from tests.gpu.report import Row, at_least, measured

RATIO_GOAL = 0.97
_TOKENS_PER_PLACE = 512


@dataclass(slots=True)
class Rates:
    """Tokens per second of each counted round, ours and theirs, at one number of concurrent requests."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def rows(self, clients: int, detail: str) -> list[Row]:
        """Both medians, and their ratio against its goal."""
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        spread = f"rounds: ours {_rounded(self.ours)}, theirs {_rounded(self.theirs)}"
        return [
            measured(f"{clients} requests, our engine", ours, "tok/s", detail),
            measured(f"{clients} requests, the library alone", theirs, "tok/s"),
            at_least(f"{clients} requests, ratio", ours / theirs, RATIO_GOAL, "x", spread),
        ]


def _rounded(rates: list[float]) -> str:
    return ", ".join(f"{rate:.0f}" for rate in rates)


def checks(place: Place) -> Iterator[Row]:
    """Three rows for each number of concurrent requests."""
    yield from as_they_come(compared(place, BILLION, place.clients))


async def compared(place: Place, shape: Shape, clients: Sequence[int]) -> AsyncGenerator[Row, None]:
    """Three rows for each number of concurrent requests; rounds of both are interleaved, the first warms up."""
    folder, most = exl2_model(place, shape), max(clients)
    cache_tokens = most * _TOKENS_PER_PLACE
    spec = ModelSpec(
        path=folder, name=shape.name, backend="exllamav2", max_model_len=MAX_SEQ_LEN, kv_cache_tokens=cache_tokens
    )
    direct = DirectProcess(folder, cache_tokens, place.folder / "direct.log")
    try:
        async with serving(spec, most) as (engine, model):
            detail = (
                f"{model.parameters / 1e9:.2f}B {model.dtype}, attention {model.attention}; alone: {direct.attention}"
            )
            first = 0
            for number, count in enumerate(clients):
                found = Rates()
                for counted in place.rounds(len(clients) - number):
                    requests = requests_for(count)
                    ours = await engine_rate(engine, count, requests, first)
                    theirs = await asyncio.to_thread(direct.rate, count, requests, first)
                    first += requests
                    if counted:
                        found.ours.append(ours)
                        found.theirs.append(theirs)
                for row in found.rows(count, detail):
                    yield row
    finally:
        direct.close()
