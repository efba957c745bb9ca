"""TabbyAPI's completions: OpenAI's, with ExLlamaV2's names for what forces a length."""

from __future__ import annotations

from console.bench.dialects.base import Dialect
from console.bench.dialects.openai import read_event, stream_fields

TABBY = Dialect(
    name="tabby",
    order=50,
    path="/v1/completions",
    server="TabbyAPI",
    models_path="/v1/models",
    request=lambda item, model: {"prompt": item.prompt.text, **stream_fields(item, model)},
    extras=lambda item: {"min_tokens": item.output_tokens, "ban_eos_token": True},
    reader=lambda: read_event,
)
