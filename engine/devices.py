"""What the machine's devices say of themselves: the host through psutil, NVIDIA GPUs through NVML."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import psutil

from engine.ram import read_ram
from engine.snapshot import DeviceReading

_log = logging.getLogger("engine")
T = TypeVar("T")


class DeviceProbe(Protocol):
    """Reads devices. Blocking; called on a thread of its own, never twice at once."""

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """Every device now. work_bytes is all that the processes `pids` hold there, weights and KV pages included;
        the rest in use is others_bytes."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's workers say they hold on one device."""

    weights_bytes: int = 0
    kv_bytes: int = 0


def split_memory(reading: DeviceReading, claim: Claim) -> DeviceReading:
    """Take weights and KV pages out of what our processes hold; the five parts still sum to the total.

    Claims are cut to what is really in use: a mapped file that was not read yet takes no memory.
    """
    used = reading.total_bytes - reading.free_bytes
    ours = min(used, max(reading.work_bytes, claim.weights_bytes + claim.kv_bytes))
    weights = min(claim.weights_bytes, ours)
    kv = min(claim.kv_bytes, ours - weights)
    return msgspec.structs.replace(
        reading,
        weights_bytes=weights,
        kv_bytes=kv,
        work_bytes=ours - weights - kv,
        others_bytes=used - ours,
    )


class HostProbe:
    """The CPU and the RAM as one device, "cpu"."""

    def __init__(self) -> None:
        self._name = cpu_name()
        psutil.cpu_percent(None)

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """One reading; utilisation is that since the last call."""
        ram = read_ram()
        used = ram.total_bytes - ram.free_bytes
        ours = min(used, sum(map(_resident_bytes, set(pids))))
        return (
            DeviceReading(
                id="cpu",
                name=self._name,
                kind="cpu",
                utilisation=psutil.cpu_percent(None) / 100,
                total_bytes=ram.total_bytes,
                work_bytes=ours,
                others_bytes=used - ours,
                free_bytes=ram.free_bytes,
            ),
        )


class NvmlProbe:
    """NVIDIA GPUs that CUDA may use, as "cuda:0" and on. None where the library, the driver or a GPU is missing.

    A reading that a GPU does not support (utilisation under MIG, power on some laptops) is None.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handles = self._find_handles(os.environ.get("CUDA_VISIBLE_DEVICES"))
        except Exception as error:  # NVMLError's class is only known once the library is there
            _log.debug("no NVIDIA GPU: %s", error)

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """One reading per GPU that answers."""
        readings = (self._read(index, handle, frozenset(pids)) for index, handle in enumerate(self._handles))
        return tuple(reading for reading in readings if reading is not None)

    def _find_handles(self, setting: str | None) -> list[Any]:
        """The devices that CUDA sees: GPUs, or the slices of a MIG GPU that it is told to use."""
        nvml = self._nvml
        if setting is not None and "MIG-" in setting:
            slices = [self._ask(nvml.nvmlDeviceGetHandleByUUID, name.strip()) for name in setting.split(",")]
            return [handle for handle in slices if handle is not None]
        every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [self._ask(nvml.nvmlDeviceGetUUID, handle) or "" for handle in every]
        return [every[index] for index in visible_devices(setting, uuids)]

    def _read(self, index: int, handle: Any, pids: frozenset[int]) -> DeviceReading | None:
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is None:
            return None
        utilisation = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        processes = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
        held = sum(process.usedGpuMemory or 0 for process in processes if process.pid in pids)
        used = int(memory.total) - int(memory.free)
        ours = min(used, held)
        name = self._ask(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"
        temperature = self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        return DeviceReading(
            id=f"cuda:{index}",
            name=name.decode() if isinstance(name, bytes) else name,
            kind="cuda",
            utilisation=None if utilisation is None else utilisation.gpu / 100,
            total_bytes=int(memory.total),
            work_bytes=ours,
            others_bytes=used - ours,
            free_bytes=int(memory.free),
            temperature_c=temperature,
            power_w=_milli(self._ask(nvml.nvmlDeviceGetPowerUsage, handle)),
            power_limit_w=_milli(self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        )

    def _ask(self, question: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None


class MachineProbe:
    """Every device of this machine: its GPUs, then the host."""

    def __init__(self) -> None:
        self._probes: tuple[DeviceProbe, ...] = (NvmlProbe(), HostProbe())

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """All readings."""
        return tuple(reading for probe in self._probes for reading in probe.read(pids))


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


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model name, with its number of logical cores."""
    cores = psutil.cpu_count() or 1
    name = platform.processor() or platform.machine() or "CPU"
    try:
        fields: Mapping[str, str] = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in cpuinfo.read_text(encoding="utf-8").splitlines())
        }
        name = fields.get("model name") or name
    except OSError:
        pass  # not Linux
    return f"{name}, {cores} cores" if cores > 1 else name


def computable(devices: Sequence[DeviceReading]) -> list[DeviceReading]:
    """Those that the installed torch can compute on: a build for CPUs sees no GPU. Does not import torch."""
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec is not None else None
    cuda = any(any(Path(place, "lib").glob("*torch_cuda*")) for place in places or ())
    return [device for device in devices if device.kind != "cuda" or cuda]


def usable_cores() -> int:
    """CPU cores this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _milli(value: int | None) -> float | None:
    return None if value is None else value / 1000
