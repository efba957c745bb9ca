"""The text side of one request inside a worker: ids in; visible text and the reason to end out."""

from __future__ import annotations

import msgspec

from engine.backends.base import BackendRequest, FinishReason
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stops import StopMatcher
from engine.text.tokenizer import Tokenizer


class TextOutput(msgspec.Struct, frozen=True):
    """What one token brought: text that is visible now, and why the answer ends with it, if it does."""

    text: str = ""
    finish: FinishReason | None = None


class TextStage:
    """Detokenises one answer, ends it at end tokens, stop strings and max_tokens, and holds nothing back then.

    An end token makes no text. Before min_tokens an end token neither ends the answer nor is shown (backends mask
    it, so it should not come), and text is not searched for stop strings: they are looked for from token number
    min_tokens on. What is emitted depends on the ids alone, so a request that lost its worker goes on seamlessly:
    `request.generated` is replayed silently, and what had been held back is held back again.
    """

    def __init__(self, tokenizer: Tokenizer, request: BackendRequest) -> None:
        params = request.params
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, params.include_stop)
        self._end_token_ids = frozenset(request.end_token_ids)
        self._min_tokens = params.min_tokens
        self._max_tokens = params.max_tokens
        self._tokens = 0
        self._finish: FinishReason | None = None
        for token_id in request.generated:
            self.push(token_id)

    @property
    def finish(self) -> FinishReason | None:
        """Why the answer ended, None while it goes on (set after the constructor if the replayed ids end it)."""
        return self._finish

    def push(self, token_id: int) -> TextOutput:
        """Take the next token; after the end, nothing changes any more."""
        if self._finish is not None:
            return TextOutput(finish=self._finish)
        self._tokens += 1
        if token_id not in self._end_token_ids:
            text, stopped = self._visible(self._detokenizer.push(token_id))
        else:
            text, stopped = "", self._tokens > self._min_tokens
        if stopped:
            self._finish = "stop"
        elif self._max_tokens is not None and self._tokens >= self._max_tokens:
            self._finish = "length"
        if self._finish is not None:
            text += self.flush()
        return TextOutput(text, self._finish)

    def flush(self) -> str:
        """All text still held back, for an answer that ends here (also one that its backend had to end)."""
        text, _ = self._visible(self._detokenizer.flush())
        return text + self._stops.flush()

    def _visible(self, text: str) -> tuple[str, bool]:
        return self._stops.push(text) if self._tokens >= self._min_tokens else (text, False)
