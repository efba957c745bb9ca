"""Evidence of the rules: the snapshot, the growth of counters, and a few readings of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType

from console.adviser.advice import Code
from console.adviser.thresholds import CORES_BUSY, CORES_S, WORKER_MARGIN
from console.text import device_label
from console.tui.view import workers_of
from engine.backends.base import ItlReport
from engine.snapshot import DeviceReading, Second, Snapshot, WorkerReading

OWN_LOADS: Mapping[str, str] = MappingProxyType(
    {"sample": "the sample load", "bench": "a benchmark", "autotune": "autotune"}
)
"""Sources of requests that this program sends by itself to measure, in words."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters that only grow, or their growth."""

    preemptions: int = 0
    draft_tokens: int = 0
    draft_accepted: int = 0

    @classmethod
    def of(cls, snapshot: Snapshot) -> Counts:
        """As they stand."""
        totals = snapshot.totals
        return cls(totals.preemptions, totals.draft_tokens, totals.draft_accepted)

    def since(self, before: Counts) -> Counts:
        """Return the growth since `before`."""
        return Counts(
            self.preemptions - before.preemptions,
            self.draft_tokens - before.draft_tokens,
            self.draft_accepted - before.draft_accepted,
        )

    def behind(self, before: Counts) -> bool:
        """Return whether these are of an engine that started later."""
        return self.preemptions < before.preemptions or self.draft_tokens < before.draft_tokens


@dataclass(frozen=True, slots=True)
class Evidence:
    """snapshot: of the model in view.  recent: what counters grew by in the last thresholds.WINDOW_S.

    found: codes of what was found before, and need not reach its threshold again.
    """

    snapshot: Snapshot
    recent: Counts = Counts()
    found: frozenset[Code] = frozenset()

    @property
    def serving(self) -> tuple[WorkerReading, ...]:
        """The workers of the model in view that take requests."""
        return tuple(worker for worker in workers_of(self.snapshot) if worker.state == "ready")

    @property
    def missed_floor(self) -> ItlReport | None:
        """The slowest step of answers alone that is longer than the ITL target; None where there is none."""
        reports = [worker.stats.itl for worker in self.serving if worker.stats.itl is not None and worker.active]
        missed = [report for report in reports if report.floor_s > report.target_s]
        return max(missed, key=lambda report: report.floor_s, default=None)

    @property
    def places(self) -> int:
        """Requests that these can work on at once, as far as their memory allows."""
        return sum(min(worker.max_prompts, worker.stats.prompts_limit or worker.max_prompts) for worker in self.serving)

    @property
    def several(self) -> bool:
        """True if the engine holds more than one model, so that what it measures is not of one alone."""
        return len(self.snapshot.models) > 1

    @property
    def own_load(self) -> Counter[str]:
        """Live requests of this program's own loads, by source."""
        live = (row.source for row in self.snapshot.requests if row.state != "finished")
        return Counter(source for source in live if source in OWN_LOADS)

    def last(self, seconds: float) -> Sequence[Second]:
        """The history of the last `seconds`; () where it is not that long yet."""
        history = self.snapshot.history[-round(seconds) :]
        return history if len(history) >= round(seconds) else ()


@dataclass(frozen=True, slots=True)
class Room:
    """A device with memory to spare for another worker that takes `need_bytes`."""

    device: DeviceReading
    need_bytes: int

    @property
    def name(self) -> str:
        """The device's, as it is shown."""
        return device_label(self.device)


def room_for_worker(evidence: Evidence) -> Room | None:
    """Where another worker certainly fits, the emptiest device first. None where nothing is known of what one takes, or
    it lies on several devices; workers on CPUs share their cores, so another one adds nothing, and so do those on
    simulated devices where the cores are busy."""
    for worker in evidence.serving:
        shares = worker.used or worker.planned
        if len(shares) != 1 or shares[0].device.endswith("cpu"):
            continue
        need = shares[0].total_bytes
        cards = [device for device in evidence.snapshot.devices if device.kind != "cpu"]
        emptiest = max(cards, key=lambda device: device.free_bytes, default=None)
        if emptiest is None or (emptiest.kind == "simulated" and _cores_busy(evidence, emptiest.node)):
            return None
        return Room(emptiest, need) if need and emptiest.free_bytes >= need * WORKER_MARGIN else None
    return None


def _cores_busy(evidence: Evidence, node: str) -> bool:
    """Return whether the processor of a machine, which computes for its simulated devices, has no time for more."""
    devices, history = evidence.snapshot.devices, evidence.last(CORES_S)
    for index, device in enumerate(devices):
        if device.kind == "cpu" and device.node == node:
            past = [second.device_utilisation[index : index + 1] for second in history]
            shares = [share for (share,) in filter(None, past) if share is not None]
            return fmean(shares or [device.utilisation or 0.0]) >= CORES_BUSY
    return False
