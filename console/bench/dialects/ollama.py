"""Ollama's /api/generate: a JSON object in each line, and counts in the last."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import CountedBy, Reader, refuse_error
from console.bench.target import Chunk
from console.bench.workload import Item


class _Event(msgspec.Struct):
    response: str = ""
    thinking: str = ""
    done: bool = False
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    error: str = ""


class Ollama:
    """POST /api/generate, with no template around the prompt. The model's own end cannot be forbidden."""

    name = "ollama"
    path = "/api/generate"
    models_path = "/api/tags"
    takes_ids = False
    forces = False
    counted_by: CountedBy = "usage"

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """Dialect."""
        options = {"num_predict": item.output_tokens, "temperature": 0}
        return {"model": model, "prompt": item.prompt.text, "raw": True, "stream": True, "options": options}

    def reader(self) -> Reader:
        """Dialect."""
        return _read


def _read(event: bytes) -> Chunk | None:
    found = msgspec.json.decode(event, type=_Event)
    refuse_error(found.error)
    says = bool(found.response or found.thinking)
    if found.done:
        return Chunk(tokens=int(says), output_tokens=found.eval_count, prompt_tokens=found.prompt_eval_count)
    return Chunk(tokens=1) if says else None
