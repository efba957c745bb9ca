"""Our whole engine (queue, worker process, text, streams) against the library's generator driven directly.

Where flash-attn is installed, the generator has it, which is the library as its authors mean it; our engine then takes
flash-attn too, and a second one has Triton's attention. Elsewhere the generator batches only with our attention in the
place of flash-attn; for one request, the library with its own attention is measured as well.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from engine.backends.paged_attention.choose import obstacle
from engine.backends.paged_attention.probe import probe
from engine.config import AttentionName, ModelSpec
from tests.gpu.direct import MAX_SEQ_LEN, DirectProcess
from tests.gpu.library import AttentionKind
from tests.gpu.load import engine_rate, requests_for, serving
from tests.gpu.models import BILLION, exl2_model
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


def checks(place: Place) -> Iterable[Row]:
    """Rows for each number of concurrent requests; rounds of all are interleaved, the first warms up."""
    flash = not obstacle("flash", probe(torch.device("cuda", 0), head_dim=BILLION.hidden // BILLION.heads))
    yield from asyncio.run(_measure(place, "auto", place.clients, flash=flash))
    if flash:
        yield from asyncio.run(_measure(place, "triton", (1,), flash=flash))


async def _measure(place: Place, attention: AttentionName, clients: Sequence[int], *, flash: bool) -> list[Row]:
    folder, most = exl2_model(place, BILLION), max(clients)
    cache_tokens = most * _TOKENS_PER_PLACE
    spec = ModelSpec(
        path=folder,
        name="1b",
        backend="exllamav2",
        max_model_len=MAX_SEQ_LEN,
        kv_cache_tokens=cache_tokens,
        attention=attention,
    )
    rates = {count: Rates(theirs={kind: [] for kind in kinds_for(count, flash=flash)}) for count in clients}
    with ExitStack() as closing:
        direct: dict[AttentionKind, DirectProcess] = {}
        for kind in dict.fromkeys(kind for found in rates.values() for kind in found.theirs):
            direct[kind] = DirectProcess(folder, cache_tokens, kind, place.folder / f"direct-{kind}.log")
            closing.callback(direct[kind].close)
        async with serving(spec, most) as (engine, model):
            detail = f"{model.parameters / 1e9:.2f}B {model.dtype}, attention {model.attention}"
            first = 0
            for counted in place.rounds():
                for count, found in rates.items():
                    requests = requests_for(count)
                    ours = await engine_rate(engine, count, requests, first)
                    if counted:
                        found.ours.append(ours)
                    for kind, each in found.theirs.items():
                        theirs = await asyncio.to_thread(direct[kind].rate, count, requests, first)
                        if counted:
                            each.append(theirs)
                    first += requests
    title = "our engine" if attention == "auto" else f"our engine with {attention}"
    return [row for count, found in rates.items() for row in found.rows(count, title, detail, BILLION.layers)]
