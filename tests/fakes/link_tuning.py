"""FakeTuning: writes down what is asked, and reports what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from console.link.tuning import TuneOrder, TuningReport

if TYPE_CHECKING:
    from tests.fakes.link import FakeLink


class FakeTuning:
    """`current` is what report() gives. The others can fail and be held, as "tune", "cancel_tuning" and "use_best"."""

    def __init__(self, link: FakeLink) -> None:
        self._link = link
        self.current = TuningReport()

    def report(self) -> TuningReport:
        """As it was given."""
        return self.current

    async def start(self, order: TuneOrder) -> None:
        """It goes on from now on."""
        await self._link.record("tune", order=order)
        self.current = TuningReport(state="running", budget_s=order.minutes * 60, knobs=order.knobs)

    async def cancel(self) -> None:
        """It is cancelled."""
        await self._link.record("cancel_tuning")
        self.current = msgspec.structs.replace(self.current, state="cancelled", now=None)

    async def use_best(self) -> None:
        """It is in use."""
        await self._link.record("use_best")
        self.current = msgspec.structs.replace(self.current, applied=True)
