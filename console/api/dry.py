"""DRY's sequence breakers as clients send them, and the tokens that they stand for."""

from __future__ import annotations

from pydantic_core import from_json

from console.api.served import ServedModel
from engine.errors import InvalidRequest

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
MAX_BREAKERS = 256
MAX_BREAKER_CHARACTERS = 200
_LONGEST_TEXT = 8 * MAX_BREAKERS * MAX_BREAKER_CHARACTERS
"""Characters of breakers as JSON, which may take six for one."""


def breaker_ids(value: object, model: ServedModel) -> tuple[int, ...]:
    """The token of each breaker: the last one of the string after a letter, so that it is the one met within a text.

    value: an array of strings, or one as JSON text, with or without its brackets (as text-generation-webui's clients
    send it); None is DEFAULT_BREAKERS. Raises InvalidRequest.
    """
    strings = list(DEFAULT_BREAKERS) if value is None else _strings(value)
    encoded = model.tokenizer.encode_all([f"a{string}" for string in strings], add_special_tokens=False)
    return tuple(dict.fromkeys(ids[-1] for ids in encoded if ids))


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        value = _from_json(value.strip())
    if not isinstance(value, list) or not all(isinstance(string, str) and string for string in value):
        raise _misshapen()
    if len(value) > MAX_BREAKERS:
        raise InvalidRequest(
            f"dry_sequence_breakers holds {len(value)} strings; it takes up to {MAX_BREAKERS}",
            param="dry_sequence_breakers",
        )
    if max(map(len, value), default=0) > MAX_BREAKER_CHARACTERS:
        raise InvalidRequest(
            f"dry_sequence_breakers holds a string of more than {MAX_BREAKER_CHARACTERS} characters",
            param="dry_sequence_breakers",
        )
    return value


def _from_json(text: str) -> object:
    if len(text) > _LONGEST_TEXT:
        raise InvalidRequest(
            f"dry_sequence_breakers has {len(text)} characters; it may have {_LONGEST_TEXT}",
            param="dry_sequence_breakers",
        )
    try:
        return from_json(text if text.startswith("[") else f"[{text}]", allow_inf_nan=False)
    except ValueError:
        raise _misshapen() from None


def _misshapen() -> InvalidRequest:
    return InvalidRequest(
        "dry_sequence_breakers should be an array of strings, none of them empty, or such an array as JSON text",
        param="dry_sequence_breakers",
    )
