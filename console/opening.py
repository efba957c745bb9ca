"""OpeningLink: the link of an engine that is still being opened, so that the first frame need not wait for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from console.link import ApiStatus, EngineLink
from console.standing import Standing, standing_of
from engine.snapshot import LogEntry, Snapshot


class OpeningLink:
    """What a screen polls is empty until the engine is there; whoever asks for more waits for it, which takes well
    under a second.

    opening: gives the link of the engine.  api: what is said of the HTTP server until then.
    """

    def __init__(self, opening: Future[EngineLink], api: ApiStatus) -> None:
        self._opening = opening
        self._api = api

    def snapshot(self) -> Snapshot:
        """That of the engine; one with nothing in it before."""
        link = self._link
        return link.snapshot() if link is not None else Snapshot(at=time.time())

    def api_status(self) -> ApiStatus:
        """That of the engine's server."""
        link = self._link
        return link.api_status() if link is not None else self._api

    def logs(self, after: int = 0) -> tuple[int, Sequence[LogEntry]]:
        """Those of the engine."""
        link = self._link
        return link.logs(after) if link is not None else (after, ())

    def standing(self) -> Standing:
        """That of the engine; starting before."""
        link = self._link
        return standing_of(link) if link is not None else Standing(reach="starting")

    @property
    def _link(self) -> EngineLink | None:
        opening = self._opening
        return opening.result() if opening.done() and opening.exception() is None else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opening.result(), name)
