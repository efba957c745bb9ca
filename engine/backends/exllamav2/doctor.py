"""The doctor's findings about exllamav2: the package, its kernels, and the three ways to them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from engine.backends.exllama.findings import KernelLibrary, LibraryDoctor, join_names, toolchain_lacks
from engine.backends.exllamav2.library import PACKAGE
from engine.backends.paged_attention import doctor as attention
from engine.doctor.examine import gpu_lacks, torch_lacks
from engine.doctor.facts import Facts, Version
from engine.doctor.inspection import Inspection
from engine.doctor.install import ADVISED_CUDA, ADVISED_TORCH, cuda_tag, torch_command, version_numbers
from engine.doctor.report import Finding
from engine.system.install_command import pip_install

NEEDS_GPU = True
NEEDED_MODULES = ("safetensors", "tokenizers", "numpy", "rich", "PIL")
"""Imports of `exllamav2` and `exllamav2.generator` besides torch."""

_WAYS = "Ways to its kernels"


class Exllama(KernelLibrary, frozen=True, kw_only=True):
    """exllamav2 and its compiled kernels."""


_DOCTOR = LibraryDoctor(PACKAGE, Exllama, "ExLlamaV2", "cuda", NEEDED_MODULES)


def gather(inspection: Inspection) -> Exllama:
    """Look at exllamav2, and at the modules that it imports."""
    return _DOCTOR.gather(inspection)


def probe(*arguments: str) -> Exllama:
    """Import exllamav2 with the kernels that are there already.

    flash-attn is kept out: it is looked at on its own, and a broken one would hide what this is about.
    """
    os.environ["EXLLAMA_NO_FLASH_ATTN"] = "1"
    return _DOCTOR.probe()


def lacks(facts: Facts) -> str:
    """Return why the exllamav2 backend could not run: the first thing that it lacks, as a clause; "" where it could."""
    checks = (torch_lacks, gpu_lacks, _DOCTOR.package_lacks, _DOCTOR.kernels_lack, attention.lacks)
    return next(filter(None, (check(facts) for check in checks)), "")


def findings(facts: Facts, *, wanted: bool) -> Iterator[Finding]:
    """The package, its kernels, and what compiling them takes where they are not there yet.

    wanted: whether it matters on this machine; where it does not, what it lacks is a note without advice.
    """
    yield from _DOCTOR.findings(facts, wanted=wanted, build_note=": a minute on 16 cores, seven on 2")
    if wanted and not _DOCTOR.kernels_in_place(facts):
        yield from _DOCTOR.toolchain_findings(facts)
        yield from ways_to_kernels(facts)


def ways_to_kernels(facts: Facts) -> Iterator[Finding]:
    """The three ways, each with its command."""
    wheel = wheel_for(facts.python, facts.machine, facts.torch.version, facts.torch.cuda)
    if wheel:
        yield Finding(_WAYS, "1 prebuilt", "note", wheel, f"Install the wheel: `{pip_install(f'{RELEASE}/{wheel}')}`.")
    else:
        yield Finding(_WAYS, "1 prebuilt", "note", _no_wheel(facts), f"Install a torch with one: {torch_command()}.")
    lacking = toolchain_lacks(facts)
    ready = f"{facts.toolchain.compiler_version} and nvcc {facts.toolchain.nvcc_version} are here"
    value = f"lacks {join_names(lacking)}" if lacking else ready
    advice = "" if lacking else "Nothing to do: loading the first EXL2 model compiles them."
    yield Finding(_WAYS, "2 compiled", "note", value, advice)
    yield _kept_way(facts)


def _kept_way(facts: Facts) -> Finding:
    """Where compiled kernels are kept, and how another machine gets them."""
    kept_at = facts.backend(Exllama).kept_at
    if not kept_at:
        return Finding(_WAYS, "3 kept", "note", f"compiled once, stored in {facts.kernel_cache}")
    copy = f"`scp HOST:{kept_at} {facts.site_packages}/`"
    advice = f"Copy it from a machine with the same Python, torch and GPUs: {copy}."
    return Finding(_WAYS, "3 kept", "note", f"compiled once, stored as {kept_at}", advice)


def _no_wheel(facts: Facts) -> str:
    newest = ".".join(map(str, ADVISED_TORCH))
    if facts.machine != "x86_64":
        return f"none for {facts.machine}: prebuilt kernels exist for x86_64 only"
    torch = f"torch {facts.torch.version.partition('+')[0]}" if facts.torch.version else "no torch"
    cuda = f"CUDA {facts.torch.cuda}" if facts.torch.cuda else "no CUDA"
    python = ".".join(map(str, facts.python[:2]))
    return f"none for {torch} with {cuda} on Python {python}: the newest are for torch {newest}, CUDA {ADVISED_CUDA}"


# The prebuilt wheels: one per Python, torch and CUDA, for Linux on x86_64.
#
# Source: the build matrix of the project's release workflow, and the files of release v0.3.2.

RELEASE = f"https://github.com/turboderp-org/exllamav2/releases/download/v{PACKAGE.version}"
PYTHONS = ((3, 11), (3, 12), (3, 13))
CUDA_BY_TORCH: dict[Version, tuple[str, ...]] = {
    (2, 6): ("12.4", "11.8"),
    (2, 7): ("12.8",),
    (2, 8): ("12.8",),
    ADVISED_TORCH: (ADVISED_CUDA,),
}


def wheel_for(python: Version, machine: str, torch: str, cuda: str) -> str:
    """The file name of the wheel for this Python, processor, torch and CUDA; "" where the release has none."""
    release = version_numbers(torch)[:2]
    if machine != "x86_64" or python[:2] not in PYTHONS or cuda not in CUDA_BY_TORCH.get(release, ()):
        return ""
    tag = "cp" + "".join(map(str, python[:2]))
    built_for = f"{cuda_tag(cuda)}.torch{'.'.join(map(str, release))}.0"
    return f"exllamav2-{PACKAGE.version}+{built_for}-{tag}-{tag}-linux_x86_64.whl"
