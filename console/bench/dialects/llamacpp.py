"""The /completion of llama.cpp's server."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import Count, Dialect, ids_or_text, refuse_error
from console.bench.target import Chunk
from console.bench.workload import Item


class _Timings(msgspec.Struct):
    cache_n: Count | None = None


class _Event(msgspec.Struct):
    content: str = ""
    tokens: list[int] = []
    stop: bool = False
    tokens_predicted: Count | None = None
    tokens_evaluated: Count | None = None
    timings: _Timings | None = None
    error: Any = None


def _request(item: Item, model: str) -> dict[str, Any]:
    asked = {"n_predict": item.output_tokens, "temperature": 0, "stream": True, "cache_prompt": True}
    return {"prompt": ids_or_text(item), **asked}


def _read(event: bytes) -> Chunk | None:
    found = msgspec.json.decode(event, type=_Event)
    refuse_error(found.error)
    tokens = len(found.tokens) or int(bool(found.content))
    if not found.stop:
        return Chunk(tokens=tokens) if tokens else None
    return Chunk(
        tokens=0 if found.tokens_predicted is not None else tokens,
        output_tokens=found.tokens_predicted,
        prompt_tokens=found.tokens_evaluated,
        cached_tokens=found.timings.cache_n if found.timings else None,
    )


LLAMACPP = Dialect(
    name="llamacpp",
    order=40,
    path="/completion",
    server="llama.cpp",
    takes_ids=True,
    request=_request,
    extras=lambda item: {"ignore_eos": True, "return_tokens": True},
    reader=lambda: _read,
)
