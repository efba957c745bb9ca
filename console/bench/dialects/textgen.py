"""text-generation-webui's websocket, /api/v1/stream: a message for each piece of text, and no counts."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import CountedBy, Over, Posted, Reader, refuse_error
from console.bench.target import Chunk
from console.bench.workload import Item


class _Event(msgspec.Struct):
    event: str = ""
    text: str = ""
    error: Any = None


class Textgen(Posted):
    """GET /api/v1/stream. Nothing in the answer counts tokens: it has those that were asked for."""

    name = "textgen"
    server = "textgen webui"
    path = "/api/v1/stream"
    models_path = ""
    over: Over = "socket"
    takes_ids = False
    forces = True
    counted_by: CountedBy = "asked"

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """Dialect. A repetition penalty is its default, and none of what is measured."""
        asked: dict[str, Any] = {
            "prompt": item.prompt.text,
            "max_new_tokens": item.output_tokens,
            "do_sample": False,
            "repetition_penalty": 1,
        }
        if model:
            asked["model"] = model
        return asked if plain else asked | {"ban_eos_token": True}

    def reader(self) -> Reader:
        """Dialect."""
        return _read


def _read(event: bytes) -> Chunk | None:
    found = msgspec.json.decode(event, type=_Event)
    refuse_error(found.error)
    if found.event == "stream_end":
        return Chunk(last=True)
    return Chunk(tokens=1) if found.text else None
