"""From facts to a report: findings about the machine, its GPUs and torch, and what each backend lacks. Pure: every
machine can be a test."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import get_args

from engine.config import BackendKind
from engine.doctor.facts import Driver, Facts, Gpu
from engine.doctor.inspection import backend_doctors
from engine.doctor.install import MINIMUM_DRIVER, driver_command, torch_command, version_numbers
from engine.doctor.report import Finding, Report, State
from engine.system.install_command import install_extra, pip_install

_INSTRUCTION_SETS = (
    ("AMX-BF16", "amx_bf16"),
    ("AVX512-BF16", "avx512_bf16"),
    ("AVX-512", "avx512f"),
    ("AVX2", "avx2"),
    ("BF16", "bf16"),
    ("SVE", "sve"),
    ("NEON", "asimd"),
)
_SLOW = "torch computes several times slower on a processor without AVX2; use a newer one or a GPU."
_HIDDEN = "CUDA_VISIBLE_DEVICES hides every GPU; show them again with `unset CUDA_VISIBLE_DEVICES`."
_GIB = 1024**3


def examine(facts: Facts, backend: BackendKind) -> Report:
    """Return the report on a machine where `backend` was chosen."""
    doctors = backend_doctors()
    wanted = doctors[backend].NEEDS_GPU or bool(facts.gpus) or facts.driver.card
    kinds: tuple[BackendKind, ...] = get_args(BackendKind)
    lacks = {kind: doctors[kind].lacks(facts) for kind in kinds}
    findings = (
        *machine_findings(facts),
        *gpu_findings(facts),
        *torch_findings(facts, wanted=wanted),
        *(finding for doctor in doctors.values() for finding in doctor.findings(facts, wanted=wanted)),
        _ray_finding(facts),
        *_backend_findings(facts, lacks, backend),
    )
    return Report(findings=findings, lacks=lacks, backend=backend)


def _backend_findings(facts: Facts, lacks: Mapping[BackendKind, str], chosen: BackendKind) -> Iterator[Finding]:
    gpus = facts.torch.gpus
    place = f"on {gpus} GPUs" if gpus > 1 else "on the GPU" if gpus else "on the CPU"
    for backend, lack in lacks.items():
        mark = "chosen, " if backend == chosen else ""
        state: State = "ok" if not lack else "missing" if mark else "note"
        yield Finding("Backends", backend, state, mark + (f"cannot run: {lack}" if lack else f"can run {place}"))


def _ray_finding(facts: Facts) -> Finding:
    if facts.ray.installed:
        return Finding("Cluster", "ray", "ok", facts.ray.version)
    advice = f"For workers on several machines, install it: `{install_extra('ray')}`."
    return Finding("Cluster", "ray", "note", "not installed (needed only for several machines)", advice)


def machine_findings(facts: Facts) -> Iterator[Finding]:
    """Python, processor, RAM."""
    cpu = facts.cpu
    yield Finding("Machine", "Python", "ok", ".".join(map(str, facts.python)))
    yield Finding("Machine", "CPU", "ok", cpu.name or facts.machine)
    sets = ", ".join(name for name, flag in _INSTRUCTION_SETS if flag in cpu.flags) or "plain"
    slow = facts.machine == "x86_64" and cpu.flags and "avx2" not in cpu.flags
    yield Finding("Machine", "Instructions", "note" if slow else "ok", sets, _SLOW if slow else "")
    yield Finding("Machine", "RAM", "ok", _of_gib(cpu.ram_free_bytes, cpu.ram_total_bytes))


def gpu_findings(facts: Facts) -> Iterator[Finding]:
    """The driver and each GPU."""
    yield driver_finding(facts)
    for index, gpu in enumerate(facts.gpus):
        capability = "" if gpu.capability is None else ", capability {}.{}".format(*gpu.capability)
        value = f"{gpu.name}{capability}, {_of_gib(gpu.free_bytes, gpu.total_bytes)}"
        yield Finding("GPU", f"GPU{index}", "ok", value)


def driver_finding(facts: Facts) -> Finding:
    """The driver, and what to do about each of its ways to be missing."""
    driver = facts.driver
    if driver.state == "ok":
        value = f"{driver.version}, runs CUDA up to {driver.cuda}" if driver.cuda else driver.version
        state: State = "note" if driver.hidden else "ok"
        return Finding("GPU", "NVIDIA driver", state, value, _HIDDEN if driver.hidden else "")
    if driver.state == "absent" and not driver.card:
        return Finding("GPU", "NVIDIA driver", "note", "none, and no NVIDIA card: models run on the CPU")
    return Finding("GPU", "NVIDIA driver", *_without_driver(facts))


def _without_driver(facts: Facts) -> tuple[State, str, str]:
    """State, value and advice where there is a card, or a driver that does not work."""
    driver = facts.driver
    if driver.state == "absent" and driver.container:
        return "missing", "none in this container", "Give the container the GPUs: `docker run --gpus all ...`."
    if driver.state == "absent":
        return "missing", "none", f"Install NVIDIA's driver: {driver_command(facts.package_manager)}, then reboot."
    if driver.state == "not loaded":
        return "broken", "installed, but not loaded", "Load it with `sudo modprobe nvidia`, or reboot."
    if driver.state == "mismatched":
        return "broken", "loaded driver is older than its library", "Load the new driver: `sudo reboot`."
    return "broken", driver.detail or "no answer", "See the driver log: `sudo dmesg | grep -i nvrm`."


def torch_findings(facts: Facts, *, wanted: bool) -> Iterator[Finding]:
    """Yield torch, and whether it uses the GPUs that are there. wanted: whether it should be one for CUDA."""
    torch = facts.torch
    if not torch.installed:
        yield Finding("torch", "torch", "missing", "not installed", f"Install it: `{pip_install('torch')}`.")
        return
    if torch.error:
        advice = f"Install it again: `{pip_install('--force-reinstall', 'torch')}`."
        yield Finding("torch", "torch", "broken", f"{torch.version} cannot be imported: {torch.error}".lstrip(), advice)
        return
    if not torch.cuda:
        advice = f"Install torch for CUDA: {torch_command(force=True)}." if wanted else ""
        yield Finding("torch", "torch", "missing" if wanted else "ok", f"{torch.version}, a build for CPUs", advice)
        return
    yield Finding("torch", "torch", "ok", f"{torch.version}, built for CUDA {torch.cuda}")
    if facts.gpus:
        yield use_of_gpus(facts)


def use_of_gpus(facts: Facts) -> Finding:
    """Return whether torch sees the GPUs, and why not."""
    torch = facts.torch
    why = why_no_gpu_is_seen(facts)
    if why:
        return Finding("torch", "GPUs", "broken", why, _visibility_advice(facts))
    strangers = [index for index, gpu in enumerate(facts.gpus) if not has_kernels(gpu, torch.architectures)]
    if strangers:
        names = ", ".join(f"GPU{index} ({facts.gpus[index].name})" for index in strangers)
        advice = f"Install a torch built for it: {torch_command(force=True)}."
        return Finding("torch", "GPUs", "broken", f"no kernels for {names}", advice)
    return Finding("torch", "GPUs", "ok", f"sees {torch.gpus} of {len(facts.gpus)}")


def why_no_gpu_is_seen(facts: Facts) -> str:
    """Why torch sees no GPU, as a clause; "" where it sees some."""
    torch = facts.torch
    if torch.gpus:
        return ""
    if not torch.cuda:
        return "it is a build for CPUs"
    if driver_too_old(facts.driver, torch.cuda):
        return f"torch needs CUDA {torch.cuda}, and driver {facts.driver.version} runs max CUDA {facts.driver.cuda}"
    return f"torch sees none of them: {torch.gpu_error or 'no cause given'}"


def driver_too_old(driver: Driver, cuda: str) -> bool:
    """Return whether the driver's CUDA is of an older major version than `cuda`: newer minors of one major run."""
    return bool(driver.cuda) and version_numbers(driver.cuda)[:1] < version_numbers(cuda)[:1]


