"""FakeRequests: requests that ended, as the snapshot of a FakeLink tells them and as a test adds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engine.errors import RequestNotFound
from engine.requests.history import RequestDetail, TokenBatch, WorkerSpan
from engine.snapshot import RequestRow

if TYPE_CHECKING:
    from tests.fakes.link import FakeLink


class FakeRequests:
    """ended: oldest first; what the snapshot tells of requests that ended is added by itself.
    details: what `detail` gives, by id; where a test gave none, a plain story of the row.
    """

    def __init__(self, link: FakeLink) -> None:
        self._link = link
        self.ended: list[RequestRow] = []
        self.details: dict[str, RequestDetail] = {}
        self.texts = False

    def finished(self, after: int = 0) -> tuple[int, Sequence[RequestRow]]:
        """Those after the first `after`."""
        told = [row for row in reversed(self._link.current.requests) if row.state == "finished"]
        known = {(row.id, row.order) for row in self.ended} if told else set()
        self.ended += [row for row in told if (row.id, row.order) not in known]
        return len(self.ended), self.ended[after:]

    async def detail(self, request_id: str, order: int = 0) -> RequestDetail:
        """The one given, else one made of the row; RequestNotFound where there is no row."""
        if request_id in self.details:
            return self.details[request_id]
        rows = [*self._link.current.requests, *reversed(self.ended)]
        row = next((row for row in rows if row.id == request_id and order in (0, row.order)), None)
        if row is None:
            raise RequestNotFound(f"nothing is known of a request {request_id} any more", id=request_id)
        return story(row, texts=self.texts)

    async def cancel_queued(self, model: str = "") -> int:
        """Those that the snapshot shows as waiting end as cancelled."""
        await self._link.record("cancel_queued", **({"model": model} if model else {}))
        before = self._link.current.requests
        after = tuple(
            msgspec.structs.replace(row, state="finished", finish="cancelled") if row.state == "queued" else row
            for row in before
        )
        self._link.show(msgspec.structs.replace(self._link.current, requests=after, queued=0))
        return sum(row.state == "queued" for row in before)


def story(row: RequestRow, **changes: Any) -> RequestDetail:
    """A request that went the usual way: it waited, was on one worker, and its tokens came evenly."""
    began = row.ttft_s
    itl_s = row.itl_s or 0.0
    bursts = (
        ()
        if began is None
        else tuple(
            TokenBatch(since_s=began + at * itl_s, until_s=began + at * itl_s, tokens=1)
            for at in range(row.output_tokens)
        )
    )
    stays = () if row.worker is None else (WorkerSpan(worker=row.worker, since_s=row.queued_s, until_s=_until(row)),)
    values: dict[str, Any] = {"row": row, "stays": stays, "bursts": bursts}
    return RequestDetail(**(values | changes))


def _until(row: RequestRow) -> float | None:
    return row.age_s if row.state == "finished" else None
