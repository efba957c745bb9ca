"""The dialect of text-generation-webui before it spoke OpenAI's: its blocking API, and its websocket on the same port.

It shares POST /api/v1/generate with KoboldAI's: a body with a field of this dialect alone is in this one.
"""

from __future__ import annotations

from console.api.dialects.base import Dialect, Example
from console.api.dialects.textgen.generate import InfoEndpoints, TextEndpoints, format_error

_OWN_FIELDS = frozenset(
    {
        "add_bos_token",
        "do_sample",
        "encoder_repetition_penalty",
        "max_new_tokens",
        "no_repeat_ngram_size",
        "num_beams",
        "penalty_alpha",
        "preset",
        "repetition_penalty",
        "stopping_strings",
        "truncation_length",
        "typical_p",
    }
)

DIALECT = Dialect(
    name="textgen",
    title="text-generation-webui",
    rank=5,
    endpoints=(TextEndpoints, InfoEndpoints),
    example=Example("/api/v1/generate", {"prompt": "Hello", "max_new_tokens": 200}),
    format_error=format_error,
    claims=lambda body: not _OWN_FIELDS.isdisjoint(body),
)
