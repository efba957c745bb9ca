"""The HTTP dialects that a bench speaks, by the names that --dialect takes."""

from __future__ import annotations

from collections.abc import Mapping

from console.bench.dialects.anthropic import Anthropic
from console.bench.dialects.base import Dialect
from console.bench.dialects.generate import Generate
from console.bench.dialects.kobold import Kobold
from console.bench.dialects.llamacpp import LlamaCpp
from console.bench.dialects.ollama import Ollama, OllamaChat
from console.bench.dialects.openai import Chat, Completions
from console.bench.dialects.tabby import Tabby
from console.bench.dialects.textgen import Textgen
from console.bench.dialects.tgi import Tgi

__all__ = ["DIALECTS", "Dialect"]

_ALL: tuple[Dialect, ...] = (
    *(Completions(), Chat(), Anthropic(), Tgi(), LlamaCpp(), Tabby()),
    *(Ollama(), OllamaChat(), Kobold(), Textgen(), Generate()),
)
DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in _ALL}
