"""A library of CUDA kernels as Python has it: its import, its side effects undone, its failures as one sentence each.

Importing one compiles its kernels where they are not there yet.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import psutil

from engine.backends.base import LoadProgress
from engine.errors import BackendUnavailable, LoadCancelled
from engine.system.files import claim_folder, make_private_folder
from engine.system.install_command import pip_install
from engine.system.memory import read_ram

Report = Callable[[LoadProgress], None]

_DISTRIBUTIONS = {"PIL": "pillow"}
_ENDS_OF_BUILDS = "; other ways: `ericllm doctor`"
_CHANGED_BY_IMPORT = ("CUDA_MODULE_LOADING", "TORCH_CUDA_ARCH_LIST", "TOKENIZERS_PARALLELISM")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LibraryPackage:
    """A library and the module of its kernels, in the one version that a backend is written for.

    modules: what to import.  variables: of the environment, while it is imported.
    count_sources: its folder -> how many files of its kernels are compiled.
    """

    name: str
    version: str
    extension: str
    modules: tuple[str, ...]
    count_sources: Callable[[Path], int]
    variables: Mapping[str, str]

    @property
    def install(self) -> str:
        """The command that installs it."""
        return pip_install(f"{self.name}=={self.version}")

    @property
    def reinstall(self) -> str:
        """The command that puts the package in place of what is installed of it, without kernels."""
        return pip_install("--force-reinstall", "--no-deps", f"{self.name}=={self.version}")

    def folder(self) -> Path:
        """Return where it lies. Raises BackendUnavailable where it does not, or in another version."""
        found = importlib.util.find_spec(self.name)
        if found is None or not found.submodule_search_locations:
            raise _not_installed(self)
        try:
            version = importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            raise _not_installed(self) from None
        if self.is_other_release(version):
            raise _unavailable(
                self,
                f"{self.name} {version} is installed, and this backend is written for {self.version}: `{self.install}`",
            )
        return Path(found.submodule_search_locations[0])

    def is_other_release(self, version: str) -> bool:
        """Return whether `version` of it is not the one that the backend takes, whatever it was built for."""
        return bool(version) and version.partition("+")[0] != self.version

    def planned_build(self) -> KernelBuild:
        """Return where the kernels for this torch and these GPUs are, or would be, compiled: a folder of its own for
        each combination of what the objects depend on. Raises BackendUnavailable as `folder`."""
        import torch

        folder = self.folder()
        capabilities = {torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())}
        cards = os.environ.get("TORCH_CUDA_ARCH_LIST") or "_".join(
            f"sm{major}{minor}" for major, minor in sorted(capabilities)
        )
        versions = (
            f"{self.name}{self.version}",
            f"torch{torch.__version__}",
            f"cuda{torch.version.cuda}",
            f"py{platform.python_version()}",
            cards,
        )
        cache = platformdirs.user_cache_path("ericllm") / "kernels"
        return KernelBuild(cache / _folder_name(versions), self.count_sources(folder), self.extension)

    def load_modules(self) -> None:
        """Import its modules."""
        for name in self.modules:
            importlib.import_module(name)


def import_package(library: LibraryPackage, report: Report, cancelled: Callable[[], bool]) -> None:
    """Import the library, where it is not imported yet, and compile its kernels where they are not there yet.

    report: called with the number of compiled kernel files, on this thread.
    Raises BackendUnavailable and LoadCancelled.
    """
    library.folder()
    import torch

    if not torch.cuda.is_available():
        raise _unavailable(library, f"{library.name} computes on NVIDIA GPUs, and torch {torch.__version__} sees none")
    threads = torch.get_num_threads()
    try:
        if library.name not in sys.modules:
            _first_import(library, report, cancelled)
    finally:
        torch.set_num_threads(threads)


def _first_import(library: LibraryPackage, report: Report, cancelled: Callable[[], bool]) -> None:
    import torch

    build = None if importlib.util.find_spec(library.extension) is not None else library.planned_build()
    variables: dict[str, str | None] = {name: os.environ.get(name) for name in _CHANGED_BY_IMPORT}
    variables |= library.variables
    if build is not None:
        variables |= build_variables(
            build,
            cuda_home=_cuda_home(),
            packages=[Path(torch.__file__).parents[1]],
            free_bytes=read_ram().free_bytes,
        )
    watch = _Watch(build, report, cancelled)
    try:
        with build.locked(watch.wait) if build is not None else nullcontext(), environment(**variables):
            watched(library.load_modules, watch.look)
    except LoadCancelled:
        raise
    except BaseException as error:
        forget_failed_build(library)
        if cancelled():
            raise LoadCancelled("the load was cancelled while kernels were compiled") from None
        _logger.warning("%s could not be imported", library.name, exc_info=error)
        raise explain_import(
            library,
            _cause(library, error),
            torch_version=torch.__version__,
            cuda_version=torch.version.cuda or "?",
        ) from error
    watch.done()


def _cause(library: LibraryPackage, error: BaseException) -> BaseException:
    """A library may swallow why its kernels could not be imported and stumble over their missing name: ask again."""
    if isinstance(error, NameError):
        try:
            importlib.import_module(library.extension)
        except ImportError as cause:
            return cause
    return error


class _Watch:
    """Looks at a build from the thread that waits for it: reports how far it is, ends it where it is cancelled."""

    def __init__(self, build: KernelBuild | None, report: Report, cancelled: Callable[[], bool]) -> None:
        self._build = build
        self._report = report
        self._cancelled = cancelled
        self._reported = False

    def look(self) -> None:
        """Report, or stop the compilers: the import then fails by itself."""
        if self._build is None:
            return
        if self._cancelled():
            self._build.stop()
        elif self._build.begun and self._build.compiled < self._build.sources:
            self._report_files(self._build.compiled)

    def wait(self) -> None:
        """Another process builds: report how far it is. Raises LoadCancelled."""
        if self._cancelled():
            raise LoadCancelled("the load was cancelled while kernels were compiled")
        self.look()
        time.sleep(POLL_S)

    def done(self) -> None:
        """Everything is compiled; said only where anything was said before."""
        if self._reported and self._build is not None:
            self._report_files(self._build.sources)

    def _report_files(self, done: int) -> None:
        self._reported = True
        total = self._build.sources if self._build is not None else done
        self._report(LoadProgress(phase="kernels", done=done, total=total, unit="files"))


# Compiling the library's CUDA kernels, which its first import does: where, with which headers, and how far it is.
#
# The library hands its sources to `torch.utils.cpp_extension.load`, which compiles into TORCH_EXTENSIONS_DIR and guards
# that folder with a file named "lock" that outlives a killed process. Ours is a folder per combination of versions
# under the user's cache, guarded by a lock of the system, which does not.

POLL_S = 0.5

_JOB_BYTES = 2_500_000_000
"""What compiling one file takes at most."""

_LEVELS = 2
"""Folders of ours above the one of a build: see `_build`."""

_HEADERS = ("cublas_v2.h", "cublasLt.h", "cusparse.h", "cusolverDn.h", "curand_kernel.h")


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """Where the kernels of the module `extension` are compiled, and of how many source files."""

    folder: Path
    sources: int
    extension: str

    @property
    def workspace(self) -> Path:
        """Where torch puts objects, build.ninja and the shared object."""
        return self.folder / self.extension

    @property
    def begun(self) -> bool:
        """True if there is something to compile, or was once."""
        return (self.workspace / "build.ninja").is_file()

    @property
    def compiled(self) -> int:
        """Source files that have been compiled."""
        return min(self.sources, sum(1 for _ in self.workspace.glob("*.o")))

    @contextmanager
    def locked(self, wait: Callable[[], None]) -> Iterator[None]:
        """Lock the folder; `wait` is called again and again while another process has it. Raises OSError,
        also where others could write into it.

        The system drops the lock of a process that dies, so its holder may clear what a killed build left.
        """
        claim_folder(self.folder, _LEVELS)
        make_private_folder(self.workspace)
        with (self.folder / "owner").open("w") as owner:
            while not _locked(owner.fileno()):
                wait()
            (self.workspace / "lock").unlink(missing_ok=True)
            yield

    def stop(self) -> None:
        """End the compilers that this process started in the folder; what they finished stays."""
        for child in psutil.Process().children(recursive=True):
            try:
                if Path(child.cwd()) == self.workspace:
                    child.kill()
            except psutil.Error:
                continue


def build_variables(
    build: KernelBuild, *, cuda_home: Path | None, packages: Sequence[Path], free_bytes: int
) -> dict[str, str | None]:
    """Environment variables for the build: its folder, the ninja of an environment that is not activated, no more
    compilers at once than the RAM holds, and the headers that `cuda_home` lacks from the nvidia-* packages that came
    with torch, which lie in `packages`.

    One folder goes into CUDA_INC_PATH, which torch knows; several into CPATH, which every compiler does.
    """
    variables: dict[str, str | None] = {
        "TORCH_EXTENSIONS_DIR": str(build.folder),
        "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")]),
    }
    if "MAX_JOBS" not in os.environ:
        variables["MAX_JOBS"] = str(max(1, min(os.cpu_count() or 1, free_bytes // _JOB_BYTES)))
    folders = missing_headers(cuda_home, packages)
    if len(folders) == 1 and "CUDA_INC_PATH" not in os.environ:
        variables["CUDA_INC_PATH"] = str(folders[0])
    elif folders:
        variables["CPATH"] = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("CPATH")])])
    return variables


def missing_headers(cuda_home: Path | None, packages: Sequence[Path]) -> list[Path]:
    """Folders of nvidia-* packages with the headers that the toolkit in `cuda_home` lacks; the fewest first."""
    missing = [name for name in _HEADERS if cuda_home is None or not (cuda_home / "include" / name).is_file()]
    if not missing:
        return []
    includes = sorted(each for folder in packages for each in folder.glob("nvidia/*/include"))
    for include in includes:
        if all((include / name).is_file() for name in missing):
            return [include]
    return [each for each in includes if any((each / name).is_file() for name in missing)]


def watched(work: Callable[[], None], watch: Callable[[], None], poll_s: float = POLL_S) -> None:
    """Do `work` on a thread of its own, calling `watch` on this one meanwhile; raises what either raised.

    Where `watch` raises, the work is waited for: `watch` has to have stopped it.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="import")
    thread.start()
    try:
        while thread.is_alive():
            watch()
            thread.join(poll_s)
    finally:
        thread.join()
    if failures:
        raise failures[0]


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """os.environ with `variables` (None unsets one), and as it was afterwards whatever happened to them meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    _set_environment(variables)
    try:
        yield
    finally:
        _set_environment(before)


def forget_failed_build(library: LibraryPackage) -> None:
    """Let a second import try again: torch would take the failed build for done, Python keep half of the package."""
    for name in [name for name in sys.modules if name.partition(".")[0] in (library.name, library.extension)]:
        del sys.modules[name]
    extensions = sys.modules.get("torch.utils.cpp_extension")
    entries = getattr(getattr(extensions, "JIT_EXTENSION_VERSIONER", None), "entries", None)
    if isinstance(entries, dict):
        entries.pop(library.extension, None)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _set_environment(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _cuda_home() -> Path | None:
    from torch.utils.cpp_extension import CUDA_HOME

    return Path(CUDA_HOME) if CUDA_HOME else None


def _folder_name(versions: Sequence[str]) -> str:
    return "-".join("".join(c if c.isalnum() or c in "._+" else "_" for c in version) for version in versions)


# Why the library could not be imported, in one sentence that names what to do. Pure.


def explain_import(
    library: LibraryPackage, error: BaseException, *, torch_version: str, cuda_version: str
) -> BackendUnavailable:
    """BackendUnavailable for what the import raised, under these versions of torch and of its CUDA."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or text).partition(".")[0]
        if name == library.name:
            return _not_installed(library)
        install = pip_install(_DISTRIBUTIONS.get(name, name))
        return _unavailable(
            library, f"{library.name} needs the Python package {name}, which is not installed: `{install}`"
        )
    if "undefined symbol" in text or isinstance(error, NameError):
        return _unavailable(
            library,
            f"the installed {library.extension} was built for another torch than {torch_version}; install the wheel "
            f"of {library.name} {library.version} that was built for it, or `{library.reinstall}` to have it compiled "
            "here",
        )
    if "CUDA_HOME" in text:
        return _unavailable(
            library,
            f"{library.name}'s kernels must be compiled, and nvcc is missing: install the CUDA {cuda_version} toolkit "
            f"and set CUDA_HOME to it, or install a wheel with kernels built for torch {torch_version}",
        )
    if "Ninja is required" in text:
        return _unavailable(
            library, f"{library.name}'s kernels must be compiled, and ninja is missing: `{pip_install('ninja')}`"
        )
    if versions := re.search(r"detected CUDA version \(([\d.]+)\).*?compile\s+PyTorch \(([\d.]+)\)", text, re.S):
        return _unavailable(
            library,
            f"nvcc is of CUDA {versions[1]} and torch of CUDA {versions[2]}: install the CUDA {versions[2]} toolkit "
            "and set CUDA_HOME to it",
        )
    if "Error building extension" in text:
        return _unavailable(
            library, f"{library.name}'s kernels could not be compiled: {_compiler_error(text)}{_ENDS_OF_BUILDS}"
        )
    return _unavailable(library, f"{library.name} could not be imported: {type(error).__name__}: {_first_line(text)}")


def _not_installed(library: LibraryPackage) -> BackendUnavailable:
    return _unavailable(library, f"{library.name} is not installed: `{library.install}`")


def _compiler_error(log: str) -> str:
    """The first line of a build's output that is an error, or what says that a program is missing."""
    lines = [line.strip() for line in log.splitlines()]
    for sign in ("not found", "fatal error", "error:", "FAILED"):
        for line in lines:
            if sign in line and not line.startswith("Error building extension"):
                return line[:300]
    return _first_line(log)


def _first_line(text: str) -> str:
    """The first line with anything in it."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def _unavailable(library: LibraryPackage, message: str) -> BackendUnavailable:
    return BackendUnavailable(message, param="backend", value=library.name)
