"""The live requests of one loaded model: their texts, grammars that are being compiled, and the events of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.backends.base import BackendRequest, TimeLost, TokenEvent
from engine.errors import EngineError, InvalidRequest, first_line
from engine.text.grammar import GrammarMasks
from engine.text.thinking import TextMask
from engine.worker_process.loading import Replica
from engine.worker_process.outbox import Outbox
from engine.worker_process.request_state import RequestState

# Requests whose grammars are being compiled on another thread while the loop steps.

PendingMask = Future[TextMask]


@dataclass(slots=True)
class GrammarCompiler:
    """Requests of one model that wait for their masks; the loop does not wait.

    wake: called when a mask is ready, on the thread that compiled it.  clock: seconds, of any origin.
    """

    masks: GrammarMasks
    wake: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    _waiting: dict[str, tuple[BackendRequest, PendingMask, float]] = field(default_factory=dict)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def begin(self, request: BackendRequest) -> None:
        """Start compiling the grammar of a request; `done` yields it then."""
        compiling = self.masks.begin(request)
        self._waiting[request.id] = (request, compiling, self.clock())
        compiling.add_done_callback(lambda _: self.wake())

    def forget(self, request_id: str) -> None:
        """Forget a request."""
        self._waiting.pop(request_id, None)

    def done(self) -> Iterator[tuple[BackendRequest, PendingMask, float]]:
        """Take out the requests that are ready, with the seconds that they waited; each future has the mask, or the
        reason why there is none."""
        for request_id, (request, compiling, began_s) in list(self._waiting.items()):
            if compiling.done():
                del self._waiting[request_id]
                yield request, compiling, self.clock() - began_s


_logger = logging.getLogger(__name__)


class Requests:
    """Every request of the replica from `submit` to its end; all outputs go into `outbox`.

    wake: called, from another thread, when `take_masks` has something to do.  clock: seconds, of any origin.
    """

    def __init__(
        self, replica: Replica, outbox: Outbox, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = replica.backend
        self._tokenizer = replica.tokenizer
        self._outbox = outbox
        self._states: dict[str, RequestState] = {}
        self._compiler = GrammarCompiler(GrammarMasks(replica.tokenizer, replica.model.vocab_size), wake, clock)

    @property
    def adapters(self) -> set[str]:
        """Keys of the adapters in use: any request may have to begin again."""
        return {state.adapter for state in self._states.values()}

    def submit(self, request: BackendRequest) -> None:
        """Start a request, or output why it cannot be."""
        try:
            if request.id in self._states:
                self.forget(request.id)
                raise InvalidRequest(f"a request with the id {request.id} is already being worked on", param="id")
            state = RequestState(self._tokenizer, request)
            if state.finish is not None:
                output = self._outbox.output_of(request.id)
                output.finish, output.stop = state.finish, state.stop
                return
            if not request.params.needs_mask:
                self._backend.submit(request)
            else:
                self._compiler.begin(request)
            self._states[request.id] = state
        except Exception as error:
            self._fail(request.id, error, "starting the request failed")

    def take_masks(self) -> bool:
        """Give the backend the requests whose grammars are compiled; return whether there are any."""
        found = False
        for request, compiling, waited_s in self._compiler.done():
            found = True
            state = self._states[request.id]
            state.lost = TimeLost(seconds={"grammar": waited_s})
            try:
                state.mask = compiling.result()
                self._backend.submit(request, state.mask)
            except Exception as error:
                self._fail(request.id, error, "starting the request failed")
                del self._states[request.id]
        return found

    def forget(self, request_id: str) -> None:
        """Forget a request; nothing more is sent for it."""
        self._outbox.drop(request_id)
        self._compiler.forget(request_id)
        if self._states.pop(request_id, None) is not None:
            self._backend.cancel(request_id)

    def take(self, events: Iterable[TokenEvent]) -> int:
        """Process the events of a step; return how many answers it continued, without those that began in it."""
        continued = 0
        for event in events:
            continued += event.token_id is not None and event.cached_tokens is None
            state = self._states.get(event.request_id)
            if state is None or state.rewinding:
                continue  # past its end, or taken back
            output = self._outbox.output_of(event.request_id)
            try:
                state.take(event, output)
            except Exception as error:
                self._fail(event.request_id, error, "making the answer's text failed")
            if output.finish is not None:
                output.lost = state.time_lost(self._backend.time_lost(state.id))
                del self._states[event.request_id]
                if event.finish is None:
                    self._backend.cancel(event.request_id)
        for state in [state for state in self._states.values() if state.rewinding]:
            self._rewind(state)
        return continued

    def time_lost(self) -> dict[str, TimeLost]:
        """Return what each request lost so far, of those that lost anything."""
        found = {name: state.time_lost(self._backend.time_lost(name)) for name, state in self._states.items()}
        return {name: lost for name, lost in found.items() if lost.seconds}

    def fail(self, why: str) -> None:
        """Fail every request of a step that failed."""
        for request_id in [each for each in self._states if each not in self._compiler]:
            del self._states[request_id]
            self._backend.cancel(request_id)
            self._outbox.output_of(request_id).fail(why)

    def _rewind(self, state: RequestState) -> None:
        """Resume a request before the place where a banned string began; the prefix cache makes that cheap."""
        state.lost = state.time_lost(self._backend.time_lost(state.id))
        self._backend.cancel(state.id)
        self._backend.time_lost(state.id)  # read already
        try:
            request = state.rewound()
            if state.mask is not None:
                state.mask.restart(request.generated)
            self._backend.submit(request, state.mask)
        except Exception as error:
            self._fail(state.id, error, "continuing the request failed")
            del self._states[state.id]

    def _fail(self, request_id: str, error: Exception, what: str) -> None:
        """End a request with an error; an internal one is logged in full."""
        output = self._outbox.output_of(request_id)
        if isinstance(error, EngineError):
            output.fail(error.info)
            return
        _logger.error("request %s: %s", request_id, what, exc_info=error)
        output.fail(f"{what}: {first_line(error)}")
