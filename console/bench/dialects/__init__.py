"""The HTTP dialects that a bench speaks, by the names that --dialect takes."""

from __future__ import annotations

from collections.abc import Mapping

from console.bench.dialects.base import Dialect
from console.bench.dialects.generate import Generate
from console.bench.dialects.llamacpp import LlamaCpp
from console.bench.dialects.ollama import Ollama
from console.bench.dialects.openai import Chat, Completions
from console.bench.dialects.tabby import Tabby
from console.bench.dialects.tgi import Tgi

__all__ = ["DIALECTS", "Dialect"]

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect for dialect in (Completions(), Chat(), Tgi(), LlamaCpp(), Tabby(), Ollama(), Generate())
}
