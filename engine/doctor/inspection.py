"""The doctor of a backend: how it is found, what it offers, and its means to look at a machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import Protocol, TypeVar, cast

import msgspec

import engine.backends
from engine.config import AttentionName
from engine.doctor.facts import Cpu, Facts, Package, Torch
from engine.doctor.report import Finding

S = TypeVar("S", bound=msgspec.Struct)
P = TypeVar("P", bound=Package)


class ProbeFailed(Exception):
    """The probe gave no answer; the message is one clause that says why."""


class BackendDoctor(Protocol):
    """Module `engine/backends/NAME/doctor.py`, which imports neither torch nor the backend's library.

    A package without a backend of its name may have one, too: what several backends need.
    """

    NEEDS_GPU: bool

    def gather(self, inspection: Inspection) -> msgspec.Struct:
        """Look at the machine; the result is in `Facts.backends`. Runs on a thread and may block."""

    def findings(self, facts: Facts, *, wanted: bool) -> Iterator[Finding]:
        """Rows of the report. wanted: whether the machine has a GPU or is to have one. Pure."""

    def lacks(self, facts: Facts) -> str:
        """Why the backend could not run, as a clause; "" where it could. Pure."""

    def probe(self, *arguments: str) -> msgspec.Struct:
        """Import the library and report on it; `Inspection.ask(TYPE, NAME, *arguments)` runs it in a child process."""


def backend_doctors() -> dict[str, BackendDoctor]:
    """Return the doctors of all backends by name, torch first: the others stand on it."""
    package = engine.backends
    names = [each.name for each in pkgutil.iter_modules(package.__path__) if each.ispkg]
    names.sort(key=lambda name: (name != "torch", name))
    modules = {name: f"{package.__name__}.{name}.doctor" for name in names}
    return {
        name: cast(BackendDoctor, importlib.import_module(module))
        for name, module in modules.items()
        if importlib.util.find_spec(module) is not None
    }


class Asking(Protocol):
    """`probe.ask` with its timeout given."""

    def __call__(self, answer: type[S], probe: str, *arguments: str) -> S: ...


class Inspection:
    """Probes of libraries in child processes, several at a time.

    attention: the paged attention that was asked for.
    """

    def __init__(self, pool: Executor, ask: Asking, *, attention: AttentionName, cpu: Cpu) -> None:
        self.attention = attention
        self.cpu = cpu
        self._pool = pool
        self.ask = ask
        self.torch: Future[Torch] = self.package("torch", Torch, "torch")

    def package(self, module: str, kind: type[P], probe: str, *arguments: str) -> Future[P]:
        """Start a probe of a library; where it is not installed, the answer is the default of its kind."""
        return self._pool.submit(self._package, module, kind, probe, *arguments)

    def _package(self, module: str, kind: type[P], probe: str, *arguments: str) -> P:
        """Return the probe's answer; a failing probe is the module's error."""
        if not is_installed(module):
            return kind()
        try:
            found = self.ask(kind, probe, *arguments)
        except ProbeFailed as failure:
            found = kind(installed=True, error=str(failure))
        return msgspec.structs.replace(found, version=found.version or version_of(module))


def is_installed(module: str) -> bool:
    """Return whether `import module` would find something; imports nothing."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def version_of(distribution: str) -> str:
    """Return the installed version, "" where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
