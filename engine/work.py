"""What models ask of their devices: floating-point operations and bytes read, per second. Pure.

Operations: 2 per active parameter and token, as a multiplication and an addition (Kaplan et al. 2020, section 2.1);
attention over the context comes on top and is left out. Bytes: in every step the weights are read once, and the keys
and values of what its requests have computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.backends.base import BackendStats, LoadedModel
from engine.devices.accounts import shares_of
from engine.insight_values import DeviceWork
from engine.snapshot import DeviceLimits, DeviceReading

WINDOW_S = 4.0


class WorkerNow(NamedTuple):
    """A worker that holds a model. output_tokens_per_s: over the last seconds."""

    id: str
    model: LoadedModel
    stats: BackendStats
    output_tokens_per_s: float


class _Sample(NamedTuple):
    """Counters of a worker at a moment. computed: prompt tokens, and guesses that did not hold: output tokens are
    counted apart."""

    at: float
    steps: int
    computed: int


class Pace(NamedTuple):
    """What a worker does per second."""

    steps: float = 0.0
    tokens: float = 0.0


class WorkMeter:
    """Follows the counters of workers; to be told of all of them about once a second."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[_Sample]] = {}

    def read(
        self, now: float, workers: Sequence[WorkerNow], devices: Sequence[DeviceReading]
    ) -> tuple[DeviceWork, ...]:
        """What each device that has a worker does, in the order of `devices`."""
        for gone in self._samples.keys() - {worker.id for worker in workers}:
            del self._samples[gone]
        paces = {worker.id: self._pace(now, worker) for worker in workers}
        return tuple(work for device in devices if (work := work_of(device, workers, paces)) is not None)

    def _pace(self, now: float, worker: WorkerNow) -> Pace:
        stats = worker.stats
        sample = _Sample(
            now, stats.steps, stats.prompt_tokens_computed + max(0, stats.draft_tokens - stats.draft_accepted)
        )
        samples = self._samples.setdefault(worker.id, deque())
        if samples and (samples[-1].steps > sample.steps or samples[-1].computed > sample.computed):
            samples.clear()  # it was started again
        samples.append(sample)
        while len(samples) > 2 and samples[1].at <= now - WINDOW_S:
            samples.popleft()
        first, passed_s = samples[0], now - samples[0].at
        if passed_s <= 0 or sample.steps == first.steps:
            return Pace()
        computed = (sample.computed - first.computed) / passed_s
        return Pace(steps=(sample.steps - first.steps) / passed_s, tokens=computed + worker.output_tokens_per_s)


def work_of(device: DeviceReading, workers: Iterable[WorkerNow], paces: Mapping[str, Pace]) -> DeviceWork | None:
    """What the workers on a device do there; None where there is none. Its share of a model that several devices hold
    is that of the weights."""
    here = [(worker, part) for worker in workers if (part := _part(worker.model, device.id)) > 0]
    if not here:
        return None
    flops = sum(flops_per_s(worker.model, paces[worker.id]) * part for worker, part in here)
    read = sum(bytes_per_s(worker.model, worker.stats, paces[worker.id]) * part for worker, part in here)
    limits = device.limits or DeviceLimits()
    wide = any(worker.model.dtype == "float32" for worker, _ in here)
    return DeviceWork(
        device=device.id,
        flops_per_s=flops,
        flops_limit_per_s=limits.flops_32bit_per_s if wide else limits.flops_16bit_per_s,
        bytes_per_s=read,
        bytes_limit_per_s=limits.bytes_per_s,
    )


def flops_per_s(model: LoadedModel, pace: Pace) -> float:
    """Operations of a worker."""
    return 2 * active_parameters(model) * pace.tokens


def bytes_per_s(model: LoadedModel, stats: BackendStats, pace: Pace) -> float:
    """Bytes that a worker reads. Of a mixture of experts, what its requests can touch at most: each of them as much as
    a token is computed with, and a prompt everything."""
    active = active_parameters(model) / model.parameters if model.parameters else 1.0
    touched = 1.0 if stats.prefilling else min(1.0, active * max(1, stats.decoding))
    cached = sum(sequence.computed_tokens for sequence in stats.sequences)
    per_token = model.kv_bytes / model.kv_tokens if model.kv_tokens else 0.0
    return pace.steps * (model.weights_bytes * touched + cached * per_token)


def active_parameters(model: LoadedModel) -> int:
    """Parameters that one token is computed with."""
    return model.active_parameters or model.parameters


def _part(model: LoadedModel, device: str) -> float:
    shares = shares_of(model)
    total = sum(share.weights_bytes for share in shares)
    here = [share for share in shares if share.device == device]
    if not total:
        return len(here) / len(shares)
    return sum(share.weights_bytes for share in here) / total
