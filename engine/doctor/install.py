"""The commands that install things, by the system's package manager. Advice, never run."""

from __future__ import annotations

from typing import Literal

from engine.doctor.facts import PackageManager, Version
from engine.system.install_command import pip_install

ADVISED_TORCH: Version = (2, 9)
ADVISED_CUDA = "12.8"
"""The newest torch, and its CUDA, that every backend runs on."""


def version_numbers(version: str) -> Version:
    """ "2.9.1+cu128" -> (2, 9, 1); what is not a number ends it."""
    found: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)


def cuda_tag(cuda: str) -> str:
    """ "12.8" -> "cu128"."""
    return "cu" + "".join(cuda.split(".")[:2])


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
        return "get it from https://www.nvidia.com/drivers"
    return system_command(manager, "driver")


def torch_command(*, force: bool = False) -> str:
    """Return the command for torch on GPUs: the newest release that all backends run on."""
    release = ".".join(map(str, ADVISED_TORCH))
    again = ["--force-reinstall"] if force else []
    index = f"https://download.pytorch.org/whl/{cuda_tag(ADVISED_CUDA)}"
    return f"`{pip_install(*again, f'torch=={release}.*', '--index-url', index)}`"
