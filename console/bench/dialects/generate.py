"""EricLLM's /generate: lines of JSON, each with the whole text so far."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import CountedBy, Posted, Reader, refuse_error
from console.bench.target import Chunk
from console.bench.workload import Item


class _Line(msgspec.Struct):
    text: str | list[str] = ""
    error: Any = None


class Generate(Posted):
    """POST /generate. Nothing in the answer counts tokens: it has those that were asked for."""

    name = "generate"
    server = "EricLLM"
    path = "/generate"
    models_path = ""
    takes_ids = True
    forces = True
    counted_by: CountedBy = "asked"

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """Dialect."""
        asked: dict[str, Any] = {
            "prompt": list(item.prompt.ids) or item.prompt.text,
            "max_tokens": item.output_tokens,
            "temperature": 0,
            "stream": True,
        }
        if model:
            asked["model"] = model
        return asked if plain else asked | {"ignore_eos": True}

    def reader(self) -> Reader:
        """Dialect."""
        return _Growing()


class _Growing:
    """Reads one answer: a line counts where its text is longer than that of the line before."""

    def __init__(self) -> None:
        self._length = -1

    def __call__(self, event: bytes) -> Chunk | None:
        found = msgspec.json.decode(event, type=_Line)
        refuse_error(found.error)
        length = len(found.text) if isinstance(found.text, str) else sum(map(len, found.text))
        grown, self._length = length > self._length, length
        return Chunk(tokens=1) if grown else None
