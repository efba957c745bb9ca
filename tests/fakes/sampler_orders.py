"""Orders of samplers that clients send of themselves."""

from __future__ import annotations

OOBA_ORDER = [
    "temperature",
    "dynamic_temperature",
    "quadratic_sampling",
    "top_k",
    "top_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "tfs",
    "top_a",
    "min_p",
    "mirostat",
]
"""text-generation-webui's."""

KOBOLD_ORDER = [6, 0, 1, 3, 4, 2, 5]
"""KoboldAI's."""
