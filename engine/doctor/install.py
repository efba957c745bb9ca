"""The commands that install things, by the system's package manager. Advice, never run."""

from __future__ import annotations

from typing import Literal

from engine.doctor.facts import PackageManager, Version
from engine.system.install_command import pip_install

# The prebuilt wheels of exllamav2 0.3.2: one per Python, torch and CUDA, for Linux on x86_64.
#
# Source: the build matrix of the project's release workflow, and the files of release v0.3.2.

RELEASE = "https://github.com/turboderp-org/exllamav2/releases/download/v0.3.2"
PYTHONS = ((3, 11), (3, 12), (3, 13))
CUDA_BY_TORCH: dict[Version, tuple[str, ...]] = {
    (2, 6): ("12.4", "11.8"),
    (2, 7): ("12.8",),
    (2, 8): ("12.8",),
    (2, 9): ("12.8",),
}
NEWEST_TORCH = max(CUDA_BY_TORCH)
NEWEST_CUDA = CUDA_BY_TORCH[NEWEST_TORCH][0]


def version_numbers(version: str) -> Version:
    """ "2.9.1+cu128" -> (2, 9, 1); what is no number ends it."""
    found: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)


def cuda_tag(cuda: str) -> str:
    """ "12.8" -> "cu128"."""
    return "cu" + "".join(cuda.split(".")[:2])


def wheel_for(python: Version, machine: str, torch: str, cuda: str) -> str:
    """The file name of the wheel for this Python, processor, torch and CUDA; "" where the release has none."""
    release = version_numbers(torch)[:2]
    if machine != "x86_64" or python[:2] not in PYTHONS or cuda not in CUDA_BY_TORCH.get(release, ()):
        return ""
    tag = "cp" + "".join(map(str, python[:2]))
    return f"exllamav2-0.3.2+{cuda_tag(cuda)}.torch{'.'.join(map(str, release))}.0-{tag}-{tag}-linux_x86_64.whl"


def wheel_url(wheel: str) -> str:
    """Where `wheel` is fetched."""
    return f"{RELEASE}/{wheel}"


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
