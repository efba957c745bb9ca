"""Text Generation Inference's /generate_stream: an event for each token, and details with the last one."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import Count, CountedBy, Posted, Reader, refuse_error
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


class Tgi(Posted):
    """POST /generate_stream. There is no way to have it go on beyond the end that the model chose."""

    name = "tgi"
    server = "TGI"
    path = "/generate_stream"
    models_path = ""
    takes_ids = False
    forces = False
    counted_by: CountedBy = "ids"

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """Dialect. Greedy is what it does by itself."""
        parameters: dict[str, Any] = {"max_new_tokens": item.output_tokens}
        if not plain:
            parameters |= {"details": True, "decoder_input_details": False}
        return {"inputs": item.prompt.text, "parameters": parameters}

    def reader(self) -> Reader:
        """Dialect."""
        return _read


def _read(event: bytes) -> Chunk | None:
    found = msgspec.json.decode(event, type=_Event)
    refuse_error(found.error)
    if found.token is None:
        return None
    details = found.details or _Details()
    return Chunk(tokens=1, output_tokens=details.generated_tokens, prompt_tokens=details.input_length)
