"""The /completion of llama.cpp's server."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import Count, CountedBy, Posted, Reader, refuse_error
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


class LlamaCpp(Posted):
    """POST /completion."""

    name = "llamacpp"
    server = "llama.cpp"
    path = "/completion"
    models_path = ""
    takes_ids = True
    forces = True
    counted_by: CountedBy = "usage"

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """Dialect."""
        asked: dict[str, Any] = {
            "prompt": list(item.prompt.ids) or item.prompt.text,
            "n_predict": item.output_tokens,
            "temperature": 0,
            "stream": True,
            "cache_prompt": True,
        }
        return asked if plain else asked | {"ignore_eos": True, "return_tokens": True}

    def reader(self) -> Reader:
        """Dialect."""
        return _read


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
