"""RequestStream: the reader's end of a request. A slow reader gets merged deltas and never holds a worker up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from engine.backends.base import FinishReason, TokenLogprob
from engine.errors import ErrorInfo
from engine.requests.causes import TimeLedger
from engine.requests.history import WorkerSpan
from engine.snapshot import RequestRow


class PromptProgress(msgspec.Struct, frozen=True):
    """How far a prompt is computed. cached_tokens: those of computed_tokens that were in the prefix cache.
    elapsed_s: since a worker took it."""

    total_tokens: int
    cached_tokens: int
    computed_tokens: int
    elapsed_s: float


class StreamDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Everything new since the delta before.

    token_ids: every new id, shown or not; logprobs: one per id where asked for.  gaps: seconds between tokens, one for
    each that has one before it.  text may be "" while it is held back for a stop string or an unfinished character.
    thinking: as text, of what stands before the answer.  output_tokens: all so far, thinking_tokens among them.
    finish is set on the last delta only; error says why where finish is "error"; stop is the stop string that ended the
    answer, "" where something else did.
    prompt_logprobs: as in TokenEvent but packed, in one delta at most.  vector: of a request to embed, in the last one.
    prompt_progress: where the request reports it, until its first token; a delta may have nothing else.
    """

    text: str = ""
    thinking: str = ""
    token_ids: list[int] = []
    gaps: list[float] = []
    logprobs: list[TokenLogprob] = []
    finish: FinishReason | None = None
    stop: str = ""
    error: ErrorInfo | None = None
    output_tokens: int = 0
    thinking_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float | None = None
    prompt_logprobs: bytes = b""
    vector: bytes = b""
    prompt_progress: PromptProgress | None = None

    @property
    def is_progress_alone(self) -> bool:
        """True if it has nothing but how far the prompt is."""
        return self.prompt_progress is not None and not self.output_tokens and self.finish is None


class RequestStream:
    """An async iterator of deltas, for one reader on the engine's loop. The last one has `finish` set.

    Leave it early through `aclose()`, `cancel()` or `async with`: the worker stops computing at once.
    row, stays, ledger: its line in the request table, its times on workers and what its time went into, once it has
    ended.
    """

    __slots__ = (
        "_cached_tokens",
        "_ended",
        "_error",
        "_finish",
        "_gaps",
        "_logprobs",
        "_news",
        "_on_cancel",
        "_on_read",
        "_output_tokens",
        "_prompt_logprobs",
        "_prompt_progress",
        "_stop",
        "_text",
        "_thinking",
        "_thinking_tokens",
        "_token_ids",
        "_ttft_s",
        "_vector",
        "_waiter",
        "ledger",
        "prompt_tokens",
        "request_id",
        "row",
        "stays",
    )

    def __init__(self, request_id: str, prompt_tokens: int, on_cancel: Callable[[], object]) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.row: RequestRow | None = None
        self.stays: tuple[WorkerSpan, ...] = ()
        self.ledger: TimeLedger | None = None
        self._on_cancel = on_cancel
        self._on_read: Callable[[], object] | None = None
        self._text: list[str] = []
        self._thinking = ""
        self._thinking_tokens = 0
        self._token_ids: list[int] = []
        self._gaps: list[float] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs = b""
        self._prompt_progress: PromptProgress | None = None
        self._vector = b""
        self._output_tokens = 0
        self._cached_tokens = 0
        self._ttft_s: float | None = None
        self._finish: FinishReason | None = None
        self._stop = ""
        self._error: ErrorInfo | None = None
        self._ended = False
        self._news = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamDelta:
        """All that came since the last call, waiting while that is nothing."""
        if self._ended:
            raise StopAsyncIteration
        while not self._news:
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                if self._waiter is waiter:
                    self._waiter = None
        self._news = False
        self._ended = self._finish is not None
        if self._ended:
            self.read_to_end()
        delta = StreamDelta(
            text="".join(self._text),
            thinking=self._thinking,
            token_ids=self._token_ids,
            gaps=self._gaps,
            logprobs=self._logprobs,
            finish=self._finish,
            stop=self._stop,
            error=self._error,
            output_tokens=self._output_tokens,
            thinking_tokens=self._thinking_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self._cached_tokens,
            ttft_s=self._ttft_s,
            prompt_logprobs=self._prompt_logprobs,
            vector=self._vector,
            prompt_progress=self._prompt_progress,
        )
        self._text, self._token_ids, self._gaps, self._logprobs = [], [], [], []
        self._thinking, self._prompt_logprobs, self._prompt_progress = "", b"", None
        return delta

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def finished(self) -> bool:
        """True if the request has ended, read to its end or not."""
        return self._finish is not None

    def read_to_end(self) -> None:
        """Note that its client has the end now; called again where it turns out that it has it only then."""
        if self._on_read is not None:
            self._on_read()

    def cancel(self) -> None:
        """End the request with finish "cancelled", unless it has ended; deltas so far can still be read."""
        if not self.finished:
            self._on_cancel()

    async def aclose(self) -> None:
        """Cancel if unfinished and stop reading. Idempotent."""
        self.cancel()
        self._ended = True
        self._wake()

    # -- the engine's end ---------------------------------------------------------------------------------------

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        *,
        gaps: Sequence[float] = (),
        cached_tokens: int,
        ttft_s: float | None,
        stop: str = "",
        thinking: str = "",
        thinking_tokens: int = 0,
    ) -> None:
        """Add to the next delta."""
        if text:
            self._text.append(text)
        if thinking_tokens:
            self._thinking += thinking
            self._thinking_tokens = thinking_tokens
        self._token_ids.extend(token_ids)
        self._gaps.extend(gaps)
        if logprobs:
            self._logprobs.extend(logprobs)
        self._output_tokens += len(token_ids)
        self._cached_tokens = cached_tokens
        self._ttft_s = ttft_s
        self._stop = stop
        self._wake()

    def set_prompt_results(self, prompt_logprobs: bytes, vector: bytes) -> None:
        """Put results of the prompt into the next delta, which something else makes ready."""
        self._prompt_logprobs, self._vector = prompt_logprobs, vector

    def set_prompt_progress(self, progress: PromptProgress) -> None:
        """Put how far the prompt is into the next delta, the last report of several."""
        self._prompt_progress = progress
        self._wake()

    def end(
        self,
        finish: FinishReason,
        error: ErrorInfo | None = None,
        row: RequestRow | None = None,
        stays: tuple[WorkerSpan, ...] = (),
        on_read: Callable[[], object] | None = None,
        ledger: TimeLedger | None = None,
    ) -> None:
        """Make the next delta the last. on_read: called when its client has it."""
        self.row, self.stays, self._on_read, self.ledger = row, stays, on_read, ledger
        self._finish = finish
        self._error = error
        self._wake()

    def _wake(self) -> None:
        """There is news. What asyncio.Event would do for many readers, in a sixth of its memory for the one."""
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
