"""FakeInsight: writes down what is asked, and forgets the session of the snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from engine.snapshot import Insight, Session

if TYPE_CHECKING:
    from tests.fakes.link import FakeLink


class FakeInsight:
    """Both calls can fail and be held, as "reset_session" and "measure_limits"."""

    def __init__(self, link: FakeLink) -> None:
        self._link = link

    async def reset(self) -> None:
        """The snapshot has a session without anything from now on."""
        await self._link.record("reset_session")
        current = self._link.current
        fresh = Insight(session=Session(since=current.at), energy=current.insight.energy)
        self._link.show(msgspec.structs.replace(current, insight=fresh))

    async def measure(self) -> None:
        """Keeps the call alone."""
        await self._link.record("measure_limits")
