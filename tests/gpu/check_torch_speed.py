"""The torch backend on CUDA through the whole engine: tokens per second on the shape of 1B parameters in bfloat16."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable

from engine.config import ModelSpec
from tests.gpu.load import engine_rate, requests_for, serving
from tests.gpu.models import BILLION, plain_model
from tests.gpu.place import Place
from tests.gpu.report import Row, measured


def checks(place: Place) -> Iterable[Row]:
    """A number for each count of concurrent requests."""
    return asyncio.run(_measure(place))


async def _measure(place: Place) -> list[Row]:
    spec = ModelSpec(
        path=plain_model(place, BILLION, "bfloat16"),
        name="1b",
        backend="torch",
        device="cuda:0",
        dtype="bfloat16",
        max_model_len=2048,
        kv_cache_tokens=max(place.clients) * 512,
    )
    rates: dict[int, list[float]] = {count: [] for count in place.clients}
    async with serving(spec, max(place.clients)) as (engine, model):
        first = 0
        for counted in place.rounds():
            for count, found in rates.items():
                rate = await engine_rate(engine, count, requests_for(count), first)
                first += requests_for(count)
                if counted:
                    found.append(rate)
    detail = f"{model.parameters / 1e9:.2f}B {model.dtype}, attention {model.attention or 'not named'}"
    return [measured(f"{count} requests", statistics.median(found), "tok/s", detail) for count, found in rates.items()]
