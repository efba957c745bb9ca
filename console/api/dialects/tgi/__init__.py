"""The dialect of Hugging Face's text-generation-inference: what its clients, and huggingface_hub's, ask and read.

A body with `inputs` is in it: it shares /generate and /tokenize with others, whose bodies have a `prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping

from console.api.dialects.tgi.errors import format_error
from console.api.dialects.tgi.generate import GenerateEndpoints
from console.api.dialects.tgi.info import InfoEndpoints

__all__ = ["GenerateEndpoints", "InfoEndpoints", "claims", "format_error"]


def claims(body: Mapping[str, object]) -> bool:
    """Whether a body is in this dialect."""
    return "inputs" in body
