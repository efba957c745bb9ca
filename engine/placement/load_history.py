"""Memory that loads really used against what was planned, per model: it corrects the next plan.

Weights are corrected both ways. Working memory only upwards: the warm-up after a load does not see the long contexts
that the plan leaves room for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from engine.config import DeviceShare, EngineConfig, ModelSpec
from engine.devices import computable
from engine.errors import EngineError
from engine.placement.model_facts import ModelFacts, read_facts
from engine.placement.model_memory import Correction, Workload, device_kind
from engine.placement.plan import Placement, place
from engine.snapshot import DeviceReading
from engine.system.files import replace_file

MAX_MODELS = 64
MAX_LOADS = 4
_FACTORS = (0.5, 2.0)
_MAX_WORKING_BYTES = 8 << 30
_BYTES_PER_S = 2**30
"""Of weights that are loaded, while no load was measured."""
_FILE = "loads.json"
_log = logging.getLogger("engine")


class MeasuredLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One load: bytes over all of its devices, planned as the files have them and really used.

    devices: how many there were; each has working memory of its own.  seconds: that it took, 0 where that is not known.
    """

    planned_weights_bytes: int
    used_weights_bytes: int
    planned_working_bytes: int
    used_working_bytes: int
    devices: int = 1
    seconds: float = 0.0


class LoadHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The last loads of each model, the model that was loaded last at the end."""

    loads: dict[str, tuple[MeasuredLoad, ...]] = {}

    def with_load(self, identity: str, load: MeasuredLoad) -> LoadHistory:
        """With one more; models beyond MAX_MODELS that were not loaded for longest are forgotten."""
        by_identity = {key: loads for key, loads in self.loads.items() if key != identity}
        by_identity[identity] = (*self.loads.get(identity, ()), load)[-MAX_LOADS:]
        return LoadHistory(loads=dict(list(by_identity.items())[-MAX_MODELS:]))

    def correction(self, identity: str) -> Correction:
        """Return the correction by the loads of that model: the most that any of the last ones took."""
        loads = self.loads.get(identity, ())
        factors = [
            load.used_weights_bytes / load.planned_weights_bytes
            for load in loads
            if load.planned_weights_bytes and load.used_weights_bytes
        ]
        more = [(load.used_working_bytes - load.planned_working_bytes) // load.devices for load in loads]
        low, high = _FACTORS
        return Correction(
            weights_factor=min(high, max(low, max(factors, default=1.0))),
            working_bytes=min(_MAX_WORKING_BYTES, max(0, *more, 0)),
            loads=len(loads),
        )

    def expected_seconds(self, identity: str, weights_bytes: int) -> float:
        """Return the seconds that the next load of a model may take: as its last ones, else by its size as others."""
        own = [load.seconds for load in self.loads.get(identity, ()) if load.seconds]
        if own:
            return median(own)
        every = [load for loads in self.loads.values() for load in loads if load.seconds]
        rates = [load.used_weights_bytes / load.seconds for load in every]
        return weights_bytes / median(rates or [_BYTES_PER_S])


def with_resident(used: Sequence[DeviceShare], resident_bytes: int) -> tuple[DeviceShare, ...]:
    """`used` as a worker's process shows it: on a CPU all that is resident is taken, 0 where that is not known, unless
    ranks of tensor parallelism have processes of their own."""
    if len(used) != 1 or not resident_bytes or device_kind(used[0].device) != "cpu" or used[0].ranks > 1:
        return tuple(used)
    working = resident_bytes - used[0].weights_bytes - used[0].kv_bytes
    return (msgspec.structs.replace(used[0], working_bytes=max(0, working)),)


def measured_load(
    placement: Placement, used: Sequence[DeviceShare], resident_bytes: int = 0, seconds: float = 0.0
) -> MeasuredLoad:
    """A load as the ledger keeps it. used: LoadedModel.shares.  resident_bytes: of the worker's process, which on a CPU
    is all that it took; 0 where that is not known.  seconds: that it took, likewise."""
    by = placement.correction
    weights = sum(share.weights_bytes for share in used)
    model = weights + sum(share.kv_bytes for share in used)
    working = sum(share.working_bytes + placement.unseen_bytes for share in used)
    if resident_bytes and all(device_kind(share.device) == "cpu" and share.ranks == 1 for share in used):
        working = resident_bytes - model
    planned = placement.shares
    return MeasuredLoad(
        planned_weights_bytes=round(sum(share.weights_bytes for share in planned) / by.weights_factor),
        used_weights_bytes=weights,
        planned_working_bytes=sum(share.working_bytes for share in planned) - by.working_bytes * len(planned),
        used_working_bytes=working,
        devices=len(planned),
        seconds=seconds,
    )


class LoadHistoryFile:
    """The ledger in a folder; every call reads or writes it, so that several engines may share one. Blocking."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _FILE

    def read(self) -> LoadHistory:
        """The ledger; an empty one where there is none, or none that can be read."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=LoadHistory)
        except FileNotFoundError:
            return LoadHistory()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("%s cannot be read and is replaced: %s", self._file, error)
            return LoadHistory()

    def note(
        self, placement: Placement, used: Sequence[DeviceShare], resident_bytes: int = 0, seconds: float = 0.0
    ) -> None:
        """Remember a load. One that cannot be written is only logged: it corrects an estimate, no more."""
        if not (placement.identity and used):
            return
        ledger = self.read().with_load(placement.identity, measured_load(placement, used, resident_bytes, seconds))
        try:
            replace_file(self._file, msgspec.json.encode(ledger))
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._file, error)


# PlacementPlanner: where the workers of one model go, from what its folder says and what earlier loads of it took.


class PlacementPlanner:
    """Placements for one spec. ledger: what loads really used; None where they are not recorded."""

    def __init__(self, spec: ModelSpec, ledger: LoadHistoryFile | None) -> None:
        self._spec = spec
        self._file = ledger
        self._ledger = LoadHistory()
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
        resident: bool = False,
        later: Sequence[DeviceReading] = (),
    ) -> list[Placement]:
        """Return placements of new workers. resident: others of the model run, whose weights they may share.  later:
        the devices without the workers that they replace.

        Raises InsufficientMemory with the numbers, InvalidRequest for a device or split that cannot be.
        """
        return place(
            workers,
            self._read_facts,
            computable(devices),
            self._spec,
            workload_of(config),
            correct=self._ledger.correction,
            resident=resident,
            later=later,
        )

    def relocate(self, spec: ModelSpec, config: EngineConfig, devices: Sequence[DeviceReading]) -> Placement | None:
        """Return a new placement of a worker whose devices are lost; None while they are there, or where none has
        room."""
        there = {device.id for device in devices}
        if not devices or all(share.device in there for share in spec.shares):
            return None
        try:
            return self.place(1, config, devices)[0]
        except EngineError as error:
            _log.error("%s: no new placement for a worker: %s", spec.name, error.message)
            return None

    async def note(
        self, placement: Placement, used: Sequence[DeviceShare], resident_bytes: int, seconds: float
    ) -> None:
        """Remember what a load took."""
        if self._file is not None:
            await asyncio.to_thread(self._file.note, placement, used, resident_bytes, seconds)
            await self._reread()

    def expected_seconds(self, placements: Sequence[Placement]) -> float:
        """Return the seconds that a load may take whose workers have these places."""
        weights = sum(share.weights_bytes for placement in placements for share in placement.shares)
        return self._ledger.expected_seconds(placements[0].identity, weights) if placements else 0.0

    @property
    def _read_facts(self) -> ModelFacts:
        assert self._facts is not None, "read() comes first"
        return self._facts

    async def _reread(self) -> None:
        if self._file is not None:
            self._ledger = await asyncio.to_thread(self._file.read)


def workload_of(config: EngineConfig) -> Workload:
    """Return what a worker has to be able to do at once."""
    return Workload(
        max_prompts=config.max_prompts,
        step_tokens=config.step_tokens,
        page_tokens=config.page_tokens,
        max_models=config.max_models,
    )
