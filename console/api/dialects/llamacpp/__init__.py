"""The dialect of llama.cpp's server: its own endpoints, besides the OpenAI ones that it has, too.

It shares /tokenize with dialects whose bodies have a `prompt`, `messages` or `inputs`: a body with `content` is in this
one. Its /detokenize has the body of vLLM's, and is answered there in the words of both.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from console.api.dialects.base import Dialect, Example
from console.api.dialects.llamacpp.completion import CompletionEndpoints
from console.api.dialects.llamacpp.info import InfoEndpoints
from console.api.http.errors import is_server_side, localized_message
from engine.errors import ContextLengthExceeded, EngineError

FIELD_NAMES: Mapping[str, str] = {
    "dry_range": "dry_penalty_last_n",
    "logprobs": "n_probs",
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "repetition_range": "repeat_last_n",
    "temp_exponent": "dynatemp_exponent",
}
"""llama.cpp's names of our fields."""


class ErrorBody(msgspec.Struct, frozen=True):
    """An error. code: the HTTP status.  n_prompt_tokens, n_ctx: where the prompt is too long."""

    code: int
    message: str
    type: str
    n_prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET
    n_ctx: int | msgspec.UnsetType = msgspec.UNSET


class LlamaError(msgspec.Struct, frozen=True):
    """The body of an error."""

    error: ErrorBody


def format_error(error: EngineError) -> LlamaError:
    """Return the error in llama.cpp's shape."""
    body = ErrorBody(error.http_status, localized_message(error, FIELD_NAMES), _type_of(error))
    match error.details:
        case {"prompt_tokens": int(tokens), "max_model_len": int(context)} if isinstance(error, ContextLengthExceeded):
            body = msgspec.structs.replace(
                body, type="exceed_context_size_error", n_prompt_tokens=tokens, n_ctx=context
            )
    return LlamaError(body)


def _type_of(error: EngineError) -> str:
    match error.http_status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 404 | 405:
            return "not_found_error"
        case 429 | 503:
            return "unavailable_error"
        case _:
            return "server_error" if is_server_side(error) else "invalid_request_error"


DIALECT = Dialect(
    name="llamacpp",
    title="llama.cpp",
    rank=8,
    endpoints=(CompletionEndpoints, InfoEndpoints),
    example=Example("/completion", {"prompt": "Hello", "n_predict": 64}),
    format_error=format_error,
    claims=lambda body: "content" in body,
)
