"""Errors in KoboldCpp's shape."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from console.api.http.errors import is_server_side, localized_message
from engine.errors import EngineError

FIELD_NAMES: Mapping[str, str] = {
    "dry_range": "dry_penalty_last_n",
    "max_tokens": "max_length",
    "repetition_penalty": "rep_pen",
    "repetition_range": "rep_pen_range",
    "seed": "sampler_seed",
    "stop": "stop_sequence",
    "typical_p": "typical",
}


class Detail(msgspec.Struct, frozen=True):
    """Sentence and kind of an error."""

    msg: str
    type: str


class KoboldError(msgspec.Struct, frozen=True):
    """The body of an error."""

    detail: Detail


def format_error(error: EngineError) -> KoboldError:
    """Return the error in KoboldCpp's shape."""
    return KoboldError(Detail(localized_message(error, FIELD_NAMES), _type_of(error)))


def _type_of(error: EngineError) -> str:
    match error.http_status:
        case 401 | 403:
            return "unauthorized"
        case 404 | 405:
            return "not_found"
        case 429 | 503:
            return "service_unavailable"
        case _:
            return "server_error" if is_server_side(error) else "bad_input"
