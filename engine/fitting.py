"""Fitting: where the workers of one model go, from what its folder says and what earlier loads of it took."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from engine.config import DeviceShare, EngineConfig, ModelSpec
from engine.costs import Workload
from engine.devices import computable
from engine.errors import EngineError
from engine.facts import ModelFacts, read_facts
from engine.ledger import Ledger, LedgerFile
from engine.placement import place
from engine.plan import Placement
from engine.snapshot import DeviceReading

_log = logging.getLogger("engine")


class Fitting:
    """Placements for one spec. ledger: what loads really used; None where that is kept nowhere."""

    def __init__(self, spec: ModelSpec, ledger: LedgerFile | None) -> None:
        self._spec = spec
        self._file = ledger
        self._ledger = Ledger()
        self._facts: ModelFacts | None = None

    async def read(self) -> None:
        """Read the folder and the ledger. Raises UnsupportedModel, UnsafeWeights or ModelLoadFailed."""
        self._facts = await asyncio.to_thread(read_facts, self._spec)
        await self._reread()

    def place(
        self,
        workers: int,
        config: EngineConfig,
        devices: Sequence[DeviceReading],
        *,
        held: bool = False,
        later: Sequence[DeviceReading] = (),
    ) -> list[Placement]:
        """Placements of so many new workers. held: others of the model run, whose weights they may share.  later: the
        devices without the workers that they replace.

        Raises InsufficientMemory with the numbers, InvalidRequest for a device or split that cannot be.
        """
        return place(
            workers,
            self._known,
            computable(devices),
            self._spec,
            workload_of(config),
            correct=self._ledger.correction,
            held=held,
            later=later,
        )

    def anew(self, spec: ModelSpec, config: EngineConfig, devices: Sequence[DeviceReading]) -> Placement | None:
        """Where a worker goes whose devices are not there any more; None while they are, or where none has room."""
        there = {device.id for device in devices}
        if not devices or all(share.device in there for share in spec.shares):
            return None
        try:
            return self.place(1, config, devices)[0]
        except EngineError as error:
            _log.error("%s: a worker cannot be placed anew: %s", spec.name, error.message)
            return None

    async def note(self, placement: Placement, used: Sequence[DeviceShare], resident_bytes: int) -> None:
        """Remember what a load took."""
        if self._file is not None:
            await asyncio.to_thread(self._file.note, placement, used, resident_bytes)
            await self._reread()

    @property
    def _known(self) -> ModelFacts:
        assert self._facts is not None, "read() comes first"
        return self._facts

    async def _reread(self) -> None:
        if self._file is not None:
            self._ledger = await asyncio.to_thread(self._file.read)


def workload_of(config: EngineConfig) -> Workload:
    """What a worker is to be able to do at once."""
    return Workload(max_prompts=config.max_prompts, step_tokens=config.step_tokens, page_tokens=config.page_tokens)
