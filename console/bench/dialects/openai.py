"""OpenAI's completions and chat completions, with vLLM's ignore_eos and min_tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.dialects.base import Count, CountedBy, Posted, Reader, refuse_error
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


class Completions(Posted):
    """POST /v1/completions."""

    name = "openai"
    server = "vLLM, others"
    path = "/v1/completions"
    models_path = "/v1/models"
    takes_ids = True
    forces = True
    counted_by: CountedBy = "usage"

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """Dialect."""
        prompt: object = list(item.prompt.ids) or item.prompt.text
        return {"prompt": prompt} | common(item, model, plain=plain)

    def reader(self) -> Reader:
        """Dialect."""
        return read_event


class Chat(Posted):
    """POST /v1/chat/completions, the prompt being what a user says."""

    name = "chat"
    path = "/v1/chat/completions"
    models_path = "/v1/models"
    takes_ids = False
    forces = True
    counted_by: CountedBy = "usage"

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """Dialect."""
        return {"messages": [{"role": "user", "content": item.prompt.text}]} | common(item, model, plain=plain)

    def reader(self) -> Reader:
        """Dialect."""
        return read_event


def common(item: Item, model: str, *, plain: bool) -> dict[str, Any]:
    """Fields of both."""
    asked: dict[str, Any] = {"max_tokens": item.output_tokens, "temperature": 0, "stream": True}
    if model:
        asked["model"] = model
    if plain:
        return asked | {"stream_options": {"include_usage": True}}
    return asked | {
        "ignore_eos": True,
        "min_tokens": item.output_tokens,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
