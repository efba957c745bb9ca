"""Ollama's dialect: /api/generate, /api/chat, /api/embed and what its clients ask of models."""

from console.api.ollama.chat import Chat
from console.api.ollama.embed import Embed
from console.api.ollama.errors import ollama_error as tells
from console.api.ollama.generate import Generate
from console.api.ollama.models import ModelList

__all__ = ["Chat", "Embed", "Generate", "ModelList", "tells"]
