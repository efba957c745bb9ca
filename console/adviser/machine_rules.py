"""Rules about devices and workers: what holds one of them back."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from console.adviser import thresholds as at
from console.adviser.advice import Advice, Look
from console.adviser.evidence import Evidence
from console.widgets import text
from console.widgets.names import reading_name
from engine.snapshot import WorkerReading


def device_hot(evidence: Evidence) -> Iterator[Advice]:
    """A device is as hot as it may be."""
    for device in evidence.snapshot.devices:
        if device.temperature_c is not None and device.temperature_c >= at.HOT_C:
            name, degrees = reading_name(device), f"{device.temperature_c:.0f} °C"
            yield Advice(
                "device_hot",
                f"{name} is at {degrees}, where a card lowers its clock: it needs air, or a lower power limit.",
                f"{name} is at {degrees}: it needs air",
                subject=device.id,
            )


def power_limit(evidence: Evidence) -> Iterator[Advice]:
    """A device draws all that it may."""
    for device in evidence.snapshot.devices:
        draw, limit, busy = device.power_w, device.power_limit_w, device.utilisation
        if draw is None or not limit or draw < at.POWER_SHARE * limit or (busy or 0.0) < at.POWER_BUSY:
            continue
        name = reading_name(device)
        yield Advice(
            "power_limit",
            f"{name} draws {draw:.0f} of the {limit:.0f} W that it may: its power limit sets its speed.",
            f"{name} draws {draw:.0f} of {limit:.0f} W",
            subject=device.id,
        )


def slow_worker(evidence: Evidence) -> Iterator[Advice]:
    """A worker is slower than others of its model on devices of the same kind, at no more requests than they have."""
    working = [worker for worker in evidence.serving if worker.active and worker.tokens_per_s > 0]
    for worker in working:
        twins = [twin for twin in working if twin is not worker and _kind(twin) == _kind(worker)]
        if not twins:
            continue
        usual, requests = median(_pace(twin) for twin in twins), median(twin.active for twin in twins)
        if _pace(worker) >= at.SLOW_SHARE * usual or worker.active > at.SLOW_BATCH * requests:
            continue
        rate = f"{text.rate(_pace(worker))} tok/s for each request"
        yield Advice(
            "slow_worker",
            f"{worker.id} makes {rate}, its twins {text.rate(usual)}: restart it, or see what else uses its device.",
            f"{worker.id} makes {rate}, its twins {text.rate(usual)}",
            Look(worker.id),
            worker.id,
        )


def _pace(worker: WorkerReading) -> float:
    return worker.tokens_per_s / worker.active


def _kind(worker: WorkerReading) -> tuple[str, ...]:
    """What devices it is on, whichever they are: "cuda" twice, say."""
    return tuple(device.rpartition("/")[2].partition(":")[0] for device in worker.devices)
