"""What multiplies by a model's weights on the CPU: our own kernels, or torch's. Pure."""

from __future__ import annotations

from engine.backends.torch.native.available import Native, instruction_set
from engine.doctor.facts import Cpu, Facts
from engine.doctor.install import system_command
from engine.doctor.report import Finding

_AREA, _NAME = "torch", "linear layers"


def native_finding(facts: Facts) -> Finding:
    """The kernels that a model in bfloat16 would use on this CPU, and what they lack; to lack them is no fault."""
    native, kernels = facts.native, instruction_set(facts.machine, facts.cpu.flags)
    if not kernels:
        return Finding(_AREA, _NAME, "ok", "torch's own kernels: ours need AVX2 on x86-64 Linux")
    if native.off:
        advice = "Use them again: `unset ERICLLM_NATIVE`."
        return Finding(_AREA, _NAME, "note", "torch's own kernels: ERICLLM_NATIVE keeps ours off", advice)
    if kernels in native.kept:
        return Finding(_AREA, _NAME, "ok", f"native {kernels} kernels for bfloat16, compiled")
    if native.compiler and native.folder_problem:
        value = f"torch's own kernels: ours cannot be kept, as {native.folder_problem}"
        return Finding(_AREA, _NAME, "note", value, "Name a folder that can be written in ERICLLM_HOME.")
    if native.compiler:
        value = f"native {kernels} kernels for bfloat16, which the first load compiles with {native.compiler}"
        return Finding(_AREA, _NAME, "ok", value)
    advice = f"To compute faster on the CPU, install one: {system_command(facts.package_manager, 'compiler')}."
    return Finding(_AREA, _NAME, "note", "torch's own kernels: there is no C++ compiler to make ours with", advice)


def native_attention_problem(machine: str, cpu: Cpu, native: Native) -> str:
    """Why native attention would not compute on this CPU, as a clause; "" where it would."""
    kernels = instruction_set(machine, cpu.flags)
    if not kernels:
        return "the native kernels need AVX2 on x86-64 Linux"
    if native.off:
        return "ERICLLM_NATIVE keeps the native kernels off"
    if kernels in native.kept:
        return ""
    if native.compiler:
        return native.folder_problem
    return "there is no C++ compiler to make the native kernels with"
