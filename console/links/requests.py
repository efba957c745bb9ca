"""What the screens ask of requests: those that ended, all about one of them, and to cancel what waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.records import RequestDetail
from engine.snapshot import RequestRow


class RequestsLink(Protocol):
    """See console.link.EngineLink. Live requests, and the last fifty that ended, are in the snapshot."""

    def finished(self, after: int = 0) -> tuple[int, Sequence[RequestRow]]:
        """Requests that ended after the first `after` ones, oldest first, as far as they are kept; and what to give as
        `after` the next time. There may be more than come at once: ask again."""

    async def detail(self, request_id: str, order: int = 0) -> RequestDetail:
        """All about one request, live or ended (of several of that id the newest, unless `order` is given).

        Raises RequestNotFound where nothing is known of it any more.
        """

    async def cancel_queued(self, model: str = "") -> int:
        """Cancel every request that waits for a worker, of one model or of all; returns how many there were."""
