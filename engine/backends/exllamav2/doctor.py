"""The doctor's findings about exllamav2: the package, its kernels, and the three ways to them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import PurePath
from typing import Literal

import msgspec

from engine.backends.exllamav2.library import EXTENSION, VERSION, planned_build, reinstall
from engine.backends.paged_attention import doctor as attention
from engine.doctor.examine import gpu_lacks, torch_lacks
from engine.doctor.facts import Facts, Package, Version
from engine.doctor.inspection import Inspection, is_installed
from engine.doctor.install import ADVISED_CUDA, ADVISED_TORCH, cuda_tag, system_command, torch_command, version_numbers
from engine.doctor.report import Finding, State
from engine.errors import first_line
from engine.system.install_command import install_extra, pip_install

NEEDS_GPU = True
NEEDED_MODULES = ("safetensors", "tokenizers", "numpy", "rich", "PIL")
"""Imports of `exllamav2` and `exllamav2.generator` besides torch."""

_AREA = "ExLlamaV2"
_WAYS = "Ways to its kernels"


class Exllama(Package, frozen=True, kw_only=True):
    """exllamav2 and its compiled kernels; `error` is about the package with its kernels in place.

    missing_modules: modules it imports that are not installed.
    kernels: "prebuilt" is a module exllamav2_ext on the path, "kept" one compiled here before.
    kernels_error: why the kernels that are there cannot be loaded.
    kept_at: the file that compiling for this torch and these GPUs makes, there or not; "" where that is unknown.
    """

    missing_modules: tuple[str, ...] = ()
    kernels: Literal["prebuilt", "kept", ""] = ""
    kernels_error: str = ""
    kept_at: str = ""


def gather(inspection: Inspection) -> Exllama:
    """Look at exllamav2, and at the modules that it imports."""
    found = inspection.package("exllamav2", Exllama, "exllamav2").result()
    missing = tuple(name for name in NEEDED_MODULES if not is_installed(name)) if found.installed else ()
    return msgspec.structs.replace(found, missing_modules=missing)


def probe(*arguments: str) -> Exllama:
    """Import exllamav2 with the kernels that are there already: without any it is not, since that compiles them.

    flash-attn is kept out: it is looked at on its own, and a broken one would hide what this is about.
    """
    os.environ["EXLLAMA_NO_FLASH_ATTN"] = "1"
    found = Exllama(installed=True)
    try:
        kept_at = planned_build().workspace / f"{EXTENSION}.so"
        found = msgspec.structs.replace(found, kept_at=str(kept_at))
        if importlib.util.find_spec(EXTENSION) is not None:
            found = msgspec.structs.replace(found, kernels="prebuilt")
        elif kept_at.is_file():
            found = msgspec.structs.replace(found, kernels="kept")
            sys.path.insert(0, str(kept_at.parent))
        else:
            return found
    except Exception as error:
        return msgspec.structs.replace(found, error=first_line(error))
    try:
        importlib.import_module(EXTENSION)
    except Exception as error:
        return msgspec.structs.replace(found, kernels_error=first_line(error))
    try:
        importlib.import_module("exllamav2.generator")
    except Exception as error:
        return msgspec.structs.replace(found, error=first_line(error))
    return found


def lacks(facts: Facts) -> str:
    """Return why the exllamav2 backend could not run: the first thing that it lacks, as a clause; "" where it could."""
    checks = (torch_lacks, gpu_lacks, _package_lacks, _kernels_lack, attention.lacks)
    return next(filter(None, (check(facts) for check in checks)), "")


def _package_lacks(facts: Facts) -> str:
    exllama = facts.backend(Exllama)
    if not exllama.installed:
        return "the package exllamav2 is not installed"
    if exllama.missing_modules:
        return f"exllamav2 imports {join_names(exllama.missing_modules)}, which is not installed"
    if other_release(exllama.version):
        return f"exllamav2 {exllama.version} is installed, and the backend is written for {VERSION}"
    return f"exllamav2 cannot be imported: {exllama.error}" if exllama.error else ""


def _kernels_lack(facts: Facts) -> str:
    exllama = facts.backend(Exllama)
    if exllama.kernels_error:
        return f"its kernels cannot be loaded: {exllama.kernels_error}"
    if kernels_in_place(facts):
        return ""
    lacking = toolchain_lacks(facts)
    return f"its kernels are not compiled, and compiling them lacks {join_names(lacking)}" if lacking else ""


def findings(facts: Facts, *, wanted: bool) -> Iterator[Finding]:
    """The package, its kernels, and what compiling them takes where they are not there yet.

    wanted: whether it matters on this machine; where it does not, what it lacks is a note without advice.
    """
    if not wanted:
        have = f"{facts.backend(Exllama).version} installed" if facts.backend(Exllama).installed else "not installed"
        yield Finding(_AREA, "exllamav2", "note", f"{have}; it computes on NVIDIA GPUs, and there is none")
        return
    yield _package_finding(facts)
    yield _kernels_finding(facts)
    if not kernels_in_place(facts):
        yield from _toolchain_findings(facts)
        yield from ways_to_kernels(facts)


def kernels_in_place(facts: Facts) -> bool:
    """Return whether compiled kernels are there that load. Those compiled here before are loaded through torch's
    compiler driver, which wants its tools even where nothing is left to compile."""
    exllama = facts.backend(Exllama)
    loadable = exllama.kernels == "prebuilt" or (exllama.kernels == "kept" and not toolchain_lacks(facts))
    return loadable and not exllama.kernels_error


def other_release(version: str) -> bool:
    """Return whether `version` of exllamav2 is not the one that the backend takes, whatever it was built for."""
    return bool(version) and version.partition("+")[0] != VERSION


def toolchain_lacks(facts: Facts) -> tuple[str, ...]:
    """Return what compiling the kernels for this torch lacks, each in a word or two."""
    tools = facts.toolchain
    lacks = {
        "a torch for CUDA": not facts.torch.cuda,
        "nvcc": not tools.nvcc or bool(tools.nvcc_error),
        f"an nvcc for CUDA {facts.torch.cuda}": bool(_mismatch(facts)),
        "a C++ compiler": not tools.compiler,
        "ninja": not tools.ninja,
        "Python.h": not tools.python_headers,
        "CUDA's headers": bool(tools.nvcc) and bool(tools.missing_headers),
    }
    return tuple(name for name, lacking in lacks.items() if lacking)


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


def _package_finding(facts: Facts) -> Finding:
    exllama = facts.backend(Exllama)
    if not exllama.installed:
        advice = f"Install it: `{install_extra('cuda')}`."
        return Finding(_AREA, "exllamav2", "missing", "not installed", advice)
    if exllama.missing_modules:
        names = ["pillow" if name == "PIL" else name for name in exllama.missing_modules]
        value = f"{exllama.version}, without {' '.join(names)}"
        return Finding(_AREA, "exllamav2", "missing", value, f"Install: `{pip_install(*names)}`.")
    if other_release(exllama.version):
        value = f"{exllama.version}, and this backend is written for {VERSION}"
        return Finding(_AREA, "exllamav2", "broken", value, f"Install that: `{reinstall()}`.")
    if exllama.error:
        advice = f"Install it again: `{reinstall()}`."
        return Finding(_AREA, "exllamav2", "broken", f"{exllama.version} cannot be imported: {exllama.error}", advice)
    return Finding(_AREA, "exllamav2", "ok", exllama.version)


def _kernels_finding(facts: Facts) -> Finding:
    exllama, lacking = facts.backend(Exllama), toolchain_lacks(facts)
    if exllama.kernels_error:
        return _broken_kernels(facts)
    if kernels_in_place(facts):
        compiled_here = exllama.kernels == "kept"
        value = f"compiled here, stored as {exllama.kept_at}" if compiled_here else "prebuilt for this torch"
        return Finding(_AREA, "kernels", "ok", value)
    if exllama.kernels == "kept":
        advice = f"Put them where Python finds them by itself: `cp {exllama.kept_at} {facts.site_packages}/`."
        return Finding(
            _AREA, "kernels", "missing", f"compiled here, but loading them lacks {join_names(lacking)}", advice
        )
    if lacking:
        return Finding(_AREA, "kernels", "missing", f"not compiled, and compiling them lacks {join_names(lacking)}")
    return Finding(_AREA, "kernels", "note", "compiled at the first load: a minute on 16 cores, seven on 2")


def _broken_kernels(facts: Facts) -> Finding:
    value = f"present, but cannot be loaded: {facts.backend(Exllama).kernels_error}"
    if facts.backend(Exllama).kernels == "kept":
        advice = f"Remove them, so that they are compiled again: `rm {facts.backend(Exllama).kept_at}`."
    else:
        advice = f"Install the package without kernels: `{reinstall()}`."
    return Finding(_AREA, "kernels", "broken", value, advice)


def _toolchain_findings(facts: Facts) -> Iterator[Finding]:
    tools, manager = facts.toolchain, facts.package_manager
    yield _nvcc_finding(facts)
    compiler = system_command(manager, "compiler")
    yield _tool("C++ compiler", tools.compiler_version or tools.compiler, f"Install one: {compiler}.")
    path_advice = f"It is not on PATH: `export PATH={PurePath(tools.ninja_off_path).parent}:$PATH`."
    yield _tool("ninja", tools.ninja, path_advice if tools.ninja_off_path else f"Install it: `{pip_install('ninja')}`.")
    headers = system_command(manager, "python headers", python=facts.python)
    yield _tool("Python.h", "found" if tools.python_headers else "", f"Install Python's headers: {headers}.")
    if tools.nvcc and tools.missing_headers:
        yield Finding(
            _AREA, "CUDA headers", "missing", f"no {_shortened(tools.missing_headers)}", _headers_advice(facts)
        )


def _nvcc_finding(facts: Facts) -> Finding:
    tools = facts.toolchain
    wanted = facts.torch.cuda or ADVISED_CUDA
    install = system_command(facts.package_manager, "toolkit", cuda=wanted)
    if not tools.nvcc:
        return Finding(_AREA, "nvcc", "missing", "not found", f"Install the CUDA toolkit of torch: {install}.")
    if tools.nvcc_error:
        value = f"{tools.nvcc} does not run: {tools.nvcc_error}"
        return Finding(_AREA, "nvcc", "broken", value, f"Install the CUDA toolkit again: {install}.")
    mismatch = _mismatch(facts)
    value = f"{tools.nvcc_version} ({tools.nvcc})"
    if mismatch:
        return Finding(_AREA, "nvcc", "broken", f"{value}, {mismatch}", f"Install the toolkit of torch: {install}.")
    return Finding(_AREA, "nvcc", "ok", value)


def _mismatch(facts: Facts) -> str:
    """Why this nvcc cannot compile for this torch; torch refuses another major version, a minor one it accepts."""
    compiled, wanted = facts.toolchain.nvcc_version, facts.torch.cuda
    if not compiled or not wanted or version_numbers(compiled)[:1] == version_numbers(wanted)[:1]:
        return ""
    return f"but torch is built for CUDA {wanted}"


def _no_wheel(facts: Facts) -> str:
    newest = ".".join(map(str, ADVISED_TORCH))
    if facts.machine != "x86_64":
        return f"none for {facts.machine}: prebuilt kernels exist for x86_64 only"
    torch = f"torch {facts.torch.version.partition('+')[0]}" if facts.torch.version else "no torch"
    cuda = f"CUDA {facts.torch.cuda}" if facts.torch.cuda else "no CUDA"
    python = ".".join(map(str, facts.python[:2]))
    return f"none for {torch} with {cuda} on Python {python}: the newest are for torch {newest}, CUDA {ADVISED_CUDA}"


def _headers_advice(facts: Facts) -> str:
    toolkit = facts.toolchain.other_toolkit
    if toolkit:
        return f"Set the path of the complete toolkit: `export CUDA_HOME={toolkit}`."
    install = system_command(facts.package_manager, "toolkit", cuda=facts.toolchain.nvcc_version)
    return f"Install the complete toolkit: {install}."


def _tool(name: str, value: str, advice: str) -> Finding:
    state: State = "ok" if value else "missing"
    return Finding(_AREA, name, state, value or "not found", "" if value else advice)


def _shortened(names: tuple[str, ...]) -> str:
    """The first of them, and how many more."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def join_names(names: tuple[str, ...]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


# The prebuilt wheels: one per Python, torch and CUDA, for Linux on x86_64.
#
# Source: the build matrix of the project's release workflow, and the files of release v0.3.2.

RELEASE = f"https://github.com/turboderp-org/exllamav2/releases/download/v{VERSION}"
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
    return f"exllamav2-{VERSION}+{cuda_tag(cuda)}.torch{'.'.join(map(str, release))}.0-{tag}-{tag}-linux_x86_64.whl"
