"""Errors in TGI's shape: a sentence, and a type by which its clients choose the exception that they raise."""

from __future__ import annotations

import msgspec

from console.api.errors import is_server_side
from console.api.naming import told_as
from engine.errors import EngineError

_NAMES = {"max_tokens": "max_new_tokens", "lora": "adapter_id", "n": "best_of", "logprobs": "top_n_tokens"}
"""What TGI's clients call our fields."""


class TgiError(msgspec.Struct, frozen=True):
    """The whole answer. error_type: one of TGI's where it has one for this."""

    error: str
    error_type: str


def tells(error: EngineError) -> TgiError:
    """The error in TGI's shape."""
    return TgiError(told_as(error, _NAMES), _type_of(error))


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
