"""Ollama's dialect: /api/generate, /api/chat, /api/embed and what its clients ask of models."""

from console.api.dialects.ollama.chat import Chat
from console.api.dialects.ollama.embed import Embed
from console.api.dialects.ollama.errors import format_error
from console.api.dialects.ollama.generate import Generate
from console.api.dialects.ollama.models import ModelList

__all__ = ["Chat", "Embed", "Generate", "ModelList", "format_error"]
