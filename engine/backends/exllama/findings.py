"""The doctor's findings about a library of CUDA kernels: the package, its kernels, and what compiling them takes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Generic, Literal, TypeVar

import msgspec

from engine.backends.exllama.package import LibraryPackage
from engine.doctor.facts import Facts, Package
from engine.doctor.inspection import Inspection, is_installed
from engine.doctor.install import ADVISED_CUDA, system_command, version_numbers
from engine.doctor.report import Finding, State
from engine.errors import first_line
from engine.system.install_command import install_extra, pip_install


class KernelLibrary(Package, frozen=True, kw_only=True):
    """A library and its compiled kernels; `error` is about the package with its kernels in place.

    missing_modules: modules it imports that are not installed.
    kernels: "prebuilt" is its module of kernels on the path, "kept" one compiled here before.
    kernels_error: why the kernels that are there cannot be loaded.
    kept_at: the file that compiling for this torch and these GPUs makes, there or not; "" where that is unknown.
    """

    missing_modules: tuple[str, ...] = ()
    kernels: Literal["prebuilt", "kept", ""] = ""
    kernels_error: str = ""
    kept_at: str = ""


L = TypeVar("L", bound=KernelLibrary)


@dataclass(frozen=True, slots=True)
class LibraryDoctor(Generic[L]):
    """Looks at one library. kind: its facts.  area: the part of the report.  extra: of our package, which installs it.

    needs: imports of the library besides torch.
    """

    package: LibraryPackage
    kind: type[L]
    area: str
    extra: str
    needs: tuple[str, ...]

    def gather(self, inspection: Inspection) -> L:
        """Look at the library, and at the modules that it imports."""
        name = self.package.name
        found = inspection.package(name, self.kind, name).result()
        missing = tuple(module for module in self.needs if not is_installed(module)) if found.installed else ()
        return msgspec.structs.replace(found, missing_modules=missing)

    def probe(self) -> L:
        """Import the library with the kernels that are there already: without any it is not, since that compiles
        them."""
        package, found = self.package, self.kind(installed=True)
        try:
            kept_at = package.planned_build().workspace / f"{package.extension}.so"
            found = msgspec.structs.replace(found, kept_at=str(kept_at))
            if importlib.util.find_spec(package.extension) is not None:
                found = msgspec.structs.replace(found, kernels="prebuilt")
            elif kept_at.is_file():
                found = msgspec.structs.replace(found, kernels="kept")
                sys.path.insert(0, str(kept_at.parent))
            else:
                return found
        except Exception as error:
            return msgspec.structs.replace(found, error=first_line(error))
        try:
            importlib.import_module(package.extension)
        except Exception as error:
            return msgspec.structs.replace(found, kernels_error=first_line(error))
        try:
            package.load_modules()
        except Exception as error:
            return msgspec.structs.replace(found, error=first_line(error))
        return found

    def package_lacks(self, facts: Facts) -> str:
        """Return what is wrong with the package, as a clause; "" for nothing."""
        package, library = self.package, facts.backend(self.kind)
        if not library.installed:
            return f"the package {package.name} is not installed"
        if library.missing_modules:
            return f"{package.name} imports {join_names(library.missing_modules)}, which is not installed"
        if package.is_other_release(library.version):
            return f"{package.name} {library.version} is installed, and the backend is written for {package.version}"
        return f"{package.name} cannot be imported: {library.error}" if library.error else ""

    def kernels_lack(self, facts: Facts) -> str:
        """Return what is wrong with its kernels, as a clause; "" for nothing."""
        library = facts.backend(self.kind)
        if library.kernels_error:
            return f"its kernels cannot be loaded: {library.kernels_error}"
        if self.kernels_in_place(facts):
            return ""
        lacking = toolchain_lacks(facts)
        return f"its kernels are not compiled, and compiling them lacks {join_names(lacking)}" if lacking else ""

    def kernels_in_place(self, facts: Facts) -> bool:
        """Return whether compiled kernels are there that load. Those compiled here before are loaded through torch's
        compiler driver, which wants its tools even where nothing is left to compile."""
        library = facts.backend(self.kind)
        loadable = library.kernels == "prebuilt" or (library.kernels == "kept" and not toolchain_lacks(facts))
        return loadable and not library.kernels_error

    def findings(self, facts: Facts, *, wanted: bool, build_note: str) -> Iterator[Finding]:
        """Yield the package and its kernels; without advice where they do not matter on this machine.

        build_note: said of kernels that the first load compiles.
        """
        if not wanted:
            library = facts.backend(self.kind)
            have = f"{library.version} installed" if library.installed else "not installed"
            value = f"{have}; it computes on NVIDIA GPUs, and there is none"
            yield Finding(self.area, self.package.name, "note", value)
            return
        yield self._package_finding(facts)
        yield self._kernels_finding(facts, build_note)

    def toolchain_findings(self, facts: Facts) -> Iterator[Finding]:
        """Yield what compiling the kernels takes."""
        return _toolchain_findings(facts, self.area)

    def _package_finding(self, facts: Facts) -> Finding:
        package, library = self.package, facts.backend(self.kind)
        if not library.installed:
            advice = f"Install it: `{install_extra(self.extra)}`."
            return Finding(self.area, package.name, "missing", "not installed", advice)
        if library.missing_modules:
            names = ["pillow" if name == "PIL" else name for name in library.missing_modules]
            value = f"{library.version}, without {' '.join(names)}"
            return Finding(self.area, package.name, "missing", value, f"Install: `{pip_install(*names)}`.")
        if package.is_other_release(library.version):
            value = f"{library.version}, and this backend is written for {package.version}"
            return Finding(self.area, package.name, "broken", value, f"Install that: `{package.reinstall}`.")
        if library.error:
            value = f"{library.version} cannot be imported: {library.error}"
            return Finding(self.area, package.name, "broken", value, f"Install it again: `{package.reinstall}`.")
        return Finding(self.area, package.name, "ok", library.version)

    def _kernels_finding(self, facts: Facts, build_note: str) -> Finding:
        library, lacking = facts.backend(self.kind), toolchain_lacks(facts)
        if library.kernels_error:
            return self._broken_kernels(facts)
        if self.kernels_in_place(facts):
            compiled_here = library.kernels == "kept"
            value = f"compiled here, stored as {library.kept_at}" if compiled_here else "prebuilt for this torch"
            return Finding(self.area, "kernels", "ok", value)
        if library.kernels == "kept":
            advice = f"Put them where Python finds them by itself: `cp {library.kept_at} {facts.site_packages}/`."
            value = f"compiled here, but loading them lacks {join_names(lacking)}"
            return Finding(self.area, "kernels", "missing", value, advice)
        if lacking:
            value = f"not compiled, and compiling them lacks {join_names(lacking)}"
            return Finding(self.area, "kernels", "missing", value)
        return Finding(self.area, "kernels", "note", f"compiled at the first load{build_note}")

    def _broken_kernels(self, facts: Facts) -> Finding:
        library = facts.backend(self.kind)
        value = f"present, but cannot be loaded: {library.kernels_error}"
        if library.kernels == "kept":
            advice = f"Remove them, so that they are compiled again: `rm {library.kept_at}`."
        else:
            advice = f"Install the package without kernels: `{self.package.reinstall}`."
        return Finding(self.area, "kernels", "broken", value, advice)


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


def _toolchain_findings(facts: Facts, area: str) -> Iterator[Finding]:
    tools, manager = facts.toolchain, facts.package_manager
    yield _nvcc_finding(facts, area)
    compiler = system_command(manager, "compiler")
    yield _tool(area, "C++ compiler", tools.compiler_version or tools.compiler, f"Install one: {compiler}.")
    path_advice = f"It is not on PATH: `export PATH={PurePath(tools.ninja_off_path).parent}:$PATH`."
    yield _tool(
        area, "ninja", tools.ninja, path_advice if tools.ninja_off_path else f"Install it: `{pip_install('ninja')}`."
    )
    headers = system_command(manager, "python headers", python=facts.python)
    yield _tool(area, "Python.h", "found" if tools.python_headers else "", f"Install Python's headers: {headers}.")
    if tools.nvcc and tools.missing_headers:
        yield Finding(
            area, "CUDA headers", "missing", f"no {_shortened(tools.missing_headers)}", _headers_advice(facts)
        )


def _nvcc_finding(facts: Facts, area: str) -> Finding:
    tools = facts.toolchain
    wanted = facts.torch.cuda or ADVISED_CUDA
    install = system_command(facts.package_manager, "toolkit", cuda=wanted)
    if not tools.nvcc:
        return Finding(area, "nvcc", "missing", "not found", f"Install the CUDA toolkit of torch: {install}.")
    if tools.nvcc_error:
        value = f"{tools.nvcc} does not run: {tools.nvcc_error}"
        return Finding(area, "nvcc", "broken", value, f"Install the CUDA toolkit again: {install}.")
    mismatch = _mismatch(facts)
    value = f"{tools.nvcc_version} ({tools.nvcc})"
    if mismatch:
        return Finding(area, "nvcc", "broken", f"{value}, {mismatch}", f"Install the toolkit of torch: {install}.")
    return Finding(area, "nvcc", "ok", value)


def _mismatch(facts: Facts) -> str:
    """Why this nvcc cannot compile for this torch; torch refuses another major version, a minor one it accepts."""
    compiled, wanted = facts.toolchain.nvcc_version, facts.torch.cuda
    if not compiled or not wanted or version_numbers(compiled)[:1] == version_numbers(wanted)[:1]:
        return ""
    return f"but torch is built for CUDA {wanted}"


def _headers_advice(facts: Facts) -> str:
    toolkit = facts.toolchain.other_toolkit
    if toolkit:
        return f"Set the path of the complete toolkit: `export CUDA_HOME={toolkit}`."
    install = system_command(facts.package_manager, "toolkit", cuda=facts.toolchain.nvcc_version)
    return f"Install the complete toolkit: {install}."


def _tool(area: str, name: str, value: str, advice: str) -> Finding:
    state: State = "ok" if value else "missing"
    return Finding(area, name, state, value or "not found", "" if value else advice)


def _shortened(names: tuple[str, ...]) -> str:
    """The first of them, and how many more."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def join_names(names: tuple[str, ...]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
