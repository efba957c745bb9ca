"""Facts about a machine: plain values, so that every machine can be written down in a test."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)
Version = tuple[int, ...]
PackageManager = Literal["apt", "dnf", "pacman", "zypper", ""]
DriverState = Literal["ok", "absent", "not loaded", "mismatched", "failing"]


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A library. version: "" where it does not say.  error: why importing it fails, "" where it does not."""

    installed: bool = False
    version: str = ""
    error: str = ""


class Torch(Package, frozen=True, kw_only=True):
    """torch. cuda: version it was built for, "" for a CPU build.  gpus: how many it sees.

    gpu_error: what it says when asked for the GPUs.  architectures: what its kernels were built for ("sm_90").
    """

    cuda: str = ""
    gpus: int = 0
    gpu_error: str = ""
    architectures: tuple[str, ...] = ()


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """NVIDIA's driver, as NVML reports it. cuda: the newest CUDA it runs.  detail: NVML's own words when it fails.

    card: whether the PCI bus holds an NVIDIA display adapter, driver or not.
    container: whether this is one, whose driver would come from its host.
    hidden: GPUs that CUDA_VISIBLE_DEVICES keeps from us.
    """

    state: DriverState = "absent"
    version: str = ""
    cuda: str = ""
    detail: str = ""
    card: bool = False
    container: bool = False
    hidden: int = 0


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that CUDA may use. capability: (9, 0) for sm_90; None where the driver does not say."""

    name: str
    capability: tuple[int, int] | None
    total_bytes: int
    free_bytes: int


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """The processor, as this process may use it, and the RAM. flags: the kernel's names of its instruction sets."""

    name: str = ""
    cores: int = 1
    flags: frozenset[str] = frozenset()
    ram_total_bytes: int = 0
    ram_free_bytes: int = 0


class Toolchain(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that compiling CUDA extensions takes. A path is "" where there is no such program.

    ninja_off_path: where it is besides, since torch looks on PATH alone.  python_headers: whether Python.h is there.
    missing_headers: of CUDA's, those that the build would not find.
    other_toolkit: a CUDA toolkit on this machine that has them, "" where none does.
    """

    nvcc: str = ""
    nvcc_version: str = ""
    nvcc_error: str = ""
    compiler: str = ""
    compiler_version: str = ""
    ninja: str = ""
    ninja_off_path: str = ""
    python_headers: bool = False
    missing_headers: tuple[str, ...] = ()
    other_toolkit: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. site_packages: where Python finds compiled modules.  kernel_cache: where kernels are compiled.

    backends: what the doctor of each backend gathered.
    """

    python: Version = (3, 11, 0)
    machine: str = "x86_64"
    site_packages: str = ""
    kernel_cache: str = ""
    package_manager: PackageManager = ""
    cpu: Cpu = Cpu()
    driver: Driver = Driver()
    gpus: tuple[Gpu, ...] = ()
    torch: Torch = Torch()
    toolchain: Toolchain = Toolchain()
    ray: Package = Package()
    backends: tuple[msgspec.Struct, ...] = ()

    def backend(self, kind: type[S]) -> S:
        """Return the facts of a backend by their class, its defaults where there are none."""
        return next((facts for facts in self.backends if isinstance(facts, kind)), kind())
