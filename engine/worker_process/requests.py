"""The live requests of one loaded model: their texts, what is still compiled for them, and what a step brought."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.backends.base import BackendRequest, TokenEvent
from engine.errors import EngineError, InvalidRequest
from engine.text.grammar import GrammarMask, GrammarMasks
from engine.worker_process.loading import Replica, reason
from engine.worker_process.outbox import Outbox
from engine.worker_process.request_state import RequestState

# Requests whose grammars are being compiled, beside the loop that steps.

PendingMask = Future[GrammarMask]


@dataclass(slots=True)
class GrammarCompiler:
    """Those of one model that wait for their masks. Only what is computed waits, never the loop.

    wake: called when one need not wait any longer, from the thread that compiled it.
    """

    masks: GrammarMasks
    wake: Callable[[], None]
    _waiting: dict[str, tuple[BackendRequest, PendingMask]] = field(default_factory=dict)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def begin(self, request: BackendRequest) -> None:
        """Take a request that has a grammar; it comes out of `done`."""
        compiling = self.masks.begin(request)
        self._waiting[request.id] = (request, compiling)
        compiling.add_done_callback(lambda _: self.wake())

    def forget(self, request_id: str) -> None:
        """It is not wanted any more."""
        self._waiting.pop(request_id, None)

    def done(self) -> Iterator[tuple[BackendRequest, PendingMask]]:
        """Take out those that need not wait any longer; a mask, or why there is none, is in each one's future."""
        for request_id, (request, compiling) in list(self._waiting.items()):
            if compiling.done():
                del self._waiting[request_id]
                yield request, compiling


_logger = logging.getLogger(__name__)


class Requests:
    """Every request of the replica from `submit` to its end, which goes into `outbox` as all the rest does.

    wake: called, from another thread, when `take_masks` has something to do.
    """

    def __init__(self, replica: Replica, outbox: Outbox, wake: Callable[[], None]) -> None:
        self._backend = replica.backend
        self._tokenizer = replica.tokenizer
        self._outbox = outbox
        self._answers: dict[str, RequestState] = {}
        self._masking = GrammarCompiler(GrammarMasks(replica.tokenizer, replica.model.vocab_size), wake)

    @property
    def adapters(self) -> set[str]:
        """The keys of the adapters that they use: any of them may have to begin again somewhere."""
        return {answer.adapter for answer in self._answers.values()}

    def submit(self, request: BackendRequest) -> None:
        """Begin with a request, or tell why not."""
        try:
            if request.id in self._answers:
                self.forget(request.id)
                raise InvalidRequest(f"a request with the id {request.id} is already being worked on", param="id")
            answer = RequestState(self._tokenizer, request)
            if answer.finish is not None:
                output = self._outbox.of(request.id)
                output.finish, output.stop = answer.finish, answer.stop
                return
            if request.params.grammar is None:
                self._backend.submit(request)
            else:
                self._masking.begin(request)
            self._answers[request.id] = answer
        except Exception as error:
            self._fail(request.id, error, "the request could not be taken")

    def take_masks(self) -> None:
        """Give the backend the requests whose grammars are compiled."""
        for request, compiling in self._masking.done():
            answer = self._answers[request.id]
            try:
                answer.mask = compiling.result()
                self._backend.submit(request, answer.mask)
            except Exception as error:
                self._fail(request.id, error, "the request could not be taken")
                del self._answers[request.id]

    def forget(self, request_id: str) -> None:
        """It is not wanted any more; nothing is told of it."""
        self._outbox.drop(request_id)
        self._masking.forget(request_id)
        if self._answers.pop(request_id, None) is not None:
            self._backend.cancel(request_id)

    def take(self, events: Iterable[TokenEvent]) -> int:
        """Take in what a step brought; how many answers it went on with, those that began in it left out."""
        went_on = 0
        for event in events:
            went_on += event.token_id is not None and event.cached_tokens is None
            self._apply(event)
        for answer in [answer for answer in self._answers.values() if answer.rewinding]:
            self._rewind(answer)
        return went_on

    def fail(self, why: str) -> None:
        """A step failed, and everybody who was in it with it."""
        for request_id in [each for each in self._answers if each not in self._masking]:
            del self._answers[request_id]
            self._backend.cancel(request_id)
            self._outbox.of(request_id).fail(why)

    def _apply(self, event: TokenEvent) -> None:
        """One token through its request's output processor; tokens past a request's end, or taken back, are dropped."""
        answer = self._answers.get(event.request_id)
        if answer is None or answer.rewinding:
            return
        output = self._outbox.of(event.request_id)
        try:
            answer.take(event, output)
        except Exception as error:
            self._fail(event.request_id, error, "the answer's text could not be made")
        if output.finish is not None:
            del self._answers[event.request_id]
            if event.finish is None:
                self._backend.cancel(event.request_id)

    def _rewind(self, answer: RequestState) -> None:
        """Have the backend go another way from where a banned string began; the prefix cache makes that cheap."""
        self._backend.cancel(answer.id)
        try:
            request = answer.rewound()
            if answer.mask is not None:
                answer.mask.restart(request.generated)
            self._backend.submit(request, answer.mask)
        except Exception as error:
            self._fail(answer.id, error, "the request could not go on")
            del self._answers[answer.id]

    def _fail(self, request_id: str, error: Exception, what: str) -> None:
        """End a request with an error; one that is nobody's fault but ours is logged in full."""
        output = self._outbox.of(request_id)
        if isinstance(error, EngineError):
            output.fail(error.info)
            return
        _logger.error("request %s: %s", request_id, what, exc_info=error)
        output.fail(f"{what}: {reason(error)}")
