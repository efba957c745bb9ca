"""Text Generation Inference's /generate_stream: an event for each token, and details with the last one."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import Count, Dialect, refuse_error
from console.bench.target import Chunk
from console.bench.workload import Item


class _Token(msgspec.Struct):
    id: int


class _Details(msgspec.Struct):
    generated_tokens: Count | None = None
    input_length: Count | None = None


class _Event(msgspec.Struct):
    token: _Token | None = None
    details: _Details | None = None
    error: Any = None


def _request(item: Item, model: str, **more: Any) -> dict[str, Any]:
    """Greedy is what it does by itself; there is no way to have it go on beyond the end that the model chose."""
    return {"inputs": item.prompt.text, "parameters": {"max_new_tokens": item.output_tokens, **more}}


def _read(event: bytes) -> Chunk | None:
    found = msgspec.json.decode(event, type=_Event)
    refuse_error(found.error)
    if found.token is None:
        return None
    details = found.details or _Details()
    return Chunk(tokens=1, output_tokens=details.generated_tokens, prompt_tokens=details.input_length)


TGI = Dialect(
    name="tgi",
    order=30,
    path="/generate_stream",
    server="TGI",
    forces=False,
    counted_by="ids",
    request=_request,
    extras=lambda item: _request(item, "", details=True, decoder_input_details=False),
    reader=lambda: _read,
)
