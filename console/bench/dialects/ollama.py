"""Ollama's /api/generate and /api/chat: a JSON object in each line, and counts in the last."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import Count, CountedBy, Posted, Reader, refuse_error
from console.bench.target import Chunk
from console.bench.workload import Item


class _Said(msgspec.Struct):
    content: str = ""
    thinking: str = ""


class _Event(msgspec.Struct):
    response: str = ""
    thinking: str = ""
    message: _Said | None = None
    done: bool = False
    prompt_eval_count: Count | None = None
    eval_count: Count | None = None
    error: Any = None

    @property
    def says(self) -> bool:
        said = self.message or _Said()
        return bool(self.response or self.thinking or said.content or said.thinking)


class Ollama(Posted):
    """POST /api/generate, with no template around the prompt. Lengths are forced by an option of ours, which Ollama
    itself passes over: it ends answers where the model does."""

    name = "ollama"
    server = "Ollama"
    path = "/api/generate"
    models_path = "/api/tags"
    takes_ids = False
    forces = True
    counted_by: CountedBy = "usage"

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """Dialect."""
        return {"prompt": item.prompt.text, "raw": True} | _common(item, model, plain=plain)

    def reader(self) -> Reader:
        """Dialect."""
        return _read


class OllamaChat(Posted):
    """POST /api/chat, the prompt being what a user says; lengths as with /api/generate."""

    name = "ollama-chat"
    server = "Ollama"
    path = "/api/chat"
    models_path = "/api/tags"
    takes_ids = False
    forces = True
    counted_by: CountedBy = "usage"

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """Dialect."""
        return {"messages": [{"role": "user", "content": item.prompt.text}]} | _common(item, model, plain=plain)

    def reader(self) -> Reader:
        """Dialect."""
        return _read


def _common(item: Item, model: str, *, plain: bool) -> dict[str, Any]:
    """What both have."""
    options: dict[str, Any] = {"num_predict": item.output_tokens, "temperature": 0}
    if not plain:
        options["ignore_eos"] = True
    return {"model": model, "stream": True, "options": options}


def _read(event: bytes) -> Chunk | None:
    found = msgspec.json.decode(event, type=_Event)
    refuse_error(found.error)
    if found.done:
        return Chunk(tokens=int(found.says), output_tokens=found.eval_count, prompt_tokens=found.prompt_eval_count)
    return Chunk(tokens=1) if found.says else None
