"""Our whole engine (queue, worker process, text, streams) against the library's generator driven directly.

Where flash-attn is installed, the generator has it, which is the library as its authors mean it; our engine then takes
flash-attn too, and a second one has Triton's attention. Elsewhere the generator batches only with our attention in the
place of flash-attn; for one request, the library with its own attention is measured as well.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from engine.backends.paged_attention.choose import obstacle
from engine.backends.paged_attention.probe import probe
from engine.config import AttentionName, ModelSpec
from tests.gpu.direct import MAX_SEQ_LEN, DirectProcess
from tests.gpu.library import AttentionKind
from tests.gpu.load import as_they_come, engine_rate, requests_for, serving
from tests.gpu.models import BILLION, Shape, exl2_model
from tests.gpu.place import Place
from tests.gpu.report import Row, at_least, measured

RATIO_GOAL = 0.97
TITLES: dict[AttentionKind, str] = {
    "flash": "the library with flash-attn",
    "ours": "the library's generator with our attention",
    "own": "the library with its own attention",
}
_TOKENS_PER_PLACE = 512


@dataclass(slots=True)
class Rates:
    """Tokens per second of each counted round, ours and theirs, at one number of concurrent requests."""

    ours: list[float] = field(default_factory=list)
    theirs: dict[AttentionKind, list[float]] = field(default_factory=dict)

    def rows(self, clients: int, engine: str, detail: str, layers: int) -> list[Row]:
        """The medians, and the ratio to each of theirs against its goal. For one request also microseconds of a token
        per layer, in which the host's share is largest."""
        ours = statistics.median(self.ours)
        requests = f"{clients} request{'s' if clients > 1 else ''}"
        found = [measured(f"{requests}, {engine}", ours, "tok/s", detail)]
        if clients == 1:
            found.append(measured(f"{requests}, {engine}, a token per layer", 1e6 / ours / layers, "us"))
        for kind, rates in self.theirs.items():
            theirs = statistics.median(rates)
            found.append(measured(f"{requests}, {TITLES[kind]}", theirs, "tok/s"))
            if clients == 1:
                found.append(measured(f"{requests}, {TITLES[kind]}, a token per layer", 1e6 / theirs / layers, "us"))
            spread = f"rounds: ours {_rounded(self.ours)}, theirs {_rounded(rates)}"
            found.append(at_least(f"{requests}, {engine} : {TITLES[kind]}", ours / theirs, RATIO_GOAL, "x", spread))
        return found


def _rounded(rates: Iterable[float]) -> str:
    return ", ".join(f"{rate:.0f}" for rate in rates)


def kinds_for(clients: int, *, flash: bool) -> tuple[AttentionKind, ...]:
    """Return the attentions of the library to compare with."""
    if flash:
        return ("flash",)
    return ("ours", "own") if clients == 1 else ("ours",)


def checks(place: Place) -> Iterator[Row]:
    """Rows for each number of concurrent requests."""
    yield from as_they_come(compared(place, BILLION, place.clients))
    if _has_flash(BILLION):
        yield from as_they_come(compared(place, BILLION, (1,), attention="triton"))


def _has_flash(shape: Shape) -> bool:
    return not obstacle("flash", probe(torch.device("cuda", 0), head_dim=shape.hidden // shape.heads))


async def compared(
    place: Place, shape: Shape, clients: Sequence[int], *, attention: AttentionName = "auto"
) -> AsyncGenerator[Row, None]:
    """Rows for each number of concurrent requests; rounds of all are interleaved, the first warms up."""
    folder, most, flash = exl2_model(place, shape), max(clients), _has_flash(shape)
    cache_tokens = most * _TOKENS_PER_PLACE
    spec = ModelSpec(
        path=folder,
        name=shape.name,
        backend="exllamav2",
        max_model_len=MAX_SEQ_LEN,
        kv_cache_tokens=cache_tokens,
        attention=attention,
    )
    title = "our engine" if attention == "auto" else f"our engine with {attention}"
    kinds = {count: kinds_for(count, flash=flash) for count in clients}
    with ExitStack() as closing:
        direct: dict[AttentionKind, DirectProcess] = {}
        for kind in dict.fromkeys(kind for found in kinds.values() for kind in found):
            direct[kind] = DirectProcess(folder, cache_tokens, kind, place.folder / f"direct-{kind}.log")
            closing.callback(direct[kind].close)
        async with serving(spec, most) as (engine, model):
            detail = f"{model.parameters / 1e9:.2f}B {model.dtype}, attention {model.attention}"
            first = 0
            for number, count in enumerate(clients):
                rates = Rates(theirs={kind: [] for kind in kinds[count]})
                for counted in place.rounds(len(clients) - number):
                    requests = requests_for(count)
                    ours = await engine_rate(engine, count, requests, first)
                    if counted:
                        rates.ours.append(ours)
                    for kind, each in rates.theirs.items():
                        theirs = await asyncio.to_thread(direct[kind].rate, count, requests, first)
                        if counted:
                            each.append(theirs)
                    first += requests
                for row in rates.rows(count, title, detail, shape.layers):
                    yield row
