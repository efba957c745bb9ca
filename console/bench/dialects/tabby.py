"""TabbyAPI's completions: OpenAI's, with ExLlamaV2's names for what forces a length."""

from __future__ import annotations

from typing import Any

from console.bench.dialects.base import CountedBy, Posted, Reader
from console.bench.dialects.openai import read_event
from console.bench.workload import Item


class Tabby(Posted):
    """POST /v1/completions of TabbyAPI."""

    name = "tabby"
    server = "TabbyAPI"
    path = "/v1/completions"
    models_path = "/v1/models"
    takes_ids = False
    forces = True
    counted_by: CountedBy = "usage"

    def body(self, item: Item, model: str, *, plain: bool) -> dict[str, Any]:
        """Dialect."""
        asked: dict[str, Any] = {
            "prompt": item.prompt.text,
            "max_tokens": item.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if model:
            asked["model"] = model
        return asked if plain else asked | {"min_tokens": item.output_tokens, "ban_eos_token": True}

    def reader(self) -> Reader:
        """Dialect."""
        return read_event
