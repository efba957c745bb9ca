"""Ollama's /api/generate and /api/chat: a JSON object in each line, and counts in the last.

Lengths are forced by an option of ours, which Ollama itself passes over: it ends answers where the model does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import Count, Dialect, refuse_error, user_message
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


def _options(item: Item, **more: Any) -> dict[str, Any]:
    return {"options": {"num_predict": item.output_tokens, "temperature": 0, **more}}


def _generate(item: Item, model: str) -> dict[str, Any]:
    """No template is put around the prompt."""
    return {"prompt": item.prompt.text, "raw": True, "model": model, "stream": True, **_options(item)}


def _chat(item: Item, model: str) -> dict[str, Any]:
    return {"messages": user_message(item), "model": model, "stream": True, **_options(item)}


def _extras(item: Item) -> dict[str, Any]:
    return _options(item, ignore_eos=True)


def _read(event: bytes) -> Chunk | None:
    found = msgspec.json.decode(event, type=_Event)
    refuse_error(found.error)
    if found.done:
        return Chunk(tokens=int(found.has_text), output_tokens=found.eval_count, prompt_tokens=found.prompt_eval_count)
    return Chunk(tokens=1) if found.has_text else None


GENERATE = Dialect(
    name="ollama",
    order=60,
    path="/api/generate",
    server="Ollama",
    models_path="/api/tags",
    request=_generate,
    extras=_extras,
    reader=lambda: _read,
)
CHAT = Dialect(
    name="ollama-chat",
    order=70,
    path="/api/chat",
    server="Ollama",
    models_path="/api/tags",
    request=_chat,
    extras=_extras,
    reader=lambda: _read,
)
