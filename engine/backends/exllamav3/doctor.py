"""The doctor's findings about exllamav3: the package and its kernels."""

from __future__ import annotations

from collections.abc import Iterator

from engine.backends.exllama.findings import KernelLibrary, LibraryDoctor
from engine.backends.exllamav3.library import PACKAGE
from engine.doctor.examine import gpu_lacks, torch_lacks
from engine.doctor.facts import Facts
from engine.doctor.inspection import Inspection
from engine.doctor.report import Finding
from engine.system.install_command import install_extra

NEEDS_GPU = True
NEEDED_MODULES = ("safetensors", "tokenizers", "numpy", "rich", "PIL", "pydantic", "triton", "marisa_trie")
"""Imports of `exllamav3` and `exllamav3.generator` besides torch."""

MIN_CAPABILITY = (7, 5)
"""Compute capability of the oldest GPUs that its kernels are written for: Turing."""


class Exllama3(KernelLibrary, frozen=True, kw_only=True):
    """exllamav3 and its compiled kernels."""


_DOCTOR = LibraryDoctor(PACKAGE, Exllama3, "ExLlamaV3", "exl3", NEEDED_MODULES)


def gather(inspection: Inspection) -> Exllama3:
    """Look at exllamav3, and at the modules that it imports."""
    return _DOCTOR.gather(inspection)


def probe(*arguments: str) -> Exllama3:
    """Import exllamav3 with the kernels that are there already."""
    return _DOCTOR.probe()


def lacks(facts: Facts) -> str:
    """Return why the exllamav3 backend could not run: the first thing that it lacks, as a clause; "" where it could."""
    checks = (torch_lacks, gpu_lacks, _cards_lack, _DOCTOR.package_lacks, _DOCTOR.kernels_lack)
    return next(filter(None, (check(facts) for check in checks)), "")


def findings(facts: Facts, *, wanted: bool) -> Iterator[Finding]:
    """The package, and its kernels where it is installed: without it, the torch backend reads EXL3."""
    if wanted and not facts.backend(Exllama3).installed:
        value = "not installed (needed only to compute from the packed weights of EXL3)"
        advice = f"To compute from them, install it: `{install_extra('exl3')}`."
        yield Finding("ExLlamaV3", PACKAGE.name, "note", value, advice)
        return
    yield from _DOCTOR.findings(facts, wanted=wanted, build_note="")
    if wanted and not _DOCTOR.kernels_in_place(facts):
        yield from _DOCTOR.toolchain_findings(facts)


def _cards_lack(facts: Facts) -> str:
    """Return why its kernels run on none of the GPUs, as a clause; "" where they do."""
    old = [gpu for gpu in facts.gpus if gpu.capability is not None and gpu.capability < MIN_CAPABILITY]
    if not old or len(old) < len(facts.gpus):
        return ""
    wanted, found = (".".join(map(str, each)) for each in (MIN_CAPABILITY, old[0].capability or ()))
    return f"it needs a GPU of compute capability {wanted} or more, and {old[0].name} has {found}"
