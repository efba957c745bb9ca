"""Mistral 7B and its kin: Llama's block with a sliding window in every layer, null for none (Jiang et al. 2023)."""

from __future__ import annotations

from engine.backends.common.config_values import window
from engine.backends.common.families.base import Architecture, RawConfig, Traits


def _traits(raw: RawConfig, layers: int) -> Traits:
    return Traits(windows=(window(raw, 4096),) * layers)


ARCHITECTURE = Architecture("MistralForCausalLM", _traits)

WITH_IMAGES = Architecture("Mistral3ForConditionalGeneration", _traits, multimodal=True)
"""Mistral Small 3.1 and later, which see images too."""
