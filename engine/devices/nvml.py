"""NVIDIA GPUs, and the slices of those that MIG divides, through NVML."""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import psutil

from engine.snapshot import DeviceLimits, DeviceReading, DeviceSensors, ProcessMemory
from engine.system.memory import read_ram

# The most that a GPU can, worked out of what NVML says. Nothing is guessed: one that is not in the table has no
# limit, nor has a slice of one. Pure.


class _Generation(NamedTuple):
    """A multiprocessor. cores: FP32 units.  tensor: operations per clock of dense 16-bit products that are summed in 32
    bits; halved: whether GeForce cards do half of that."""

    cores: int
    tensor: int
    halved: bool = False


_GENERATIONS: dict[tuple[int, int], _Generation] = {
    (7, 0): _Generation(64, 1024),
    (7, 5): _Generation(64, 1024, halved=True),
    (8, 0): _Generation(64, 2048),
    (8, 6): _Generation(128, 1024, halved=True),
    (8, 9): _Generation(128, 1024, halved=True),
    (9, 0): _Generation(128, 4096),
    (10, 0): _Generation(128, 8192),
    (12, 0): _Generation(128, 1024, halved=True),
}
"""By compute capability, from NVIDIA's white papers of Volta to Blackwell: their peak rate over multiprocessors and
boost clock."""


def nvidia_limits(
    *,
    capability: tuple[int, int] | None,
    geforce: bool,
    cores: int | None,
    clock_mhz: int | None,
    memory_bits: int | None,
    memory_mhz: int | None,
) -> DeviceLimits | None:
    """Return the peak throughput of a GPU at its highest clocks; None where it is unknown.

    Memory moves two bits per wire and clock as NVML counts clocks, whatever the kind of memory.
    """
    generation = _GENERATIONS.get(capability) if capability is not None else None
    per_s = memory_bits / 8 * 2 * memory_mhz * 1e6 if memory_bits and memory_mhz else None
    if generation is None or not cores or not clock_mhz:
        return DeviceLimits(bytes_per_s=per_s) if per_s else None
    clocks_per_s = clock_mhz * 1e6
    tensor = generation.tensor / (2 if generation.halved and geforce else 1)
    return DeviceLimits(
        flops_16bit_per_s=cores / generation.cores * tensor * clocks_per_s,
        flops_32bit_per_s=cores * 2 * clocks_per_s,
        bytes_per_s=per_s,
    )


# What lowers a clock, bit by bit (nvml.h, "NvmlClocksEventReasons"). An idle GPU lowers its own: that is no throttling.

