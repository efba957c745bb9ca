"""EricLLM's /generate: lines of JSON, each with the whole text so far. Nothing in the answer counts tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import Dialect, ids_or_text, model_field, refuse_error
from console.bench.target import Chunk
from console.bench.workload import Item


class _Line(msgspec.Struct):
    text: str | list[str] = ""
    error: Any = None


def _request(item: Item, model: str) -> dict[str, Any]:
    fields = {"prompt": ids_or_text(item), "max_tokens": item.output_tokens, "temperature": 0, "stream": True}
    return fields | model_field(model)


class _GrowingText:
    """Reads one answer: a line counts where its text is longer than that of the line before."""

    def __init__(self) -> None:
        self._length = -1

    def __call__(self, event: bytes) -> Chunk | None:
        found = msgspec.json.decode(event, type=_Line)
        refuse_error(found.error)
        length = len(found.text) if isinstance(found.text, str) else sum(map(len, found.text))
        grown, self._length = length > self._length, length
        return Chunk(tokens=1) if grown else None


GENERATE = Dialect(
    name="generate",
    order=100,
    path="/generate",
    server="EricLLM",
    takes_ids=True,
    counted_by="asked",
    request=_request,
    extras=lambda item: {"ignore_eos": True},
    reader=_GrowingText,
)
