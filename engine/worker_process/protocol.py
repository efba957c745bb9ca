"""Every message between the engine and a worker, and their framing. The only vocabulary the two share.

Frames are a 4-byte big-endian length and a msgpack body, over a stream socket pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.backends.base import (
    BackendRequest,
    BackendStats,
    FinishReason,
    LoadedModel,
    LoadProgress,
    PrefixChanges,
    TimeLost,
    TokenLogprob,
)
from engine.config import AdapterSpec, ModelSpec
from engine.errors import ErrorInfo, WorkerFailed

# --- engine -> worker ---------------------------------------------------------------------------------


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load a model; answered by Progress..., then Loaded or LoadFailed."""

    spec: ModelSpec
    max_prompts: int
    step_tokens: int
    page_tokens: int
    threads: int
    itl_target_s: float | None = None
    adapters: tuple[AdapterSpec, ...] = ()


class CancelLoad(msgspec.Struct, frozen=True, kw_only=True, tag="cancel_load"):
    """Cancel the current load; answered by LoadFailed with code load_cancelled."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Work on this request; answered by outputs in StepBatch until one has `finish`."""

    request: BackendRequest


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Forget a request; no further output of it is sent."""

    request_id: str


class SetMaxPrompts(msgspec.Struct, frozen=True, kw_only=True, tag="set_max_prompts"):
    """Work on this many requests at once from the next step on."""

    max_prompts: int


class SetStepTokens(msgspec.Struct, frozen=True, kw_only=True, tag="set_step_tokens"):
    """Limit the tokens of a step from the next one on."""

    step_tokens: int


class SetItlTarget(msgspec.Struct, frozen=True, kw_only=True, tag="set_itl_target"):
    """Keep this time between tokens from the next step on; None for no target."""

    target_s: float | None


class SetThreads(msgspec.Struct, frozen=True, kw_only=True, tag="set_threads"):
    """Compute with this many CPU threads from the next step on: the cores are shared out again."""

    threads: int


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """Make a LoRA adapter usable; answered by Attached."""

    adapter: AdapterSpec


class Detach(msgspec.Struct, frozen=True, kw_only=True, tag="detach"):
    """Forget a LoRA adapter."""

    key: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Unload and leave; answered by the channel's end."""


Command = (
    Load
    | CancelLoad
    | Submit
    | Cancel
    | SetMaxPrompts
    | SetStepTokens
    | SetItlTarget
    | SetThreads
    | Attach
    | Detach
    | Shutdown
)

# --- worker -> engine ---------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of a worker: it runs and listens."""

    pid: int


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """The load moved on (a few times a second)."""

    progress: LoadProgress


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The model answers requests now."""

    model: LoadedModel
    load_s: float


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag="load_failed"):
    """The load ended with nothing loaded."""

    error: ErrorInfo


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag="attached"):
    """An adapter is usable and takes `size_bytes`, or `error` says why not."""

    key: str
    size_bytes: int = 0
    error: ErrorInfo | None = None


class RequestStarted(msgspec.Struct, frozen=True, kw_only=True, tag="taken"):
    """Work on a request begins. Sent before anything of it happens, which distinguishes a request that brings its
    worker down from one that never reached it."""

    request_id: str


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Output of the steps of a batch for one request; the worker adds to it until it is sent.

    token_ids: new ids (all of them, whether shown or not); text: new visible text, "" while it is held back for a
    stop string or an unfinished character. thinking: the same of what stands before the answer; thinking_tokens: how
    many of all tokens so far are that. A resumed request emits only what comes after its `generated` ids.
    gaps: seconds between tokens as the worker made them, one for each token that has one of this worker's before it.
    stop: the stop string that ended the answer, "" where something else did.
    prompt_logprobs, vector: as in TokenEvent, the former packed.
    lost: of its time on this worker, with its end.
    """

    request_id: str
    token_ids: list[int] = []
    gaps: list[float] = []
    text: str = ""
    thinking: str = ""
    thinking_tokens: int = 0
    logprobs: list[TokenLogprob] = []
    finish: FinishReason | None = None
    stop: str = ""
    error: ErrorInfo | None = None
    cached_tokens: int | None = None
    prompt_logprobs: bytes = b""
    vector: bytes = b""
    lost: TimeLost | None = None

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to send."""
        return not (self.token_ids or self.text or self.thinking) and self.finish is None

    @property
    def is_urgent(self) -> bool:
        """True if a client waits for just this: an answer's first token, or its end."""
        return self.finish is not None or self.cached_tokens is not None

    def fail(self, error: ErrorInfo | str) -> None:
        """End the request with this error, or with WorkerFailed for a sentence."""
        self.finish = "error"
        self.error = WorkerFailed(error).info if isinstance(error, str) else error


class StepBatch(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Outputs of steps, with the gauges after them. Sent after steps, and once a second when idle.

    steps: how many, 0 when idle; several short ones may share a batch.  step_s: mean duration.
    answers: tokens that continued an answer, sent or still delayed; first tokens belong to prompts.
    sent_s: the worker's monotonic clock at sending, 0 if unknown.
    lost: of live requests' time here, about once a second.
    """

    outputs: list[RequestOutput]
    stats: BackendStats
    steps: int = 1
    answers: int = 0
    step_s: float = 0.0
    sent_s: float = 0.0
    rss_bytes: int = 0
    prefix: PrefixChanges = PrefixChanges()
    lost: dict[str, TimeLost] = {}


class WorkerError(msgspec.Struct, frozen=True, kw_only=True, tag="worker_error"):
    """The worker cannot go on (its backend broke and could not be mended); it exits after this."""

    error: ErrorInfo


class LogLine(msgspec.Struct, frozen=True, kw_only=True, tag="log"):
    """One line for the engine's log. level: as in `logging`."""

    level: int
    logger: str
    message: str


Event = Hello | Progress | Loaded | LoadFailed | Attached | RequestStarted | StepBatch | WorkerError | LogLine

_LENGTH_BYTES = 4


def _to_builtin(value: object) -> object:
    from pathlib import Path

    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot cross the worker channel")


def _from_builtin(kind: type, value: object) -> object:
    from pathlib import Path

    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(f"{kind.__name__} cannot cross the worker channel")


class Codec:
    """Encodes messages to frames and decodes bodies; one per end, not thread-safe."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_to_builtin)
        self._commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=_from_builtin)
        self._events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event, dec_hook=_from_builtin)

    def frame(self, message: Command | Event) -> bytes:
        """Encode a message as length and body."""
        body = self._encoder.encode(message)
        return len(body).to_bytes(_LENGTH_BYTES, "big") + body

    def command(self, body: bytes | memoryview) -> Command:
        """Decode the command in a body; raises msgspec.DecodeError."""
        return self._commands.decode(body)

    def event(self, body: bytes | memoryview) -> Event:
        """Decode the event in a body; raises msgspec.DecodeError."""
        return self._events.decode(body)


def split_frames(buffer: bytearray) -> Sequence[bytes]:
    """Take all whole frames' bodies out of `buffer`, leaving an unfinished one in it."""
    bodies: list[bytes] = []
    start = 0
    while len(buffer) - start >= _LENGTH_BYTES:
        end = start + _LENGTH_BYTES + int.from_bytes(buffer[start : start + _LENGTH_BYTES], "big")
        if len(buffer) < end:
            break
        bodies.append(bytes(buffer[start + _LENGTH_BYTES : end]))
        start = end
    del buffer[:start]
    return bodies
