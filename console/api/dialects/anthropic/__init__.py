"""Anthropic's dialect: messages, their tokens, models."""

from __future__ import annotations

from console.api.dialects.anthropic.errors import format_error
from console.api.dialects.anthropic.messages import Messages
from console.api.dialects.anthropic.models import AnthropicModels
from console.api.dialects.base import Dialect, Example

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
