"""From facts to a report. Pure: every machine can be a test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from engine.config import BackendKind
from engine.doctor.facts import Facts
from engine.doctor.inspection import backend_doctors
from engine.doctor.machine import gpu_findings, machine_findings, torch_findings
from engine.doctor.report import Finding, Report
from engine.system.install_command import install_extra


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
        if lack:
            yield Finding("Backends", backend, "missing" if mark else "note", f"{mark}cannot run: {lack}")
        else:
            yield Finding("Backends", backend, "ok", f"{mark}can run {place}")


def _ray_finding(facts: Facts) -> Finding:
    if facts.ray.installed:
        return Finding("Cluster", "ray", "ok", facts.ray.version)
    advice = f"For workers on several machines, install it: `{install_extra('ray')}`."
    return Finding("Cluster", "ray", "note", "not installed, and not needed on one machine", advice)
