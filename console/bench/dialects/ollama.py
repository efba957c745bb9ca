"""Ollama's /api/generate and /api/chat: a JSON object in each line, and counts in the last."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import Count, CountedBy, Posted, Reader, refuse_error
from console.bench.target import Chunk
from console.bench.workload import Item


class _Message(msgspec.Struct):
    content: str = ""
    thinking: str = ""


class _Event(msgspec.Struct):
    response: str = ""
    thinking: str = ""
    message: _Message | None = None
    done: bool = False
    prompt_eval_count: Count | None = None
    eval_count: Count | None = None
    error: Any = None

    @property
    def has_text(self) -> bool:
        message = self.message or _Message()
        return bool(self.response or self.thinking or message.content or message.thinking)


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
    """Fields of both."""
    options: dict[str, Any] = {"num_predict": item.output_tokens, "temperature": 0}
    if not plain:
        options["ignore_eos"] = True
    return {"model": model, "stream": True, "options": options}


def _read(event: bytes) -> Chunk | None:
    found = msgspec.json.decode(event, type=_Event)
    refuse_error(found.error)
    if found.done:
        return Chunk(tokens=int(found.has_text), output_tokens=found.eval_count, prompt_tokens=found.prompt_eval_count)
    return Chunk(tokens=1) if found.has_text else None
