"""The dialect of KoboldAI and KoboldCpp, for SillyTavern and Kobold Lite.

It shares POST /api/v1/generate and GET /api/v1/model with text-generation-webui's: bodies that no other dialect claims
are in this one.
"""

from __future__ import annotations

from console.api.dialects.base import Dialect, Example
from console.api.dialects.kobold.errors import format_error
from console.api.dialects.kobold.generate import GenerateEndpoints
from console.api.dialects.kobold.info import InfoEndpoints

DIALECT = Dialect(
    name="kobold",
    title="KoboldAI",
    rank=4,
    endpoints=(GenerateEndpoints, InfoEndpoints),
    example=Example("/api/v1/generate", {"prompt": "Hello"}),
    format_error=format_error,
)
