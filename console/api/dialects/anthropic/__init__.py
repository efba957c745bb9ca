"""Anthropic's dialect: messages, their tokens, models; the shape of its errors."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from console.api.dialects.anthropic.messages import Messages
from console.api.dialects.anthropic.models import AnthropicModels
from console.api.dialects.base import Dialect, Example
from console.api.http.errors import MAX_MESSAGE_LENGTH, is_server_side, localized_message
from engine.errors import ContextLengthExceeded, EngineError

FIELD_NAMES: Mapping[str, str] = {"stop": "stop_sequences"}
"""Anthropic's names of our fields."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """Kind and sentence of an error."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, tag="error", tag_field="type"):
    """The body of an error, and the error event of a stream."""

    error: AnthropicErrorBody
    request_id: str = ""


def format_error(error: EngineError) -> AnthropicError:
    """Return the error in Anthropic's shape."""
    otherwise = "api_error" if is_server_side(error) else "invalid_request_error"
    kind = _TYPES.get(error.http_status, otherwise)
    body = AnthropicErrorBody(kind, _sentence(error)[:MAX_MESSAGE_LENGTH])
    return AnthropicError(body, request_id=str(error.details.get("request_id", "")))


def _sentence(error: EngineError) -> str:
    """Return the error's sentence. About a prompt that is too long it begins as Anthropic's, which clients parse."""
    match error.details:
        case {"prompt_tokens": tokens, "limit": limit} if isinstance(error, ContextLengthExceeded):
            least = f" (at least {tokens}, estimated from its length)" if error.details.get("at_least") else ""
            return f"prompt is too long: {tokens} tokens > {limit} maximum{least}"
        case _:
            return localized_message(error, FIELD_NAMES)


DIALECT = Dialect(
    name="anthropic",
    title="Anthropic",
    rank=6,
    endpoints=(Messages, AnthropicModels),
    example=Example("/v1/messages", {"max_tokens": 256, "messages": [{"role": "user", "content": "Hello"}]}),
    format_error=format_error,
    header="anthropic-version",
    root="/v1/messages",
    request_id_header="request-id",
    cors_headers=("anthropic-beta",),
)
