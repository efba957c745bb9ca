"""The doctor's view of torch, and of the kernels that multiply by a model's weights on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine.backends.common.native_kernels import Native, instruction_set, read_native
from engine.backends.paged_attention import doctor as attention
from engine.doctor.examine import torch_lacks
from engine.doctor.facts import Facts, Torch
from engine.doctor.inspection import Inspection
from engine.doctor.install import system_command
from engine.doctor.report import Finding
from engine.errors import first_line
from engine.system.install_command import install_extra

NEEDS_GPU = False

_AREA, _NAME = "torch", "linear layers"


def gather(inspection: Inspection) -> Native:
    """Look for compiled kernels and for a compiler."""
    return read_native()


def lacks(facts: Facts) -> str:
    """Return why the torch backend could not run, as a clause; "" where it could."""
    return torch_lacks(facts) or attention.lacks(facts)


def findings(facts: Facts, *, wanted: bool) -> Iterator[Finding]:
    """Yield the kernels that a model in bfloat16 would use on this CPU; to lack some is no fault."""
    native = facts.backend(Native)
    kernels = instruction_set(facts.machine, facts.cpu.flags, native.capability)
    if not kernels:
        yield Finding(_AREA, _NAME, "ok", "torch's kernels: the native ones need AVX2 on x86-64 Linux")
    elif native.off:
        advice = "Use them again: `unset ERICLLM_NATIVE`."
        yield Finding(_AREA, _NAME, "note", "torch's kernels: ERICLLM_NATIVE disables the native ones", advice)
    elif kernels in native.compiled:
        yield Finding(_AREA, _NAME, "ok", f"native {kernels} kernels for bfloat16, compiled on this machine")
    elif kernels in native.shipped:
        yield Finding(_AREA, _NAME, "ok", f"native {kernels} kernels for bfloat16, from the installed wheel")
    elif native.compiler and native.folder_problem:
        value = f"torch's kernels: the native ones cannot be saved, as {native.folder_problem}"
        yield Finding(_AREA, _NAME, "note", value, "Name a folder that can be written in ERICLLM_HOME.")
    elif native.compiler:
        value = f"native {kernels} kernels for bfloat16, which the first load compiles with {native.compiler}"
        yield Finding(_AREA, _NAME, "ok", value)
    else:
        value = "torch's kernels: there is no C++ compiler"
        command = system_command(facts.package_manager, "compiler")
        advice = f"To compute faster on the CPU, install one: `{install_extra('compiler')}`, or {command}."
        yield Finding(_AREA, _NAME, "note", value, advice)


def probe(*arguments: str) -> Torch:
    """Import torch, and look at the GPUs that it sees."""
    try:
        import torch
    except Exception as error:
        return Torch(installed=True, error=first_line(error))
    found = Torch(installed=True, version=str(torch.__version__), cuda=torch.version.cuda or "")
    if not found.cuda:
        return found
    try:
        torch.cuda.init()
        architectures = tuple(torch.cuda.get_arch_list())
        return msgspec.structs.replace(found, gpus=torch.cuda.device_count(), architectures=architectures)
    except Exception as error:
        return msgspec.structs.replace(found, gpu_error=first_line(error))
