"""From facts to a report. Pure: every machine can be a test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.backends.exllama.import_faults import VERSION
from engine.config import BackendKind
from engine.doctor.attention import attention_findings
from engine.doctor.facts import Facts
from engine.doctor.kernels import exllama_findings, kernels_in_place, listed, other_release, toolchain_lacks
from engine.doctor.machine import blind, gpu_findings, has_kernels, machine_findings, torch_findings
from engine.doctor.native import native_finding
from engine.doctor.report import Finding, Report
from engine.installing import install_extra


def examine(facts: Facts, backend: BackendKind) -> Report:
    """What `facts` mean on a machine where `backend` was chosen."""
    wanted = backend == "exllamav2" or bool(facts.gpus) or facts.driver.card
    lacks: dict[BackendKind, str] = {"torch": torch_lacks(facts), "exllamav2": exllama_lacks(facts)}
    findings = (
        *machine_findings(facts),
        *gpu_findings(facts),
        *torch_findings(facts, wanted=wanted),
        native_finding(facts),
        *exllama_findings(facts, wanted=wanted),
        *attention_findings(facts),
        _ray_finding(facts),
        *_backend_findings(facts, lacks, backend),
    )
    return Report(findings=findings, lacks=lacks, backend=backend)


def torch_lacks(facts: Facts) -> str:
    """Why the torch backend could not run, as a clause; "" where it could."""
    return _torch_lacks(facts) or facts.attention.error


def exllama_lacks(facts: Facts) -> str:
    """Why the exllamav2 backend could not run: the first of what it lacks, as a clause; "" where it could."""
    looked_at = (_torch_lacks, _gpu_lacks, _package_lacks, _kernels_lack)
    return next(filter(None, (lacks(facts) for lacks in looked_at)), facts.attention.error)


def _torch_lacks(facts: Facts) -> str:
    if not facts.torch.installed:
        return "torch is not installed"
    return f"torch cannot be imported: {facts.torch.error}" if facts.torch.error else ""


def _package_lacks(facts: Facts) -> str:
    exllama = facts.exllama
    if not exllama.installed:
        return "the package exllamav2 is not installed"
    if exllama.missing_modules:
        return f"exllamav2 imports {listed(exllama.missing_modules)}, which is not installed"
    if other_release(exllama.version):
        return f"exllamav2 {exllama.version} is installed, and the backend is written for {VERSION}"
    return f"exllamav2 cannot be imported: {exllama.error}" if exllama.error else ""


def _gpu_lacks(facts: Facts) -> str:
    if not facts.gpus:
        return "it computes on NVIDIA GPUs, and none was found"
    if why := blind(facts):
        return f"torch does not use the GPUs ({why})"
    if not any(has_kernels(gpu, facts.torch.architectures) for gpu in facts.gpus):
        return f"torch has no kernels for {facts.gpus[0].name}"
    return ""


def _kernels_lack(facts: Facts) -> str:
    exllama = facts.exllama
    if exllama.kernels_error:
        return f"its kernels cannot be loaded: {exllama.kernels_error}"
    if kernels_in_place(facts):
        return ""
    lacking = toolchain_lacks(facts)
    return f"its kernels are not compiled, and compiling them lacks {listed(lacking)}" if lacking else ""


def _backend_findings(facts: Facts, lacks: Mapping[BackendKind, str], chosen: BackendKind) -> Iterator[Finding]:
    gpus = facts.torch.gpus
    place = f"on {gpus} GPUs" if gpus > 1 else "on the GPU" if gpus else "on the CPU"
    for backend, lack in lacks.items():
        mark = "chosen, " if backend == chosen else ""
        if lack:
            yield Finding("Backends", backend, "missing" if mark else "note", f"{mark}cannot run: {lack}")
        else:
            yield Finding("Backends", backend, "ok", f"{mark}can run {place}")


def _ray_finding(facts: Facts) -> Finding:
    if facts.ray.installed:
        return Finding("Cluster", "ray", "ok", facts.ray.version)
    advice = f"For workers on several machines, install it: `{install_extra('ray')}`."
    return Finding("Cluster", "ray", "note", "not installed, and not needed on one machine", advice)
