"""The commands that install things, by the system's package manager. Advice, never run."""

from __future__ import annotations

from typing import Literal

from engine.doctor.facts import PackageManager, Version
from engine.doctor.wheels import NEWEST_CUDA, NEWEST_TORCH, cuda_tag
from engine.installing import pip_install

System = Literal["driver", "toolkit", "compiler", "python headers"]

MINIMUM_DRIVER = {11: "450", 12: "525", 13: "580"}
"""The first driver that runs each major CUDA (NVIDIA's CUDA compatibility guide, minor version compatibility)."""

_INSTALL: dict[PackageManager, str] = {
    "apt": "sudo apt install",
    "dnf": "sudo dnf install",
    "zypper": "sudo zypper install",
    "pacman": "sudo pacman -S",
    "": "conda install -c conda-forge",
}


def system_command(manager: PackageManager, what: System, *, python: Version = (), cuda: str = "") -> str:
    """The command for something of the system's. cuda: the toolkit's version, like "13.0"."""
    major, minor = (*python, 3, 11)[:2]
    toolkit = f"cuda-toolkit-{cuda.replace('.', '-')}"
    names: dict[System, dict[PackageManager, str]] = {
        "driver": {"apt": "cuda-drivers", "dnf": "cuda-drivers", "zypper": "cuda-drivers", "pacman": "nvidia-open"},
        "toolkit": {"apt": toolkit, "dnf": toolkit, "zypper": toolkit, "pacman": "cuda", "": f"cuda-toolkit={cuda}"},
        "compiler": {"apt": "g++", "dnf": "gcc-c++", "zypper": "gcc-c++", "pacman": "gcc", "": "cxx-compiler"},
        "python headers": {
            "apt": f"python{major}.{minor}-dev",
            "dnf": f"python{major}.{minor}-devel",
            "zypper": f"python{major}{minor}-devel",
            "pacman": "python",
            "": f"python={major}.{minor}",
        },
    }
    return f"`{_INSTALL[manager]} {names[what][manager]}`"


def driver_command(manager: PackageManager) -> str:
    """How to get or renew NVIDIA's driver."""
    if not manager:
        return "take it from https://www.nvidia.com/drivers"
    return system_command(manager, "driver")


def torch_command(*, force: bool = False) -> str:
    """torch for GPUs: the newest release that exllamav2 has prebuilt kernels for."""
    release = ".".join(map(str, NEWEST_TORCH))
    again = ["--force-reinstall"] if force else []
    index = f"https://download.pytorch.org/whl/{cuda_tag(NEWEST_CUDA)}"
    return f"`{pip_install(*again, f'torch=={release}.*', '--index-url', index)}`"
