"""A driver as `pynvml` shows it, over imaginary cards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 2**30
NOT_SUPPORTED, NOT_FOUND, GPU_IS_LOST = 3, 6, 15


class NVMLError(Exception):
    """As NVML raises it: `value` is the code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class Card:
    """A GPU, or a slice of one. Readings that are None are not supported; `lost` ones raise for everything.

    compute, graphics: (pid, bytes or None) of processes.
    """

    uuid: str = "GPU-aa"
    name: str | bytes = "Imagined GPU"
    total: int | None = 80 * GIB
    free: int = 60 * GIB
    utilisation: int | None = 40
    temperature: int | None = 61
    power: int | None = 250_000
    power_limit: int | None = 400_000
    compute: Sequence[tuple[int, int | None]] = ()
    graphics: Sequence[tuple[int, int | None]] = ()
    mig: bool | None = None
    slices: Sequence[Card | None] = ()
    lost: bool = False
    capability: tuple[int, int] | None = None
    cores: int | None = None
    clocks_mhz: Mapping[int, int] = field(default_factory=dict)
    memory_bits: int | None = None


def mig_slice(uuid: str, gib: int, **readings: Any) -> Card:
    """A slice, which has memory and processes and no sensors."""
    settings = {"name": f"Imagined GPU MIG 1g.{gib}gb", "total": gib * GIB, "free": gib * GIB} | readings
    return Card(uuid, utilisation=None, temperature=None, power=None, power_limit=None, **settings)


@dataclass
class FakeNvml:
    """What of pynvml is used. without: functions that this version of the library lacks."""

    cards: Sequence[Card] = ()
    without: frozenset[str] = field(default_factory=frozenset)

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED
    NVML_TEMPERATURE_GPU = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: Mapping[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: len(self.cards),
            "nvmlDeviceGetHandleByIndex": lambda index: self.cards[index],
            "nvmlDeviceGetHandleByUUID": self._by_uuid,
            "nvmlDeviceGetUUID": lambda card: card.uuid,
            "nvmlDeviceGetName": lambda card: card.name,
            "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(total=_given(card.total), free=card.free),
            "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(gpu=_given(card.utilisation)),
            "nvmlDeviceGetTemperature": lambda card, sensor: _given(card.temperature),
            "nvmlDeviceGetPowerUsage": lambda card: _given(card.power),
            "nvmlDeviceGetEnforcedPowerLimit": lambda card: _given(card.power_limit),
            "nvmlDeviceGetComputeRunningProcesses": lambda card: _processes(card.compute),
            "nvmlDeviceGetGraphicsRunningProcesses": lambda card: _processes(card.graphics),
            "nvmlDeviceGetCudaComputeCapability": lambda card: _given(card.capability),
            "nvmlDeviceGetNumGpuCores": lambda card: _given(card.cores),
            "nvmlDeviceGetMaxClockInfo": lambda card, clock: _given(card.clocks_mhz.get(clock)),
            "nvmlDeviceGetMemoryBusWidth": lambda card: _given(card.memory_bits),
            "nvmlDeviceGetMigMode": lambda card: [_given(card.mig), False],
            "nvmlDeviceGetMaxMigDeviceCount": lambda card: len(card.slices),
            "nvmlDeviceGetMigDeviceHandleByIndex": lambda card, index: _given(card.slices[index], NOT_FOUND),
        }
        if name not in answers or name in self.without:
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            if any(isinstance(argument, Card) and argument.lost for argument in arguments):
                raise NVMLError(GPU_IS_LOST)
            return answers[name](*arguments)

        return answer

    def _by_uuid(self, uuid: str) -> Card:
        every = [each for card in self.cards for each in (card, *card.slices) if each is not None]
        return _given(next((card for card in every if card.uuid == uuid), None), NOT_FOUND)


def _given(value: Any, error: int = NOT_SUPPORTED) -> Any:
    if value is None:
        raise NVMLError(error)
    return value


def _processes(held: Sequence[tuple[int, int | None]]) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in held]
