"""text-generation-webui's websocket, /api/v1/stream: a message for each piece of text, and no counts."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import Dialect, model_field, refuse_error
from console.bench.target import Chunk
from console.bench.workload import Item


class _Event(msgspec.Struct):
    event: str = ""
    text: str = ""
    error: Any = None


def _request(item: Item, model: str) -> dict[str, Any]:
    greedy = {"do_sample": False, "repetition_penalty": 1}  # a penalty is its default, and not measured
    return {"prompt": item.prompt.text, "max_new_tokens": item.output_tokens, **greedy, **model_field(model)}


def _read(event: bytes) -> Chunk | None:
    found = msgspec.json.decode(event, type=_Event)
    refuse_error(found.error)
    if found.event == "stream_end":
        return Chunk(last=True)
    return Chunk(tokens=1) if found.text else None


TEXTGEN = Dialect(
    name="textgen",
    order=90,
    path="/api/v1/stream",
    server="textgen webui",
    over="socket",
    counted_by="asked",
    request=_request,
    extras=lambda item: {"ban_eos_token": True},
    reader=lambda: _read,
)
