"""KoboldCpp's /api/extra/generate/stream: an event for each piece of text, and no counts."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import Dialect, model_field, refuse_error
from console.bench.target import Chunk
from console.bench.workload import Item


class _Event(msgspec.Struct):
    token: str = ""
    error: Any = None
    detail: Any = None


def _request(item: Item, model: str) -> dict[str, Any]:
    greedy = {"temperature": 0, "top_k": 1, "rep_pen": 1}
    return {"prompt": item.prompt.text, "max_length": item.output_tokens, **greedy, **model_field(model)}


def _read(event: bytes) -> Chunk | None:
    found = msgspec.json.decode(event, type=_Event)
    refuse_error(found.error or found.detail)
    return Chunk(tokens=1) if found.token else None


KOBOLD = Dialect(
    name="kobold",
    order=80,
    path="/api/extra/generate/stream",
    server="KoboldCpp",
    counted_by="asked",
    request=_request,
    extras=lambda item: {"ban_eos_token": True},
    reader=lambda: _read,
)
