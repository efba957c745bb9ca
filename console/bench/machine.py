"""The machine and the software that a bench runs on, as results tell it."""

from __future__ import annotations

import platform
from importlib import metadata

import psutil

from console.bench.result import DeviceInfo, MachineInfo, Versions
from engine.devices import MachineProbe, cpu_name, usable_cores


def this_machine() -> MachineInfo:
    """What there is here."""
    return MachineInfo(
        cpu=cpu_name(),
        cores=usable_cores(),
        ram_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        devices=tuple(
            DeviceInfo(id=device.id, name=device.name, kind=device.kind, total_bytes=device.total_bytes)
            for device in MachineProbe().read()
            if device.kind != "cpu"
        ),
    )


def these_versions() -> Versions:
    """What is installed; torch is not imported for it."""
    return Versions(ericllm=_version("ericllm"), python=platform.python_version(), torch=_version("torch"))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
