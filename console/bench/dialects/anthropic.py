"""Anthropic's messages: an event for each piece of text, and counts with the first and the last."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import Count, Dialect, model_field, refuse_error, user_message
from console.bench.target import Chunk
from console.bench.workload import Item

_VERSION = "2023-06-01"


class _Usage(msgspec.Struct):
    input_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None
    output_tokens: Count | None = None

    @property
    def prompt_tokens(self) -> int | None:
        """Of the whole prompt: cached tokens are counted apart."""
        if self.input_tokens is None:
            return None
        return self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)


class _Message(msgspec.Struct):
    usage: _Usage | None = None


class _Delta(msgspec.Struct):
    text: str = ""
    thinking: str = ""


class _Event(msgspec.Struct):
    message: _Message | None = None
    delta: _Delta | None = None
    usage: _Usage | None = None
    error: Any = None


def _headers(key: str) -> dict[str, str]:
    return {"anthropic-version": _VERSION, **({"x-api-key": key} if key else {})}


def _request(item: Item, model: str) -> dict[str, Any]:
    fields = {"messages": user_message(item), "max_tokens": item.output_tokens, "temperature": 0, "stream": True}
    return fields | model_field(model)


def _extras(item: Item) -> dict[str, Any]:
    """Fields of ours; Anthropic itself refuses them and ends answers where the model does."""
    return {"ignore_eos": True, "min_tokens": item.output_tokens}


def _read(event: bytes) -> Chunk | None:
    found = msgspec.json.decode(event, type=_Event)
    refuse_error(found.error)
    if found.message is not None and found.message.usage is not None:
        return _counted(found.message.usage)  # before the answer: its output count is not final
    if found.usage is not None:
        return msgspec.structs.replace(_counted(found.usage), output_tokens=found.usage.output_tokens)
    return Chunk(tokens=1) if found.delta is not None and (found.delta.text or found.delta.thinking) else None


def _counted(usage: _Usage) -> Chunk:
    return Chunk(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cache_read_input_tokens)


ANTHROPIC = Dialect(
    name="anthropic",
    order=20,
    path="/v1/messages",
    server="Anthropic",
    models_path="/v1/models",
    headers=_headers,
    request=_request,
    extras=_extras,
    reader=lambda: _read,
)
