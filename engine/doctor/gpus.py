"""The NVIDIA driver and its GPUs, as NVML tells: no CUDA context is made and torch is not needed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.devices import visible_devices
from engine.doctor.facts import Driver, DriverState, Gpu

T = TypeVar("T")
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"
PCI_DEVICES = Path("/sys/bus/pci/devices")
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


def read_gpus(nvml: Any = None, environ: Mapping[str, str] = os.environ) -> tuple[Driver, tuple[Gpu, ...]]:
    """The driver, and the GPUs that CUDA may use in its order. nvml: the pynvml module; None imports it."""
    nvml = nvml if nvml is not None else importlib.import_module("pynvml")
    place = Driver(card=has_card(), container=any(mark.exists() for mark in CONTAINER_MARKS))
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return msgspec.structs.replace(place, state=_state(nvml, error), detail=str(error)), ()
    handles = _handles(nvml)
    visible = _visible(nvml, handles, environ.get("CUDA_VISIBLE_DEVICES"))
    driver = msgspec.structs.replace(
        place,
        state="ok",
        version=_text(_ask(nvml, nvml.nvmlSystemGetDriverVersion) or ""),
        cuda=_cuda(_ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2) or 0),
        hidden=0 if visible else len(handles),
    )
    gpus = tuple(gpu for gpu in (_gpu(nvml, handle) for handle in visible) if gpu is not None)
    return driver, gpus


def has_card(folder: Path = PCI_DEVICES) -> bool:
    """Whether the PCI bus holds an NVIDIA display adapter."""
    try:
        devices = list(folder.iterdir())
    except OSError:
        return False
    return any(
        _content(device / "vendor") == NVIDIA_VENDOR and _content(device / "class").startswith(DISPLAY_CLASS)
        for device in devices
    )


def _state(nvml: Any, error: Any) -> DriverState:
    """Which of NVML's ways to fail this is."""
    states: dict[int, DriverState] = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "absent",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "not loaded",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "mismatched",
    }
    return states.get(error.value, "failing")


def _handles(nvml: Any) -> list[Any]:
    count = _ask(nvml, nvml.nvmlDeviceGetCount) or 0
    handles = (_ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count))
    return [handle for handle in handles if handle is not None]


def _visible(nvml: Any, handles: list[Any], setting: str | None) -> list[Any]:
    """Those that CUDA_VISIBLE_DEVICES leaves, or the slices of a MIG GPU that it names."""
    if setting is not None and "MIG-" in setting:
        slices = (_ask(nvml, nvml.nvmlDeviceGetHandleByUUID, name.strip()) for name in setting.split(","))
        return [handle for handle in slices if handle is not None]
    uuids = [_text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or "") for handle in handles]
    return [handles[index] for index in visible_devices(setting, uuids)]


def _gpu(nvml: Any, handle: Any) -> Gpu | None:
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        return None
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Gpu(
        name=_text(_ask(nvml, nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
    )


def _ask(nvml: Any, question: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _cuda(number: int) -> str:
    """13020 -> "13.2"; 0 -> ""."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _content(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
