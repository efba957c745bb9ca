"""Findings about exllamav2, and the three ways to its kernels. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from engine.backends.exllamav2.errors import VERSION, reinstall
from engine.doctor.facts import Facts
from engine.doctor.install import (
    NEWEST_CUDA,
    NEWEST_TORCH,
    system_command,
    torch_command,
    version_numbers,
    wheel_for,
    wheel_url,
)
from engine.doctor.report import Finding, State
from engine.system.install_command import install_extra, pip_install

_AREA = "ExLlamaV2"
_WAYS = "Ways to its kernels"


def exllama_findings(facts: Facts, *, wanted: bool) -> Iterator[Finding]:
    """The package, its kernels, and what compiling them takes where they are not there yet.

    wanted: whether it matters on this machine; where it does not, what it lacks is a note without advice.
    """
    if not wanted:
        have = f"{facts.exllama.version} installed" if facts.exllama.installed else "not installed"
        yield Finding(_AREA, "exllamav2", "note", f"{have}; it computes on NVIDIA GPUs, and there is none")
        return
    yield _package_finding(facts)
    yield _kernels_finding(facts)
    if not kernels_in_place(facts):
        yield from _toolchain_findings(facts)
        yield from ways_to_kernels(facts)


def kernels_in_place(facts: Facts) -> bool:
    """Whether compiled kernels are there that load. Those compiled here before are loaded through torch's compiler
    driver, which wants its tools even where nothing is left to compile."""
    exllama = facts.exllama
    loadable = exllama.kernels == "prebuilt" or (exllama.kernels == "kept" and not toolchain_lacks(facts))
    return loadable and not exllama.kernels_error


def other_release(version: str) -> bool:
    """Whether `version` of exllamav2 is not the one that the backend takes, whatever it was built for."""
    return bool(version) and version.partition("+")[0] != VERSION


def toolchain_lacks(facts: Facts) -> tuple[str, ...]:
    """What compiling the kernels for this torch lacks, each in a word or two."""
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
        yield Finding(_WAYS, "1 prebuilt", "note", wheel, f"Install the wheel: `{pip_install(wheel_url(wheel))}`.")
    else:
        yield Finding(_WAYS, "1 prebuilt", "note", _no_wheel(facts), f"Take a torch that has one: {torch_command()}.")
    lacking = toolchain_lacks(facts)
    ready = f"{facts.toolchain.compiler_version} and nvcc {facts.toolchain.nvcc_version} are here"
    value = f"lacks {join_names(lacking)}" if lacking else ready
    advice = "" if lacking else "Nothing to do: loading the first EXL2 model compiles them."
    yield Finding(_WAYS, "2 compiled", "note", value, advice)
    yield _kept_way(facts)


def _kept_way(facts: Facts) -> Finding:
    """Where compiled kernels are kept, and how another machine gets them."""
    kept_at = facts.exllama.kept_at
    if not kept_at:
        return Finding(_WAYS, "3 kept", "note", f"compiled once, they are kept under {facts.kernel_cache}")
    copy = f"`scp HOST:{kept_at} {facts.site_packages}/`"
    advice = f"Copy it from a machine with the same Python, torch and GPUs: {copy}."
    return Finding(_WAYS, "3 kept", "note", f"compiled once, they are kept as {kept_at}", advice)


def _package_finding(facts: Facts) -> Finding:
    exllama = facts.exllama
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
        advice = f"Install it anew: `{reinstall()}`."
        return Finding(_AREA, "exllamav2", "broken", f"{exllama.version} cannot be imported: {exllama.error}", advice)
    return Finding(_AREA, "exllamav2", "ok", exllama.version)


def _kernels_finding(facts: Facts) -> Finding:
    exllama, lacking = facts.exllama, toolchain_lacks(facts)
    if exllama.kernels_error:
        return _broken_kernels(facts)
    if kernels_in_place(facts):
        kept = f"compiled here, kept as {exllama.kept_at}"
        return Finding(
            _AREA, "kernels", "ok", kept if exllama.kernels == "kept" else "prebuilt, and fit for this torch"
        )
    if exllama.kernels == "kept":
        advice = f"Put them where Python finds them by itself: `cp {exllama.kept_at} {facts.site_packages}/`."
        return Finding(
            _AREA, "kernels", "missing", f"compiled here, but loading them lacks {join_names(lacking)}", advice
        )
    if lacking:
        return Finding(_AREA, "kernels", "missing", f"not compiled, and compiling them lacks {join_names(lacking)}")
    return Finding(_AREA, "kernels", "note", "compiled at the first load: a minute on 16 cores, seven on 2")


def _broken_kernels(facts: Facts) -> Finding:
    value = f"there, but not loadable: {facts.exllama.kernels_error}"
    if facts.exllama.kernels == "kept":
        advice = f"Remove them, so that they are compiled anew: `rm {facts.exllama.kept_at}`."
    else:
        advice = f"Take the package without kernels: `{reinstall()}`."
    return Finding(_AREA, "kernels", "broken", value, advice)


def _toolchain_findings(facts: Facts) -> Iterator[Finding]:
    tools, manager = facts.toolchain, facts.package_manager
    yield _nvcc_finding(facts)
    compiler = system_command(manager, "compiler")
    yield _tool("C++ compiler", tools.compiler_version or tools.compiler, f"Install one: {compiler}.")
    beside = f"It is not on PATH: `export PATH={PurePath(tools.ninja_off_path).parent}:$PATH`."
    yield _tool("ninja", tools.ninja, beside if tools.ninja_off_path else f"Install it: `{pip_install('ninja')}`.")
    headers = system_command(manager, "python headers", python=facts.python)
    yield _tool("Python.h", "found" if tools.python_headers else "", f"Install Python's headers: {headers}.")
    if tools.nvcc and tools.missing_headers:
        yield Finding(
            _AREA, "CUDA headers", "missing", f"no {_shortened(tools.missing_headers)}", _headers_advice(facts)
        )


def _nvcc_finding(facts: Facts) -> Finding:
    tools = facts.toolchain
    wanted = facts.torch.cuda or NEWEST_CUDA
    install = system_command(facts.package_manager, "toolkit", cuda=wanted)
    if not tools.nvcc:
        return Finding(_AREA, "nvcc", "missing", "not found", f"Install the CUDA toolkit of torch: {install}.")
    if tools.nvcc_error:
        value = f"{tools.nvcc} does not run: {tools.nvcc_error}"
        return Finding(_AREA, "nvcc", "broken", value, f"Install the CUDA toolkit anew: {install}.")
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
    newest = ".".join(map(str, NEWEST_TORCH))
    if facts.machine != "x86_64":
        return f"none for {facts.machine}: they exist for x86_64 alone"
    torch = f"torch {facts.torch.version.partition('+')[0]}" if facts.torch.version else "no torch"
    cuda = f"CUDA {facts.torch.cuda}" if facts.torch.cuda else "no CUDA"
    python = ".".join(map(str, facts.python[:2]))
    return f"none for {torch} with {cuda} on Python {python}: they exist up to torch {newest}, with CUDA {NEWEST_CUDA}"


def _headers_advice(facts: Facts) -> str:
    toolkit = facts.toolchain.other_toolkit
    if toolkit:
        return f"Say where the whole toolkit is: `export CUDA_HOME={toolkit}`."
    install = system_command(facts.package_manager, "toolkit", cuda=facts.toolchain.nvcc_version)
    return f"Install the whole toolkit: {install}."


def _tool(name: str, value: str, advice: str) -> Finding:
    state: State = "ok" if value else "missing"
    return Finding(_AREA, name, state, value or "not found", "" if value else advice)


def _shortened(names: tuple[str, ...]) -> str:
    """The first of them, and how many more."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def join_names(names: tuple[str, ...]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
