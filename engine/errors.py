"""Errors of the engine: values with a code, one sentence, the numbers behind it and the HTTP status it maps to.

They cross the worker's channel as `ErrorInfo` and become exceptions again on the other side.
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

Detail = str | int | float | bool | None

_MAX_RETRY_AFTER_S = 60


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error as plain data: what travels between processes and sits in snapshots."""

    code: str
    message: str
    details: dict[str, Detail] = {}


class EngineError(Exception):
    """Base of every error a user may see.

    `message` is one sentence for a person; `details` carries its numbers by name; `code` is stable for programs.
    """

    code: ClassVar[str] = "engine_error"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, **details: Detail) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    @property
    def info(self) -> ErrorInfo:
        """The error as data."""
        return ErrorInfo(code=self.code, message=self.message, details=dict(self.details))


class InvalidRequest(EngineError):
    """A request or setting has a bad value; `details["param"]` names the field."""

    code = "invalid_request"
    http_status = 400


class ContextLengthExceeded(InvalidRequest):
    """The prompt cannot fit.

    details: prompt_tokens, or the fewest that they can be, with `at_least` true; limit: most tokens that a prompt may
    have; max_model_len: most tokens of prompt and answer together; max_tokens: asked for, absent where that is open.
    """

    code = "context_length_exceeded"


class ModelNotFound(EngineError):
    """No model of that name is loaded or on disk; details: model, available."""

    code = "model_not_found"
    http_status = 404


class WorkerNotFound(InvalidRequest):
    """There is no worker of that id; details: param, value."""

    http_status = 404


class RequestNotFound(EngineError):
    """Nothing is known of a request of that id (any more)."""

    code = "request_not_found"
    http_status = 404


class QueueFull(EngineError):
    """The queue holds as many requests as it may; details: queued, limit, retry_after_s, expected_wait_s where that is
    foreseen."""

    code = "queue_full"
    http_status = 429

    @classmethod
    def with_wait(cls, sentence: str, wait_s: float | None, *, retry_s: float, queued: int, limit: int) -> QueueFull:
        """Return the error whose sentence ends with the expected wait. wait_s: None where it is unknown; the client is
        to come back after `retry_s` then."""
        expected = "try again later" if wait_s is None else f"the expected wait is {max(1, math.ceil(wait_s))} s"
        return cls(
            f"{sentence}; {expected}",
            queued=queued,
            limit=limit,
            retry_after_s=min(_MAX_RETRY_AFTER_S, max(1, math.ceil(retry_s if wait_s is None else wait_s))),
            **({} if wait_s is None else {"expected_wait_s": round(wait_s, 1)}),
        )


class NoModelLoaded(EngineError):
    """Nothing is loaded, or the model is not ready yet; details: state, retry_after_s."""

    code = "no_model_loaded"
    http_status = 503


class Draining(EngineError):
    """An operator has the engine finish what it has and take no new requests; details: retry_after_s.

    A drain lasts minutes, so a client that can go elsewhere should.
    """

    code = "draining"
    http_status = 503

    def __init__(self, message: str, **details: Detail) -> None:
        super().__init__(message, **{"retry_after_s": 30, **details})


class EngineClosed(EngineError):
    """The engine is shutting down."""

    code = "engine_closed"
    http_status = 503


class EngineBusy(EngineError):
    """The engine is in a state in which the command makes no sense (a load while one runs, say)."""

    code = "engine_busy"
    http_status = 409


class RequestTimeout(EngineError):
    """The request did not finish within its deadline; details: timeout_s, output_tokens."""

    code = "request_timeout"
    http_status = 504


class ModelLoadFailed(EngineError):
    """The model could not be loaded; the message says why."""

    code = "model_load_failed"
    http_status = 500


class UnsupportedModel(ModelLoadFailed):
    """The folder is no model that the backend knows; the message lists what it does know."""

    code = "unsupported_model"
    http_status = 400


class UnsafeWeights(ModelLoadFailed):
    """The weights are pickles, which can run code when read; only safetensors are accepted."""

    code = "unsafe_weights"
    http_status = 400


class BackendUnavailable(ModelLoadFailed):
    """The backend that was asked for cannot run on this machine; the message says what it lacks."""

    code = "backend_unavailable"
    http_status = 400


class InsufficientMemory(ModelLoadFailed):
    """It does not fit; details: device, needed_bytes, free_bytes, short_bytes."""

    code = "insufficient_memory"
    http_status = 507


class LoadCancelled(ModelLoadFailed):
    """The load was cancelled on request."""

    code = "load_cancelled"
    http_status = 409


class WorkerFailed(EngineError):
    """A worker died or reported an error it cannot recover from; details: worker."""

    code = "worker_failed"
    http_status = 500


class NodeGone(WorkerFailed):
    """The machine that a worker was to run on is not there: place the worker again; details: node."""

    code = "node_gone"


class NodeFull(WorkerFailed):
    """Others have reserved what a worker was to run on: place it again, or wait; details: node."""

    code = "node_full"


class ClusterUnavailable(EngineError):
    """The cluster cannot be joined, or is out of reach; the message says why; details: address."""

    code = "cluster_unavailable"
    http_status = 503


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without its full stop; its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


def _family(base: type[EngineError]) -> dict[str, type[EngineError]]:
    found: dict[str, type[EngineError]] = {}
    for child in base.__subclasses__():
        found.update(_family(child))
    return found | {base.code: base}  # over a subclass that has no code of its own


def from_info(info: ErrorInfo) -> EngineError:
    """The exception that `info` describes; an unknown code becomes a plain EngineError with that message."""
    return _family(EngineError).get(info.code, EngineError)(info.message, **info.details)
