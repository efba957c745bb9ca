"""The doctor's findings about attention: flash-attn, Triton, and which paged attention computes on the GPUs."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import msgspec

from engine.backends.common.native_kernels import native_problem, read_native
from engine.backends.paged_attention.choose import AttentionFacts, choose, obstacle
from engine.config import AttentionName
from engine.doctor.facts import Facts, Package
from engine.doctor.inspection import Inspection, ProbeFailed
from engine.doctor.install import version_numbers
from engine.doctor.report import Finding
from engine.errors import InvalidRequest, first_line
from engine.system.install_command import pip_install

NEEDS_GPU = False
UNKNOWN_FLASH_ATTN = (2, 5, 7)
"""Assumed of a flash-attn without a version: the oldest that has pages."""

_AREA = "Attention"
_BUILT_IN_KERNELS = "the built-in paged attention replaces it"


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Which paged attention would compute, tried on every GPU that torch sees, and why that one; or an error."""

    name: str = "gathered"
    reason: str = "there is no CUDA device"
    error: str = ""
    flash_attn: Package = Package()
    triton: Package = Package()


def gather(inspection: Inspection) -> Attention:
    """Look for the optional libraries, and choose; where torch sees GPUs, each is tried there."""
    flash_attn = inspection.package("flash_attn", Package, "package", "flash_attn")
    triton = inspection.package("triton", Package, "package", "triton")
    choice = _choice(inspection)
    return msgspec.structs.replace(choice, flash_attn=flash_attn.result(), triton=triton.result())


def _choice(inspection: Inspection) -> Attention:
    torch = inspection.torch.result()
    problem = native_problem(platform.machine(), inspection.cpu.flags, read_native())
    try:
        if torch.gpus:
            return inspection.ask(Attention, "paged_attention", inspection.attention)
        facts = AttentionFacts(capability=None, torch=version_numbers(torch.version), native_problem=problem)
        choice = choose(inspection.attention, facts)
    except ProbeFailed as failure:
        return Attention(error=f"trying it on the GPUs: {failure}")
    except InvalidRequest as refusal:
        return Attention(error=refusal.message)
    return Attention(name=choice.name, reason=choice.reason)


def probe(*arguments: str) -> Attention:
    """Try the paged attention that `--attention ARGUMENT` comes to on the GPUs that torch sees."""
    import torch

    from engine.backends.paged_attention.probe import engage
    from engine.backends.paged_attention.probe import probe as attention_facts

    (wanted,) = arguments
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    try:
        choice = engage(msgspec.convert(wanted, AttentionName), attention_facts(*devices), devices)
    except Exception as error:
        return Attention(error=first_line(error))
    return Attention(name=choice.name, reason=choice.reason)


def lacks(facts: Facts) -> str:
    """Return why the attention that was asked for cannot be had, as a clause; "" where it can."""
    return facts.backend(Attention).error


def findings(facts: Facts, *, wanted: bool) -> Iterator[Finding]:
    """Yield the optional libraries, and the attention in use."""
    yield _flash_attn_finding(facts)
    if facts.gpus:
        yield _triton_finding(facts.backend(Attention).triton)
    yield _finding_in_use(facts.backend(Attention))


def _flash_attn_finding(facts: Facts) -> Finding:
    """Flash-attn; to lack it is nothing to mend."""
    flash = facts.backend(Attention).flash_attn
    if not flash.installed:
        return Finding(_AREA, "flash-attn", "note", f"not installed, and not needed: {_BUILT_IN_KERNELS}")
    if flash.error:
        advice = "Remove it, or install one that was built for this torch: `pip uninstall flash-attn`."
        value = f"{flash.version} cannot be imported: {flash.error}".lstrip()
        return Finding(_AREA, "flash-attn", "broken", value, advice)
    version = flash.version or "installed"
    unfit = _flash_attn_obstacle(facts)
    value = f"{version}; {unfit}, so {_BUILT_IN_KERNELS}" if unfit else version
    return Finding(_AREA, "flash-attn", "note" if unfit else "ok", value)


def _flash_attn_obstacle(facts: Facts) -> str:
    """Return why flash-attn that can be imported is not used here, as a clause; "" where it is."""
    capabilities = [gpu.capability for gpu in facts.gpus if gpu.capability is not None]
    return obstacle(
        "flash",
        AttentionFacts(
            capability=min(capabilities, default=None),
            torch=version_numbers(facts.torch.version),
            flash=version_numbers(facts.backend(Attention).flash_attn.version) or UNKNOWN_FLASH_ATTN,
        ),
    )


def _triton_finding(triton: Package) -> Finding:
    if not triton.installed:
        return Finding(_AREA, "Triton", "missing", "not installed", f"Install it: `{pip_install('triton')}`.")
    if triton.error:
        advice = f"Install it again: `{pip_install('--force-reinstall', 'triton')}`."
        return Finding(_AREA, "Triton", "broken", f"{triton.version} cannot be imported: {triton.error}", advice)
    return Finding(_AREA, "Triton", "ok", triton.version)


def _finding_in_use(attention: Attention) -> Finding:
    if attention.error:
        return Finding(_AREA, "in use", "broken", attention.error)
    return Finding(_AREA, "in use", "ok", f"{attention.name}: {attention.reason}")
