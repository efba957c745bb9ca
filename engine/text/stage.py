"""The text side of one request inside a worker: ids in; visible text and the reason to end out."""

from __future__ import annotations

import msgspec

from engine.backends.base import BackendRequest, FinishReason
from engine.text.banned import BannedStrings
from engine.text.detokenizer import IncrementalDetokenizer, begins_text
from engine.text.stops import StopMatcher
from engine.text.tokenizer import Tokenizer


class TextOutput(msgspec.Struct, frozen=True):
    """What one token brought: text that is visible now, and why the answer ends with it, if it does.

    settled: whether this token and all before it stay. Tokens that are not settled bring no text: it comes with the
    one that settles them.  banned_from: number (from 0) of the token in which a banned string begins, complete now;
    the answer must go another way from there, and this stage is of no more use.
    """

    text: str = ""
    finish: FinishReason | None = None
    settled: bool = True
    banned_from: int | None = None


class TextStage:
    """Detokenises one answer, ends it at end tokens, stop strings and max_tokens, and holds nothing back then.

    An end token makes no text. Before min_tokens an end token neither ends the answer nor is shown (backends mask it,
    so it should not come), and text is not searched for stop strings: they are looked for from token number
    min_tokens on, and in JSON that the answer is held to nowhere. What is emitted depends on the ids alone, so a
    request that lost its worker goes on seamlessly: `request.generated` is replayed silently, and what had been held
    back is held back again.

    Where strings are banned, tokens settle only when none of those has begun: only then can nothing that was emitted
    become part of one, whatever comes after tokens have been taken back.
    """

    def __init__(self, tokenizer: Tokenizer, request: BackendRequest) -> None:
        params = request.params
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown=params.shown_token_ids,
            begins=begins_text(tokenizer, request.prompt_ids, params, continues=request.continues),
        )
        stops = () if params.grammar is not None and params.grammar.is_json else params.stop
        self._stops = StopMatcher(stops, params.include_stop)
        self._banned = BannedStrings(params.banned_strings) if params.banned_strings else None
        self._end_token_ids = frozenset(request.end_token_ids)
        self._min_tokens = params.min_tokens
        self._max_tokens = params.max_tokens
        self._tokens = 0
        self._character_from = 0
        self._banned_from: int | None = None
        self._withheld = 0
        self._unsettled = ""
        self._finish: FinishReason | None = None
        self._can_stop = bool(stops)
        self._plain = not stops and not params.banned_strings
        for token_id in request.generated:
            self.push(token_id)

    @property
    def stop(self) -> str:
        """The stop string that ended the answer, "" where none did."""
        return self._stops.found

    @property
    def finish(self) -> FinishReason | None:
        """Why the answer ended, None while it goes on (set after the constructor if the replayed ids end it)."""
        return self._finish

    def pass_on(self, token_id: int) -> str | None:
        """The text of the next token where nothing in it can end the answer or be held back for a string, which is
        how nearly all are; else None, and `push` is to be asked."""
        tokens = self._tokens + 1
        if (
            not self._plain
            or self._finish is not None
            or token_id in self._end_token_ids
            or (self._max_tokens is not None and tokens >= self._max_tokens)
        ):
            return None
        self._tokens = tokens
        return self._detokenizer.push(token_id)

    def push(self, token_id: int) -> TextOutput:
        """Take the next token; after the end, nothing changes any more."""
        if self._finish is not None:
            return TextOutput(finish=self._finish)
        if self._banned is not None and not self._detokenizer.unfinished:
            self._character_from = self._tokens
        self._tokens += 1
        if token_id not in self._end_token_ids:
            text, stopped = self._visible(self._detokenizer.push(token_id))
        else:
            text, stopped = "", self._tokens > self._min_tokens
        finish = self._why_ended(stopped)
        if finish is not None:
            text += self._rest()
            finish = "stop" if self.stop else finish
        if self._banned_from is not None:
            return TextOutput(settled=False, banned_from=self._banned_from)
        self._finish = finish
        self._unsettled += text
        if finish is None and not self._settles():
            return TextOutput(settled=False)
        text, self._unsettled = self._unsettled, ""
        return TextOutput(text, finish)

    def ruled_out(self, forced: bytes) -> bool:
        """Return whether these bytes, the only ones that may come next, would make a banned string complete."""
        if self._banned is None or self._can_stop or self._finish is not None:
            return False
        return self._banned.completes(self._detokenizer.ahead(forced))

    def flush(self) -> str:
        """All text still held back, for an answer that its backend had to end here."""
        text, self._unsettled = self._unsettled, ""
        rest = self._rest()
        return text if self._banned_from is not None else text + rest

    def _why_ended(self, stopped: bool) -> FinishReason | None:
        if stopped:
            return "stop"
        return "length" if self._max_tokens is not None and self._tokens >= self._max_tokens else None

    def _settles(self) -> bool:
        return self._banned is None or (self._banned.clear and not self._detokenizer.unfinished)

    def _rest(self) -> str:
        """What detokenizer and stop matcher hold back."""
        text, _ = self._visible(self._detokenizer.flush())
        return text + self._stops.flush()

    def _visible(self, raw: str) -> tuple[str, bool]:
        text, stopped = self._stops.push(raw) if self._tokens >= self._min_tokens else (raw, False)
        if self._banned is not None:
            self._watch(raw, text, stopped)
        return text, stopped

    def _watch(self, raw: str, text: str, stopped: bool) -> None:
        """Look for banned strings in what came, `raw`; after a stop string, in what of it became visible, `text`."""
        assert self._banned is not None
        shown = max(0, len(text) - self._withheld) if stopped else len(raw)
        self._withheld += len(raw) - len(text)
        if self._banned_from is None:
            self._banned_from = self._banned.push(raw[:shown], self._character_from)
