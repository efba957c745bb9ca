"""KoboldCpp's /api/extra/generate/stream: an event for each piece of text, and no counts."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import CountedBy, Posted, Reader, refuse_error
from console.bench.target import Chunk
from console.bench.workload import Item


class _Event(msgspec.Struct):
    token: str = ""
    error: Any = None
    detail: Any = None


class Kobold(Posted):
    """POST /api/extra/generate/stream. Nothing in the answer counts tokens: it has those that were asked for."""

    name = "kobold"
    server = "KoboldCpp"
    path = "/api/extra/generate/stream"
    models_path = ""
    takes_ids = False
    forces = True
    counted_by: CountedBy = "asked"

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """Dialect."""
        asked: dict[str, Any] = {
            "prompt": item.prompt.text,
            "max_length": item.output_tokens,
            "temperature": 0,
            "top_k": 1,
            "rep_pen": 1,
        }
        if model:
            asked["model"] = model
        return asked if plain else asked | {"ban_eos_token": True}

    def reader(self) -> Reader:
        """Dialect."""
        return _read


def _read(event: bytes) -> Chunk | None:
    found = msgspec.json.decode(event, type=_Event)
    refuse_error(found.error or found.detail)
    return Chunk(tokens=1) if found.token else None