def _visibility_advice(facts: Facts) -> str:
    """The sentence that makes torch see the GPUs."""
    torch = facts.torch
    if driver_too_old(facts.driver, torch.cuda):
        first = MINIMUM_DRIVER.get(version_numbers(torch.cuda)[0])
        to = f" to {first} or later" if first else ""
        renew = f"Update the driver{to}: {driver_command(facts.package_manager)}"
        return f"{renew}, or install a torch for this one: {torch_command(force=True)}."
    return "See the error of torch: `python -c 'import torch; torch.cuda.init()'`."


def has_kernels(gpu: Gpu, architectures: tuple[str, ...]) -> bool:
    """Return whether code built for `architectures` runs on `gpu`, True where either is unknown: a binary on the same
    major and a minor as high, PTX on anything newer (CUDA C++ Programming Guide, compatibility)."""
    if gpu.capability is None or not architectures:
        return True
    for kind, number, feature in re.findall(r"\b(sm|compute)_(\d+)([a-z]*)\b", " ".join(architectures)):
        built = divmod(int(number), 10)
        runs_on_newer = not feature and (kind == "compute" or built[0] == gpu.capability[0])  # sm_90a: that GPU alone
        if built == gpu.capability or (runs_on_newer and built <= gpu.capability):
            return True
    return False


def _of_gib(free: int, total: int) -> str:
    return f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"


def torch_lacks(facts: Facts) -> str:
    """Return why torch could not compute, as a clause; "" where it could."""
    if not facts.torch.installed:
        return "torch is not installed"
    return f"torch cannot be imported: {facts.torch.error}" if facts.torch.error else ""


def gpu_lacks(facts: Facts) -> str:
    """Return why torch could not compute on a GPU, as a clause; "" where it could."""
    if not facts.gpus:
        return "it computes on NVIDIA GPUs, and none was found"
    if why := why_no_gpu_is_seen(facts):
        return f"torch does not use the GPUs ({why})"
    if not any(has_kernels(gpu, facts.torch.architectures) for gpu in facts.gpus):
        return f"torch has no kernels for {facts.gpus[0].name}"
    return ""
