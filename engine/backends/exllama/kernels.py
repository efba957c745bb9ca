"""Compiling the library's CUDA kernels, which its first import does: where, with which headers, and how far it is.

The library hands its sources to `torch.utils.cpp_extension.load`, which compiles into TORCH_EXTENSIONS_DIR and guards
that folder with a file named "lock" that outlives a killed process. Ours is a folder per combination of versions under
the user's cache, guarded by a lock of the system, which does not.
"""

from __future__ import annotations

import ast
import fcntl
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.files import claim_folder, make_private_folder

EXTENSION = "exllamav2_ext"
POLL_S = 0.5

_JOB_BYTES = 2_500_000_000
"""What compiling one file takes at most."""

_LEVELS = 2
"""Folders of ours above the one of a build: see `library._build`."""

_HEADERS = ("cublas_v2.h", "cublasLt.h", "cusparse.h", "cusolverDn.h", "curand_kernel.h")


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """Where the kernels are compiled, and of how many source files."""

    folder: Path
    sources: int

    @property
    def workspace(self) -> Path:
        """Where torch puts objects, build.ninja and the shared object."""
        return self.folder / EXTENSION

    @property
    def begun(self) -> bool:
        """Whether there is something to compile, or was once."""
        return (self.workspace / "build.ninja").is_file()

    @property
    def compiled(self) -> int:
        """Source files that have been compiled."""
        return min(self.sources, sum(1 for _ in self.workspace.glob("*.o")))

    @contextmanager
    def held(self, wait: Callable[[], None]) -> Iterator[None]:
        """Have the folder to ourselves; `wait` is called again and again while another process has it. Raises OSError,
        also where others could write into it.

        The system drops the lock of a process that dies, so whoever holds it may clear what a killed build left.
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


def kernel_build(package: Path, cache: Path, *versions: str) -> KernelBuild:
    """The build of the package in `package`, under `cache`, in a folder of its own for each combination of `versions`
    (those of whatever the objects depend on)."""
    name = "-".join("".join(c if c.isalnum() or c in "._+" else "_" for c in version) for version in versions)
    return KernelBuild(cache / name, count_sources(package / "ext.py"))


def count_sources(script: Path) -> int:
    """How many files the library compiles: the length of the list `sources_` in its ext.py; 1 where there is none."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if names == ["sources_"]:
                return len(node.value.elts)
    return 1


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

    thread = threading.Thread(target=run, name="exllamav2 import")
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


def forget_failed_build() -> None:
    """Let a second import try again: torch would take the failed build for done, Python keep half of the package."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("exllamav2", EXTENSION)]:
        del sys.modules[name]
    extensions = sys.modules.get("torch.utils.cpp_extension")
    entries = getattr(getattr(extensions, "JIT_EXTENSION_VERSIONER", None), "entries", None)
    if isinstance(entries, dict):
        entries.pop(EXTENSION, None)


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
