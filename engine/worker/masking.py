"""Requests whose grammars are being compiled, beside the loop that steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.backends.base import BackendRequest
from engine.text.masks import GrammarMask, GrammarMasks

Compiling = Future[GrammarMask]


@dataclass(slots=True)
class Masking:
    """Those of one model that wait for their masks. Only what is computed waits, never the loop.

    wake: called when one need not wait any longer, from the thread that compiled it.
    """

    masks: GrammarMasks
    wake: Callable[[], None]
    _waiting: dict[str, tuple[BackendRequest, Compiling]] = field(default_factory=dict)

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

    def done(self) -> Iterator[tuple[BackendRequest, Compiling]]:
        """Take out those that need not wait any longer; a mask, or why there is none, is in each one's future."""
        for request_id, (request, compiling) in list(self._waiting.items()):
            if compiling.done():
                del self._waiting[request_id]
                yield request, compiling
