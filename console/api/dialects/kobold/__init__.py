"""The dialect of KoboldAI and KoboldCpp, for SillyTavern and Kobold Lite, and the shape of its errors.

It shares POST /api/v1/generate and GET /api/v1/model with text-generation-webui's: bodies that no other dialect claims
are in this one.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from console.api.dialects.base import Dialect, Example
from console.api.dialects.kobold.generate import GenerateEndpoints
from console.api.dialects.kobold.info import InfoEndpoints
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


DIALECT = Dialect(
    name="kobold",
    title="KoboldAI",
    rank=4,
    endpoints=(GenerateEndpoints, InfoEndpoints),
    example=Example("/api/v1/generate", {"prompt": "Hello"}),
    format_error=format_error,
)
