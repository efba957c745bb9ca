"""OpenAI's completions and chat completions, with vLLM's ignore_eos and min_tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import Count, Dialect, ids_or_text, model_field, refuse_error, user_message
from console.bench.target import Chunk
from console.bench.workload import Item


class _Details(msgspec.Struct):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


def read_event(event: bytes) -> Chunk | None:
    """A chunk of a stream. A text counts as one token, and the usage as what it says."""
    found = msgspec.json.decode(event, type=_Event)
    refuse_error(found.error)
    has_text, usage = any(choice.has_text for choice in found.choices), found.usage
    if usage is None:
        return Chunk(tokens=1) if has_text else None
    return Chunk(
        tokens=int(has_text),
        output_tokens=usage.completion_tokens,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None,
    )


def stream_fields(item: Item, model: str) -> dict[str, Any]:
    """Fields of a greedy, stream_fields request that are beside its prompt."""
    fields: dict[str, Any] = {"max_tokens": item.output_tokens, "temperature": 0, "stream": True}
    return fields | model_field(model) | {"stream_options": {"include_usage": True}}


def _extras(item: Item) -> dict[str, Any]:
    counted = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return {"ignore_eos": True, "min_tokens": item.output_tokens, **counted}


COMPLETIONS = Dialect(
    name="openai",
    order=0,
    path="/v1/completions",
    server="vLLM, others",
    models_path="/v1/models",
    takes_ids=True,
    request=lambda item, model: {"prompt": ids_or_text(item), **stream_fields(item, model)},
    extras=_extras,
    reader=lambda: read_event,
)
CHAT = Dialect(
    name="chat",
    order=10,
    path="/v1/chat/completions",
    models_path="/v1/models",
    request=lambda item, model: {"messages": user_message(item), **stream_fields(item, model)},
    extras=_extras,
    reader=lambda: read_event,
)
