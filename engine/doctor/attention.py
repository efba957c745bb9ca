"""Findings about attention: flash-attn, Triton, and which paged attention computes on the GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from engine.backends.paged_attention.choose import AttentionFacts, obstacle
from engine.doctor.facts import Facts, Package
from engine.doctor.report import Finding
from engine.doctor.wheels import numbers
from engine.installing import pip_install

UNKNOWN_FLASH_ATTN = (2, 5, 7)
"""What a flash-attn that does not say its version is taken for: the oldest that has pages."""

_AREA = "Attention"
_OURS = "our own paged attention takes its place"


def attention_findings(facts: Facts) -> Iterator[Finding]:
    """The optional libraries, and what is in use."""
    yield flash_attn_finding(facts)
    if facts.gpus:
        yield _triton_finding(facts.triton)
    yield in_use(facts)


def flash_attn_finding(facts: Facts) -> Finding:
    """flash-attn; to lack it is nothing to mend."""
    flash = facts.flash_attn
    if not flash.installed:
        return Finding(_AREA, "flash-attn", "note", f"not installed, and not needed: {_OURS}")
    if flash.error:
        advice = "Remove it, or install one that was built for this torch: `pip uninstall flash-attn`."
        value = f"{flash.version} cannot be imported: {flash.error}".lstrip()
        return Finding(_AREA, "flash-attn", "broken", value, advice)
    version = flash.version or "installed"
    unfit = flash_attn_unfit(facts)
    return Finding(
        _AREA, "flash-attn", "note" if unfit else "ok", f"{version}; {unfit}, so {_OURS}" if unfit else version
    )


def flash_attn_unfit(facts: Facts) -> str:
    """Why flash-attn that can be imported is not used here, as a clause; "" where it is."""
    capabilities = [gpu.capability for gpu in facts.gpus if gpu.capability is not None]
    return obstacle(
        "flash",
        AttentionFacts(
            capability=min(capabilities, default=None),
            torch=numbers(facts.torch.version),
            flash=numbers(facts.flash_attn.version) or UNKNOWN_FLASH_ATTN,
        ),
    )


def in_use(facts: Facts) -> Finding:
    """The paged attention that computes."""
    attention = facts.attention
    if attention.error:
        return Finding(_AREA, "in use", "broken", attention.error)
    return Finding(_AREA, "in use", "ok", f"{attention.name}: {attention.reason}")


def _triton_finding(triton: Package) -> Finding:
    if not triton.installed:
        return Finding(_AREA, "Triton", "missing", "not installed", f"Install it: `{pip_install('triton')}`.")
    if triton.error:
        advice = f"Install it anew: `{pip_install('--force-reinstall', 'triton')}`."
        return Finding(_AREA, "Triton", "broken", f"{triton.version} cannot be imported: {triton.error}", advice)
    return Finding(_AREA, "Triton", "ok", triton.version)
