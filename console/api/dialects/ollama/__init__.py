"""Ollama's dialect: /api/generate, /api/chat, /api/embed and what its clients ask of models."""

from __future__ import annotations

from console.api.dialects.base import Dialect, Example
from console.api.dialects.ollama.chat import Chat
from console.api.dialects.ollama.embed import Embed
from console.api.dialects.ollama.errors import format_error
from console.api.dialects.ollama.generate import Generate
from console.api.dialects.ollama.models import ModelList

DIALECT = Dialect(
    name="ollama",
    title="Ollama",
    rank=7,
    endpoints=(Generate, Chat, Embed, ModelList),
    example=Example("/api/chat", {"messages": [{"role": "user", "content": "Hello"}]}),
    format_error=format_error,
)
