"""Which parameters are brought to what there is room for, or to what means the same here, and how.

A client that sends one is not refused; /openapi.json and docs/api/parameters.md say what becomes of it.
"""

from __future__ import annotations

from collections.abc import Mapping

_ROOM = "to the room that the prompt leaves in the context"
_NO_DEFAULT_LENGTH = f"{_ROOM}; left out, it is that, or --max-output-len"
_DEFAULT_TO_LIMIT = "its default to --max-output-len"
_DEFAULT_LENGTH = f"{_ROOM}; {_DEFAULT_TO_LIMIT}, too"
_CONTEXT = "to the context that the model was loaded with"
_OFF = "-1 is 0, which is off"
_EVERYTHING = "-1 is 0, which is everything"

SAMPLING_CLAMPED: Mapping[str, str] = {
    "dry_range": _EVERYTHING,
    "dynatemp_range": "the lower end to 0",
    "min_tokens": _ROOM,
    "repetition_range": _EVERYTHING,
    "top_k": _OFF,
}

COMPLETION_CLAMPED: Mapping[str, str] = {**SAMPLING_CLAMPED, "max_tokens": _DEFAULT_LENGTH}

CHAT_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "max_completion_tokens": _NO_DEFAULT_LENGTH,
    "max_tokens": _NO_DEFAULT_LENGTH,
}

GENERATE_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "max_tokens": _DEFAULT_LENGTH,
    "top_a": "1 is 0, which is off",
}

TGI_CLAMPED: Mapping[str, str] = {
    "max_new_tokens": _NO_DEFAULT_LENGTH,
    "seed": "the upper half of its 64 bits to the lower",
}

KOBOLD_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "max_context_length": _CONTEXT,
    "max_length": _DEFAULT_TO_LIMIT,
    "prompt": "to its end, where it is too long",
}

TEXTGEN_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "max_new_tokens": _DEFAULT_TO_LIMIT,
    "prompt": "to its end, where it is too long",
    "truncation_length": _CONTEXT,
}

ANTHROPIC_CLAMPED: Mapping[str, str] = {**SAMPLING_CLAMPED, "max_tokens": _ROOM}

OLLAMA_OPTIONS_CLAMPED: Mapping[str, str] = {
    **SAMPLING_CLAMPED,
    "num_ctx": _CONTEXT,
    "num_predict": _NO_DEFAULT_LENGTH,
}

OLLAMA_EMBED_CLAMPED: Mapping[str, str] = {"input": "to its beginning, where it is too long and truncate is not false"}
OLLAMA_EMBEDDINGS_CLAMPED: Mapping[str, str] = {"prompt": "to its beginning, where it is too long"}
