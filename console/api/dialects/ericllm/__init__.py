"""EricLLM's and vLLM's own endpoints: /generate, /tokenize, /detokenize, /version."""

from __future__ import annotations

from console.api.dialects.base import Dialect, Example
from console.api.dialects.ericllm.generate import Generate
from console.api.dialects.ericllm.tokenization import Utilities

DIALECT = Dialect(
    name="generate",
    title="EricLLM and vLLM",
    rank=2,
    endpoints=(Generate, Utilities),
    example=Example("/generate", {"prompt": "Hello"}),
)
