"""Errors in Ollama's shape."""

from __future__ import annotations

import msgspec

from console.api.errors import envelope
from engine.errors import EngineError


class OllamaError(msgspec.Struct, frozen=True):
    """What an error answer holds, and the last line of a stream that failed: one sentence."""

    error: str


def ollama_error(error: EngineError) -> OllamaError:
    """The error in Ollama's shape."""
    return OllamaError(envelope(error).error.message)
