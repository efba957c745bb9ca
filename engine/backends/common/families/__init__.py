"""The architectures that the torch backend knows, by their name in config.json. No torch here.

A new one is a module with an `ARCHITECTURE` of its own, listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.backends.common.families import (
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
    stablelm,
)
from engine.backends.common.families.base import Architecture

_DENSE = (llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3, granite, olmo2, smollm3, stablelm)
_MIXTURES = (mixtral, qwen2_moe, qwen3_moe)
_MULTIMODAL = (gemma3, mistral)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        architecture.name: architecture
        for architecture in (
            *(module.ARCHITECTURE for module in (*_DENSE, *_MIXTURES)),
            *(module.WITH_IMAGES for module in _MULTIMODAL),
        )
    }
)
