"""Ollama's dialect: /api/generate, /api/chat, /api/embed and what its clients ask of models; its errors."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from console.api.dialects.base import Dialect, Example
from console.api.dialects.ollama.chat import Chat
from console.api.dialects.ollama.embed import Embed
from console.api.dialects.ollama.generate import Generate
from console.api.dialects.ollama.models import ModelList
from console.api.http.errors import localized_message
from engine.errors import EngineError

FIELD_NAMES: Mapping[str, str] = {
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "repetition_range": "repeat_last_n",
    "tfs": "tfs_z",
}
"""Ollama's names of our fields."""


class OllamaError(msgspec.Struct, frozen=True):
    """The body of an error, and the last line of a stream that failed."""

    error: str


def format_error(error: EngineError) -> OllamaError:
    """Return the error in Ollama's shape."""
    return OllamaError(localized_message(error, FIELD_NAMES))


DIALECT = Dialect(
    name="ollama",
    title="Ollama",
    rank=7,
    endpoints=(Generate, Chat, Embed, ModelList),
    example=Example("/api/chat", {"messages": [{"role": "user", "content": "Hello"}]}),
    format_error=format_error,
)
