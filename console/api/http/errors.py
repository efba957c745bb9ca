"""Errors of HTTP itself, and OpenAI's shape of errors, the default of dialects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path

import msgspec
from aiohttp import web

from engine.errors import ContextLengthExceeded, EngineError, LoadCancelled

RETRY_AFTER_S = 1.0

MAX_MESSAGE_LENGTH = 1000
"""Characters: a message may quote the request, which may be megabytes."""


class NotAuthorized(EngineError):
    """The key is missing or wrong."""

    code = "invalid_api_key"
    http_status = 401


class Forbidden(EngineError):
    """The request may not come from there, or not without a key."""

    code = "forbidden"
    http_status = 403


class NotFound(EngineError):
    """No such path; details: path."""

    code = "not_found"
    http_status = 404


class DialectOff(NotFound):
    """The path belongs to a dialect that is switched off; details: path, dialect."""

    code = "dialect_off"


class MethodNotAllowed(EngineError):
    """The path has other methods; details: allowed."""

    code = "method_not_allowed"
    http_status = 405


class BodyTooLarge(EngineError):
    """The body is longer than allowed; details: limit_bytes."""

    code = "body_too_large"
    http_status = 413


class UnknownEncoding(EngineError):
    """The body has an unsupported Content-Encoding; details: encodings."""

    code = "unknown_encoding"
    http_status = 415


class UnknownExpectation(EngineError):
    """The Expect header is not supported."""

    code = "unknown_expectation"
    http_status = 417


class BodyTooSlow(EngineError):
    """The body took longer than allowed; details: limit_s."""

    code = "body_too_slow"
    http_status = 408


class HeadersTooLarge(EngineError):
    """The request's line or a header is longer than allowed."""

    code = "headers_too_large"
    http_status = 431


class Misdirected(EngineError):
    """The Host header is no name of this server."""

    code = "misdirected"
    http_status = 421


class BadHttp(EngineError):
    """The request is not valid HTTP."""

    code = "bad_request"
    http_status = 400


class RequestCancelled(EngineError):
    """The request was cancelled on the server's side: by the operator, or because the server stops.

    499 rather than a 5xx: clients repeat those by themselves, which is not what the operator meant.
    """

    code = "request_cancelled"
    http_status = 499


class InternalError(EngineError):
    """An unexpected error; the log has the details."""

    code = "internal_error"
    http_status = 500


class CannotListen(EngineError):
    """The server cannot listen there; details: host, port."""

    code = "cannot_listen"
    http_status = 500


class Unprotected(CannotListen):
    """All who reach the address could send requests without a key; details: host, port."""

    code = "unprotected"
    http_status = 400


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object. param: the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The body of an error."""

    error: ErrorBody


ErrorFormatter = Callable[[EngineError], object]
"""Makes the JSON body of an error, in the shape of a dialect."""


def envelope(error: EngineError) -> ErrorEnvelope:
    """Return the error in OpenAI's shape."""
    param = error.details.get("param")
    return ErrorEnvelope(
        ErrorBody(
            message=_sentence(error)[:MAX_MESSAGE_LENGTH],
            type=_type_of(error),
            param=None if param is None else str(param)[:MAX_MESSAGE_LENGTH],
            code=error.code,
        )
    )


def _sentence(error: EngineError) -> str:
    """Return the error's sentence. About a prompt that is too long it is OpenAI's two, which clients parse."""
    match error.details:
        case {"max_model_len": context, "prompt_tokens": tokens, "limit": limit} if isinstance(
            error, ContextLengthExceeded
        ):
            field, least = error.details.get("param", "prompt"), "at least " if error.details.get("at_least") else ""
            return (
                f"This model's maximum context length is {context} tokens. However, your {field} resulted in "
                f"{least}{tokens} tokens. Input tokens exceed the configured limit of {limit} tokens. "
                f"Please reduce the length of the {field}."
            )
        case _:
            return error.message


def error_response(error: EngineError, format_error: ErrorFormatter = envelope) -> web.Response:
    """Return the error as a response, with Retry-After where a retry may succeed."""
    response = json_response(format_error(error), status=error.http_status)
    if error.http_status in (429, 503):
        delay_s = error.details.get("retry_after_s")
        seconds = delay_s if isinstance(delay_s, int | float) else RETRY_AFTER_S
        response.headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    if error.http_status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        response.headers["Allow"] = str(error.details["allowed"])
    if isinstance(error, UnknownEncoding):
        response.headers["Accept-Encoding"] = str(error.details["encodings"])
    return response


def json_response(body: object, *, status: int = 200) -> web.Response:
    """Return a struct, or any other type of msgspec's, as a JSON response."""
    return web.Response(body=msgspec.json.encode(body, enc_hook=_plain), status=status, content_type="application/json")


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError


def is_server_side(error: EngineError) -> bool:
    """Return whether the server failed, or its operator cancelled the work."""
    return error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR or isinstance(error, RequestCancelled | LoadCancelled)


def _type_of(error: EngineError) -> str:
    match error.http_status:
        case 401 | 403:
            return "authentication_error"
        case 404:
            return "not_found_error"
        case 429:
            return "rate_limit_error"
        case _:
            return "server_error" if is_server_side(error) else "invalid_request_error"


# Fields at fault. An error names one as `param` in its details, and its sentence begins with that name where it speaks
# of the field, so that a dialect can put its own name there.

AS_SENT = "as_sent"
"""The detail of an error whose field is named as the client sent it."""


def localized_message(error: EngineError, field_names: Mapping[str, str]) -> str:
    """Return the error's sentence with the field at fault named in the client's words, cut to MAX_MESSAGE_LENGTH.

    field_names: what the client calls fields, by the names of ours.
    """
    param, message = error.details.get("param"), error.message
    if isinstance(param, str) and AS_SENT not in error.details and message.startswith(f"{param} "):
        message = field_names.get(param, param) + message.removeprefix(param)
    return message[:MAX_MESSAGE_LENGTH]
