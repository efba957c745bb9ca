"""The dialect of Hugging Face's text-generation-inference, for its clients and huggingface_hub's.

Its errors have a sentence, and a type by which its clients choose the exception that they raise.

It shares /generate and /tokenize with dialects whose bodies have a `prompt`: a body with `inputs` is in this one.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from console.api.dialects.base import Dialect, Example
from console.api.dialects.tgi.generate import GenerateEndpoints, InfoEndpoints
from console.api.http.errors import MAX_MESSAGE_LENGTH, is_server_side, localized_message
from engine.errors import ContextLengthExceeded, EngineError

FIELD_NAMES: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "lora": "adapter_id",
    "n": "best_of",
    "logprobs": "top_n_tokens",
}
"""TGI's names of our fields."""


class TgiError(msgspec.Struct, frozen=True):
    """The body of an error. error_type: TGI's, where it has one for the error."""

    error: str
    error_type: str


def format_error(error: EngineError) -> TgiError:
    """Return the error in TGI's shape."""
    return TgiError(_sentence(error)[:MAX_MESSAGE_LENGTH], _type_of(error))


def _sentence(error: EngineError) -> str:
    """Return the error's sentence. About a prompt that is too long it is TGI's own, which clients parse."""
    match error.details:
        case {"max_model_len": int(context), "prompt_tokens": tokens, "limit": int(limit)} if isinstance(
            error, ContextLengthExceeded
        ):
            count = f"{'at least ' if error.details.get('at_least') else ''}{tokens}"
            if limit < context - 1:
                return f"Input validation error: `inputs` must have less than {limit + 1} tokens. Given: {count}"
            return (
                f"Input validation error: `inputs` tokens + `max_new_tokens` must be <= {context}. "
                f"Given: {count} `inputs` tokens and {error.details.get('max_tokens', 1)} `max_new_tokens`"
            )
        case _:
            return localized_message(error, FIELD_NAMES)


def _type_of(error: EngineError) -> str:
    match error.http_status:
        case 401 | 403:
            return "authentication"
        case 404 | 405:
            return "not_found"
        case 429 | 503:
            return "overloaded"
        case 499 | 504:
            return "incomplete_generation"
        case _:
            return "generation" if is_server_side(error) else "validation"


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
