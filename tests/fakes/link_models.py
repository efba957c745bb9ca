"""FakeModels: a ModelsLink that loads what FakeLink lists, and keeps in memory what models were loaded with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from console.link.protocol import Fetching
from console.settings.load_options import NO_OPTIONS, LoadOptions
from engine.models.resolve import is_hub_id
from engine.placement.estimate import Estimate

if TYPE_CHECKING:
    from tests.fakes.link import FakeLink


class FakeModels:
    """Belongs to a FakeLink, which scripts it: failures, held calls.

    asked: what each estimate was asked for.  expected: the answer by model, else the link's own.  kept: what is
    remembered, by what models were called.  download_now: what `fetching` says.
    """

    def __init__(self, link: FakeLink) -> None:
        self._link = link
        self.asked: list[tuple[str, LoadOptions]] = []
        self.expected: dict[str, Estimate] = {}
        self.kept: dict[str, LoadOptions] = {}
        self.download_now: Fetching | None = None

    def defaults(self) -> LoadOptions:
        """The scene's knobs."""
        snapshot = self._link.current
        return LoadOptions(
            num_workers=snapshot.target_workers,
            max_prompts=snapshot.max_prompts,
            cache_bits=16,
            weights="auto",
            dtype="auto",
        )

    def fetching(self) -> Fetching | None:
        """The download given."""
        return self.download_now

    async def load(
        self,
        model: str,
        changes: LoadOptions = NO_OPTIONS,
        *,
        beside: bool = False,
        name: str = "",
        rename: bool = True,
    ) -> None:
        """As FakeLink.load, and remembered."""
        await self._link.begin_load(model, beside=beside, **changes.given())
        self.kept[model] = changes

    async def download(self, model: str) -> None:
        """Keeps the call alone."""
        assert is_hub_id(model)
        await self._link.record("download", model=model)

    async def estimate(self, model: str, changes: LoadOptions = NO_OPTIONS, *, beside: bool = False) -> Estimate:
        """What is expected, whatever is asked for; `asked` keeps what that was."""
        link = self._link
        self.asked.append((model, changes))
        expected = self.expected.get(model, link.expected)
        await link.gate("estimate")
        if "estimate" in link.failures:
            raise link.failures.pop("estimate")
        return expected

    async def remembered(self, model: str) -> LoadOptions:
        """What it was loaded with."""
        return self.kept.get(model, NO_OPTIONS)

    async def forget(self, model: str) -> None:
        """Nothing any more."""
        await self._link.record("forget", model=model)
        self.kept.pop(model, None)
