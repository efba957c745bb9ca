"""The dialect of Hugging Face's text-generation-inference, for its clients and huggingface_hub's.

It shares /generate and /tokenize with dialects whose bodies have a `prompt`: a body with `inputs` is in this one.
"""

from __future__ import annotations

from console.api.dialects.base import Dialect, Example
from console.api.dialects.tgi.errors import format_error
from console.api.dialects.tgi.generate import GenerateEndpoints
from console.api.dialects.tgi.info import InfoEndpoints

DIALECT = Dialect(
    name="tgi",
    title="TGI",
    rank=3,
    endpoints=(GenerateEndpoints, InfoEndpoints),
    example=Example("/generate", {"inputs": "Hello"}),
    format_error=format_error,
    claims=lambda body: "inputs" in body,
    # TGI has one model: huggingface_hub sends the one name by itself, other clients the other, as TGI's docs say.
    unnamed_models=frozenset({"dummy", "tgi"}),
)
