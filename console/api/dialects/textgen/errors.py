"""Errors for clients of text-generation-webui, whose API had no shape for most: OpenAI's, with their field names."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from console.api.http.errors import AS_SENT, ErrorEnvelope, envelope, localized_message
from engine.errors import EngineError

FIELD_NAMES: Mapping[str, str] = {
    "cfg_scale": "guidance_scale",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_length",
    "repetition_range": "repetition_penalty_range",
    "stop": "stopping_strings",
}


def format_error(error: EngineError) -> ErrorEnvelope:
    """Return the error as {"error": {"message": ...}}."""
    body = envelope(error).error
    param = body.param
    if param is not None and not error.details.get(AS_SENT):
        param = FIELD_NAMES.get(param, param)
    message = localized_message(error, FIELD_NAMES)
    return ErrorEnvelope(msgspec.structs.replace(body, message=message, param=param))