_THROTTLE_REASONS: Mapping[int, str] = {
    0x002: "clocks set by the operator",
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "temperature",
    0x040: "temperature (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Return the reasons of a throttled clock in words; () where nothing throttles it."""
    return tuple(reason for bit, reason in _THROTTLE_REASONS.items() if bits & bit)


_log = logging.getLogger("engine")
_MIG = "MIG-"
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_SLOW_READS = 10
"""Readings that change rarely are read once in this number of samples."""
_MAX_INITS = 1000
_MAX_XIDS = 16
_MAX_NVLINKS = 18
_ALL_NVLINKS = 0xFFFFFFFF
_NVLINK_SENT, _NVLINK_RECEIVED = 138, 139
"""Fields of nvml.h: KiB of data over all links since the driver was loaded."""


@dataclass(slots=True)
class _Gpu:
    """A device under the id that CUDA gives it, and NVML's handle of it. limits: None for a slice of one.

    uuid: "" where the library reports none.  sensors: the last readings, of which a sample renews a part.  events:
    where its Xid errors are reported, None where they are not.  nvlink: microseconds and bytes received and sent, of
    the last sample.
    """

    id: str
    handle: Any
    name: str
    uuid: str
    limits: DeviceLimits | None = None
    capability: tuple[int, int] | None = None
    processors: int | None = None
    sensors: DeviceSensors = field(default_factory=DeviceSensors)
    events: Any = None
    nvlink: tuple[int, float, float] | None = None


@dataclass(frozen=True, slots=True)
class _Memory:
    total_bytes: int
    free_bytes: int


class NvmlProbe:
    """NVIDIA GPUs that CUDA may use, as "cuda:0" and on. None where the library, the driver or a GPU is missing.

    A reading that a GPU does not give is None: utilisation, temperature and power of a MIG slice, power on some
    laptops. One that shares the host's memory (GB10, Jetson) gives that memory. One that is lost is left out until it
    answers again, after a reset under a new handle, and the others keep their ids.

    A process computes on one MIG slice at most, and sees no undivided GPU besides it (MIG user guide, "CUDA device
    enumeration"). So the first slice is "cuda:0"; the rest are shown as "mig:1" and on, for CUDA_VISIBLE_DEVICES to
    choose among.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpus: list[_Gpu] = []
        self._silent: set[str] = set()
        self._samples = 0
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._gpus = self._find(os.environ.get("CUDA_VISIBLE_DEVICES"))
            for gpu in self._gpus:
                gpu.sensors = self._constants(gpu.handle)
                gpu.events = self._xid_events(gpu.handle)
        except Exception as error:  # NVMLError's class is only known once the library is there
            _log.debug("no NVIDIA GPU: %s", error)

    def read(self, pids: Iterable[int] = ()) -> Sequence[DeviceReading]:
        """One reading per GPU that answers."""
        ours = frozenset(pids)
        found = [reading for gpu in self._gpus if (reading := self._read(gpu, ours)) is not None]
        if self._gpus:
            self._sample_pcie(self._gpus[self._samples % len(self._gpus)])
        if self._silent and self._samples % _SLOW_READS == 0:
            self._find_again()
        self._samples += 1
        return tuple(found)

    # --- which there are ------------------------------------------------------------------------------------------

    def _find(self, setting: str | None) -> list[_Gpu]:
        """The devices that CUDA sees: GPUs, or the slices of MIG GPUs."""
        if setting is not None and _MIG in setting:
            return self._slices(self._named_slices(setting))
        every = [self._ask("nvmlDeviceGetHandleByIndex", index) for index in range(self._nvml.nvmlDeviceGetCount())]
        uuids = [_text(self._ask("nvmlDeviceGetUUID", handle)) for handle in every]
        visible = [every[index] for index in visible_devices(setting, uuids)]
        divided = [handle for handle in visible if self._is_divided(handle)]
        slices = [found for handle in divided for found in self._slices_of(handle)]
        if slices:
            return self._slices(slices)
        return [
            self._gpu(f"cuda:{index}", handle, self._name(handle), self._limits(handle))
            for index, handle in enumerate(handle for handle in visible if handle not in divided)
            if handle is not None
        ]

    def _gpu(self, id_: str, handle: Any, name: str, limits: DeviceLimits | None = None) -> _Gpu:
        uuid, capability = _text(self._ask("nvmlDeviceGetUUID", handle)), self._capability(handle)
        processors = self._processors(handle, capability)
        return _Gpu(id_, handle, name or "NVIDIA GPU", uuid, limits, capability, processors)

    def _slices(self, handles: Sequence[Any]) -> list[_Gpu]:
        return [
            self._gpu(f"mig:{index}" if index else "cuda:0", handle, self._slice_name(handle))
            for index, handle in enumerate(handles)
        ]

    def _find_again(self) -> None:
        """Initialise the library again and take new handles: a reset of a GPU or of the driver makes the old ones void.
        A device whose UUID is not there keeps its handle, and stays silent. The library counts who initialised it, and
        forgets its devices with the last: another probe of this process comes here in turn."""
        for gpu in self._gpus:
            if gpu.events is not None:
                gpu.sensors = msgspec.structs.replace(gpu.sensors, xid_errors=self._xid_errors(gpu))
        with suppress(self._nvml.NVMLError):
            for _ in range(_MAX_INITS):
                self._nvml.nvmlShutdown()
        self._ask("nvmlInit")
        for gpu in self._gpus:
            handle = self._ask("nvmlDeviceGetHandleByUUID", gpu.uuid) if gpu.uuid else None
            if handle is not None:
                gpu.handle, gpu.events = handle, self._xid_events(handle)

    def _named_slices(self, setting: str) -> list[Any]:
        """The slices that CUDA_VISIBLE_DEVICES names, up to the first that is not there."""
        found: list[Any] = []
        for name in setting.split(","):
            handle = self._ask("nvmlDeviceGetHandleByUUID", name.strip())
            if handle is None:
                break
            found.append(handle)
        return found

    def _is_divided(self, handle: Any) -> bool:
        modes = None if handle is None else self._ask("nvmlDeviceGetMigMode", handle)
        return modes is not None and bool(modes[0])

    def _slices_of(self, handle: Any) -> list[Any]:
        count = self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        slices = (self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index) for index in range(count))
        return [found for found in slices if found is not None]

    def _name(self, handle: Any) -> str:
        return _text(self._ask("nvmlDeviceGetName", handle))

    def _slice_name(self, handle: Any) -> str:
        """Its name with its profile, such as "NVIDIA A100 MIG 3g.20gb"; some drivers give that of the whole GPU."""
        name = self._name(handle)
        if "MIG" in name:
            return name
        whole = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        size = self._ask("nvmlDeviceGetAttributes_v2", handle)
        profile = f"{size.gpuInstanceSliceCount}g.{math.ceil(size.memorySizeMB / 1024)}gb" if size else ""
        name = name or (self._name(whole) if whole is not None else "")
        return " ".join(part for part in (name or "NVIDIA GPU", "MIG", profile) if part)

    # --- what they say --------------------------------------------------------------------------------------------

    def _read(self, gpu: _Gpu, ours: AbstractSet[int]) -> DeviceReading | None:
        memory = self._memory(gpu)
        if memory is None:
            return None
        bytes_by_pid = self._bytes_by_pid(gpu.handle)
        used = memory.total_bytes - memory.free_bytes
        work = min(used, sum(size for pid, size in bytes_by_pid.items() if pid in ours))
        utilisation = self._ask("nvmlDeviceGetUtilizationRates", gpu.handle)
        gpu.sensors = self._sensors(gpu, utilisation)
        sensor = getattr(self._nvml, "NVML_TEMPERATURE_GPU", 0)
        return DeviceReading(
            id=gpu.id,
            name=gpu.name,
            kind="cuda",
            utilisation=None if utilisation is None else utilisation.gpu / 100,
            total_bytes=memory.total_bytes,
            work_bytes=work,
            others_bytes=used - work,
            free_bytes=memory.free_bytes,
            temperature_c=self._ask("nvmlDeviceGetTemperature", gpu.handle, sensor),
            power_w=_milli(self._ask("nvmlDeviceGetPowerUsage", gpu.handle)),
            power_limit_w=_milli(self._ask("nvmlDeviceGetEnforcedPowerLimit", gpu.handle)),
            others=_name_processes({pid: size for pid, size in bytes_by_pid.items() if pid not in ours}),
            limits=gpu.limits,
            own=_name_processes({pid: size for pid, size in bytes_by_pid.items() if pid in ours}),
            sensors=gpu.sensors,
            capability=gpu.capability,
            processors=gpu.processors,
        )

    def _constants(self, handle: Any) -> DeviceSensors:
        """Return the readings that stay the same while the driver is loaded."""
        return DeviceSensors(
            max_sm_clock_mhz=self._ask("nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK),
            max_memory_clock_mhz=self._ask("nvmlDeviceGetMaxClockInfo", handle, _MEMORY_CLOCK),
            max_pcie_generation=self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            max_pcie_width=self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        )

    def _sensors(self, gpu: _Gpu, utilisation: Any) -> DeviceSensors:
        """Renew the readings of the moment; those that change rarely once in _SLOW_READS samples."""
        handle = gpu.handle
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:  # an older library
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        changes: dict[str, object] = {
            "memory_utilisation": None if utilisation is None else utilisation.memory / 100,
            "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
            "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", handle, _MEMORY_CLOCK),
            "throttle_reasons": None if bits is None else throttle_reasons(bits),
            "xid_errors": self._xid_errors(gpu),
        }
        if self._samples % _SLOW_READS == 0:
            fan = self._ask("nvmlDeviceGetFanSpeed", handle)
            uncorrected = getattr(self._nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1)
            volatile = getattr(self._nvml, "NVML_VOLATILE_ECC", 0)
            changes |= {
                "pcie_generation": self._ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
                "pcie_width": self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
                "ecc_errors": self._ask("nvmlDeviceGetTotalEccErrors", handle, uncorrected, volatile),
                "fan": None if fan is None else fan / 100,
                **self._nvlinks(handle),
            }
        if gpu.sensors.nvlink_links:
            changes |= self._nvlink_traffic(gpu)
        return msgspec.structs.replace(gpu.sensors, **changes)

    def _nvlinks(self, handle: Any) -> dict[str, int | None]:
        """NVLink links that are up, and all; None where there are none."""
        states: list[int] = []
        while len(states) < _MAX_NVLINKS:
            state = self._ask("nvmlDeviceGetNvLinkState", handle, len(states))
            if state is None:
                break
            states.append(state)
        return {
            "nvlink_links": sum(map(bool, states)) if states else None,
            "max_nvlink_links": len(states) or None,
        }

    def _nvlink_traffic(self, gpu: _Gpu) -> dict[str, float | None]:
        """Bytes per second over all NVLink links since the last sample."""
        fields = [(_NVLINK_RECEIVED, _ALL_NVLINKS), (_NVLINK_SENT, _ALL_NVLINKS)]
        values = self._ask("nvmlDeviceGetFieldValues", gpu.handle, fields)
        before, gpu.nvlink = gpu.nvlink, None
        if values is None or any(value.nvmlReturn for value in values):
            return {"nvlink_rx_bytes_per_s": None, "nvlink_tx_bytes_per_s": None}
        received, sent = (value.value.ullVal * 1024.0 for value in values)
        gpu.nvlink = (values[0].timestamp, received, sent)
        if before is None or (passed_s := (values[0].timestamp - before[0]) / 1e6) <= 0:
            return {}
        return {
            "nvlink_rx_bytes_per_s": max(0.0, received - before[1]) / passed_s,
            "nvlink_tx_bytes_per_s": max(0.0, sent - before[2]) / passed_s,
        }

    def _sample_pcie(self, gpu: _Gpu) -> None:
        """Measure the PCIe traffic of one GPU for its next reading: NVML watches it for 20 ms in either direction, so
        that each sample has time for one."""
        kib_per_s = (self._ask("nvmlDeviceGetPcieThroughput", gpu.handle, counter) for counter in (1, 0))
        received, sent = (None if each is None else each * 1024.0 for each in kib_per_s)
        gpu.sensors = msgspec.structs.replace(gpu.sensors, pcie_rx_bytes_per_s=received, pcie_tx_bytes_per_s=sent)

    def _xid_events(self, handle: Any) -> Any:
        """Return a set of events that gets the Xid errors of a GPU; None where it or its driver reports none."""
        events = self._ask("nvmlEventSetCreate")
        if events is None:
            return None
        try:
            self._nvml.nvmlDeviceRegisterEvents(handle, getattr(self._nvml, "nvmlEventTypeXidCriticalError", 8), events)
        except (self._nvml.NVMLError, AttributeError):
            self._ask("nvmlEventSetFree", events)
            return None
        return events

    def _xid_errors(self, gpu: _Gpu) -> tuple[int, ...] | None:
        """The Xid errors so far, with those since the last sample."""
        if gpu.events is None:
            return None
        found = list(gpu.sensors.xid_errors or ())
        for _ in range(_MAX_XIDS):
            event = self._ask("nvmlEventSetWait_v2", gpu.events, 0)
            if event is None:  # none is waiting
                break
            found.append(int(event.eventData))
        return tuple(found[-_MAX_XIDS:])

    def _capability(self, handle: Any) -> tuple[int, int] | None:
        found = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
        return None if found is None else (int(found[0]), int(found[1]))

    def _processors(self, handle: Any, capability: tuple[int, int] | None) -> int | None:
        if part := self._ask("nvmlDeviceGetAttributes_v2", handle):  # which slices alone have
            return int(part.multiprocessorCount)
        generation = _GENERATIONS.get(capability) if capability is not None else None
        cores = self._ask("nvmlDeviceGetNumGpuCores", handle)
        return int(cores) // generation.cores if generation is not None and cores else None

    def _limits(self, handle: Any) -> DeviceLimits | None:
        return nvidia_limits(
            capability=self._capability(handle),
            geforce="geforce" in self._name(handle).lower(),
            cores=self._ask("nvmlDeviceGetNumGpuCores", handle),
            clock_mhz=self._ask("nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK),
            memory_bits=self._ask("nvmlDeviceGetMemoryBusWidth", handle),
            memory_mhz=self._ask("nvmlDeviceGetMaxClockInfo", handle, _MEMORY_CLOCK),
        )

    def _memory(self, gpu: _Gpu) -> _Memory | None:
        """None where the GPU does not answer; logged once, until it does.

        The driver's own memory is no part of the total, as in CUDA's: version 1 of the reading, which an older driver
        or library has alone, counts it as used.
        """
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        memory = self._ask("nvmlDeviceGetMemoryInfo", gpu.handle, version) if version else None
        try:
            memory = memory or self._nvml.nvmlDeviceGetMemoryInfo(gpu.handle)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) == getattr(self._nvml, "NVML_ERROR_NOT_SUPPORTED", 3):
                ram = read_ram()
                return _Memory(ram.total_bytes, ram.free_bytes)
            if gpu.id not in self._silent:
                self._silent.add(gpu.id)
                _log.warning("%s does not answer: %s", gpu.id, error)
            return None
        self._silent.discard(gpu.id)
        total = int(memory.total) - int(getattr(memory, "reserved", 0))
        return _Memory(total, min(total, int(memory.free)))

    def _bytes_by_pid(self, handle: Any) -> Mapping[int, int]:
        """Bytes by process; 0 where the driver does not say. One that computes and draws is named twice."""
        bytes_by_pid: dict[int, int] = {}
        for question in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in self._ask(question, handle) or ():
                bytes_by_pid[process.pid] = max(bytes_by_pid.get(process.pid, 0), process.usedGpuMemory or 0)
        return bytes_by_pid

    def _ask(self, question: str, *arguments: Any) -> Any:
        """NVML's answer; None where this GPU, driver or version of the library has none."""
        function = getattr(self._nvml, question, None)
        if function is None:
            return None
        # Some functions raise this, which is no NVMLError, where the driver has an older one of their kind.
        older = getattr(self._nvml, "NVMLLibraryMismatchError", self._nvml.NVMLError)
        try:
            return function(*arguments)
        except (self._nvml.NVMLError, older):
            return None


def visible_devices(setting: str | None, uuids: Sequence[str]) -> list[int]:
    """Which GPUs CUDA sees, in its order, given CUDA_VISIBLE_DEVICES and the UUIDs of all GPUs (CUDA C++ Programming
    Guide, environment variables: the list ends at the first entry that names no device)."""
    if setting is None:
        return list(range(len(uuids)))
    visible: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdecimal() and int(entry) < len(uuids):
            index = int(entry)
        else:
            index = next((i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)), -1)
        if index < 0 or index in visible:
            break
        visible.append(index)
    return visible


def _name_processes(bytes_by_pid: Mapping[int, int]) -> tuple[ProcessMemory, ...]:
    """Processes by what they hold, most first."""
    largest = sorted(bytes_by_pid.items(), key=lambda item: (-item[1], item[0]))
    return tuple(ProcessMemory(pid=pid, name=_process_name(pid), used_bytes=size) for pid, size in largest)


def _process_name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except (psutil.Error, ValueError):  # gone, another user's, or of another namespace than this container's
        return ""


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _milli(value: int | None) -> float | None:
    return None if value is None else value / 1000
