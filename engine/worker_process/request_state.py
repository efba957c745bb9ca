"""One request inside the loop: its text, and the tokens that may still be taken back."""

from __future__ import annotations

import msgspec

from engine.backends.base import BackendRequest, FinishReason, TimeLost, TokenEvent, TokenLogprobs, pack_logprobs
from engine.errors import EngineError, InvalidRequest, WorkerFailed
from engine.text.grammar import unusable
from engine.text.output_processor import OutputProcessor
from engine.text.thinking import TextMask
from engine.text.tokenizer import Tokenizer
from engine.worker_process.protocol import RequestOutput

MAX_TRIES = 64
"""Tokens that may be tried in one place of an answer before its banned strings leave no way on."""

MAX_REWINDS = 1024
"""How often an answer may go back before one of its tokens is settled again."""


class RequestState:
    """A live request. Tokens are sent only once they are settled, with their text: nothing sent is taken back.

    A banned string that is complete makes it `rewinding`: the backend's later events are out of date, and the
    backend is to be given `rewound()` in its place, which continues before the token in which that string began,
    with that token ruled out there. So does a token after which the grammar allows nothing but a banned string; and
    where no token is left in a place, the one before it is ruled out, as long as that was not sent.

    mask: of the grammar, or of thinking with a budget; None without one, or while it is compiled.
    lost: of its time, before the backend had it, and before it was taken back.
    """

    def __init__(self, tokenizer: Tokenizer, request: BackendRequest) -> None:
        self.mask: TextMask | None = None
        self.lost = TimeLost()
        self._tokenizer = tokenizer
        self._request = request
        self._output = OutputProcessor(tokenizer, request)
        self._token_ids = list(request.generated)
        self._unsettled: list[TokenEvent] = []
        self._cached_tokens: int | None = None
        self._prompt_logprobs = b""
        self._begun = False
        self._tried: dict[int, list[int]] = {}
        self._rewind_to: int | None = None
        self._rewinds = 0

    @property
    def id(self) -> str:
        """The request's id."""
        return self._request.id

    @property
    def adapter(self) -> str:
        """The key of its adapter, "" for none."""
        return self._request.adapter

    @property
    def finish(self) -> FinishReason | None:
        """Finish reason of an answer that its replayed tokens end already."""
        return self._output.finish

    @property
    def stop(self) -> str:
        """The stop string among those tokens that ended it, "" for none."""
        return self._output.stop

    @property
    def rewinding(self) -> bool:
        """True if the backend has to resume from an earlier place: see `rewound`."""
        return self._rewind_to is not None

    def time_lost(self, more: TimeLost) -> TimeLost:
        """Return what it lost in all. more: since it was given to the backend."""
        names = self.lost.seconds.keys() | more.seconds.keys()
        seconds = {name: self.lost.seconds.get(name, 0.0) + more.seconds.get(name, 0.0) for name in names}
        return TimeLost(seconds=seconds, behind=more.behind or self.lost.behind)

    def take(self, event: TokenEvent, output: RequestOutput) -> None:
        """Take in one token or end of the backend's. The output processor's end goes before the backend's own, but for
        an answer that its grammar ends with the last token it could have: that one is whole."""
        if self._cached_tokens is None:
            self._cached_tokens = event.cached_tokens
        if event.prompt_logprobs:
            self._note_prompt(event.prompt_logprobs)
        if event.token_id is not None:
            self._take_token(event, event.token_id, output)
        if not self.rewinding and output.finish is None and event.finish is not None:
            if event.finish == "error" and self._ruled_out and self._unsettled:
                self._rewind_to = len(self._token_ids) - 1
                return
            error = self._why_failed(event.message) if event.finish == "error" else None
            self._settle(*self._output.flush(), output)
            output.finish, output.vector = event.finish, event.vector
            if error is not None:
                output.fail(error.info)
        if output.finish == "length" and event.finish == "stop":
            output.finish = "stop"
        if output.finish == "stop":
            output.stop = self._output.stop

    def rewound(self) -> BackendRequest:
        """Return the request to resume with; raises InvalidRequest where every way on was tried."""
        assert self._rewind_to is not None, f"request {self.id} has nothing to take back"
        start, self._rewind_to = self._rewind_to, None
        tried = [*self._tried.get(start, ()), self._token_ids[start]]
        self._rewinds += 1
        if len(tried) >= MAX_TRIES or self._rewinds > MAX_REWINDS:
            raise self._no_way_on(start, f"all {len(tried)} tokens tried there lead into a banned string")
        self._tried = {place: ids for place, ids in self._tried.items() if place < start} | {start: tried}
        del self._unsettled[len(self._unsettled) - (len(self._token_ids) - start) :]
        del self._token_ids[start:]
        request = msgspec.structs.replace(self._request, generated=list(self._token_ids), banned_next=tuple(tried))
        self._output = OutputProcessor(self._tokenizer, request)
        return request

    def _take_token(self, event: TokenEvent, token_id: int, output: RequestOutput) -> None:
        text = self._output.push_plain(token_id) if not self._unsettled else None
        self._unsettled.append(event)
        if text is not None:
            self._settle("", text, output)
            return
        shown = self._output.push(token_id)
        if self._request.params.banned_strings:
            self._token_ids.append(token_id)
        self._rewind_to = shown.banned_from
        if (
            self._rewind_to is None
            and self.mask is not None
            and self._output.ruled_out(self.mask.forced_text(len(self._token_ids)))
        ):
            self._rewind_to = len(self._token_ids) - 1
        elif shown.settled:
            self._settle(shown.thinking, shown.text, output)
            output.finish = shown.finish

    def _settle(self, thinking: str, text: str, output: RequestOutput) -> None:
        """Output every unsettled token, and their thinking and text; with the first ones, how many of the prompt's were
        cached, and the prompt's logprobs."""
        output.text += text
        if self._output.thinking_tokens:
            output.thinking += thinking
            output.thinking_tokens = self._output.thinking_tokens
        for event in self._unsettled:
            if event.token_id is not None:
                output.token_ids.append(event.token_id)
            if event.logprob is not None:
                output.logprobs.append(event.logprob)
        if not self._begun:
            output.cached_tokens, self._begun = self._cached_tokens, bool(output.token_ids)
            if self._prompt_logprobs:
                output.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, b""
        self._unsettled.clear()
        self._tried.clear()
        self._rewinds = 0

    def _note_prompt(self, logprobs: TokenLogprobs) -> None:
        """Keep the logprobs of the prompt for the first output. They are computed once, whatever is taken back."""
        self._prompt_logprobs = pack_logprobs(logprobs)
        params = msgspec.structs.replace(self._request.params, prompt_logprobs=None)
        self._request = msgspec.structs.replace(self._request, params=params)

    @property
    def _ruled_out(self) -> bool:
        """True if some tokens are ruled out next, since they led into a banned string."""
        return len(self._token_ids) in self._tried

    def _why_failed(self, message: str) -> EngineError:
        if self._ruled_out:
            return self._no_way_on(len(self._token_ids), "no other token is allowed there")
        grammar = self._request.params.grammar
        if grammar is not None and self.mask is not None and self.mask.error:
            return unusable(grammar, self.mask.error)
        return WorkerFailed(message or "the backend failed the request")

    def _no_way_on(self, place: int, why: str) -> InvalidRequest:
        """The error of an answer whose banned strings leave it no token at a place."""
        grammar = self._request.params.grammar
        strings = "banned_strings" if grammar is None else f"banned_strings and {grammar.param}"
        return InvalidRequest(f"{strings} allow no token at output position {place + 1}: {why}", param="banned_strings")
