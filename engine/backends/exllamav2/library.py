"""The one place where exllamav2 is imported: its side effects undone, its failures as one sentence each.

Importing it compiles CUDA kernels where they are not there yet, narrows torch to one thread for the whole process and
looks for three attentions of which we want none (see `attention`).
"""

from __future__ import annotations

import ast
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs
import psutil

from engine.backends.base import LoadProgress
from engine.backends.common.exllamav2_checkpoint import read_folder
from engine.config import AttentionName, ModelSpec
from engine.errors import BackendUnavailable, LoadCancelled
from engine.system.files import claim_folder, make_private_folder
from engine.system.install_command import pip_install
from engine.system.memory import read_ram

VERSION = "0.3.2"

_DISTRIBUTIONS = {"PIL": "pillow"}
_ENDS_OF_BUILDS = "; other ways: `ericllm doctor`"

MAX_Q_SIZE = 8
"""Rows of the library's decode buffer per sequence: a step with drafts holds at most one less of them."""


@dataclass(frozen=True, slots=True)
class Library:
    """The library's classes, imported. The fields are named after what they are, not after the library's names.

    page_hash: how pages of the cache are known (see `jobs.CacheScope`).
    caches: by bits per element (16, 8, 6, 4).  cache_tp: wraps one of them for tensor parallelism.
    attention, attention_reason: as in LoadedModel.
    engage: (config, wanted attention, GPU numbers) -> this library, computing with the attention that fits them; None
        where the attention is settled.
    """

    config: Any
    model: Any
    caches: dict[int, Any]
    cache_tp: Any
    tokenizer: Any
    generator: Any
    job: Any
    page_hash: Any
    settings: Any
    lora: Any
    attention: str
    attention_reason: str
    engage: Callable[[Any, AttentionName, Sequence[int]], Library] | None = None


# Compiling the library's CUDA kernels, which its first import does: where, with which headers, and how far it is.
#
# The library hands its sources to `torch.utils.cpp_extension.load`, which compiles into TORCH_EXTENSIONS_DIR and guards
# that folder with a file named "lock" that outlives a killed process. Ours is a folder per combination of versions
# under the user's cache, guarded by a lock of the system, which does not.

EXTENSION = "exllamav2_ext"
POLL_S = 0.5

_JOB_BYTES = 2_500_000_000
"""What compiling one file takes at most."""

_LEVELS = 2
"""Folders of ours above the one of a build: see `_build`."""

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


PACKAGE = "exllamav2"

_NO_ATTENTION = {"EXLLAMA_NO_FLASH_ATTN": "1", "EXLLAMA_NO_XFORMERS": "1", "EXLLAMA_NO_SDPA": "1"}
"""A broken flash-attn or xformers would end the import; the attention over SDPA is not causal."""

_CHANGED_BY_IMPORT = ("CUDA_MODULE_LOADING", "TORCH_CUDA_ARCH_LIST")

_logger = logging.getLogger(__name__)

Report = Callable[[LoadProgress], None]


def import_library(
    report: Report, *, spec: ModelSpec | None = None, cancelled: Callable[[], bool] = lambda: False
) -> Library:
    """The library, its attention not chosen yet (see `Library.engage`).

    report: called with the number of compiled kernel files, on this thread. spec: its folder is read first, so that a
    model which cannot be loaded costs no compilation.
    Raises BackendUnavailable, LoadCancelled, and for the folder what `folder.read_folder` raises.
    """
    if spec is not None:
        read_folder(spec.path)
    package = _package_folder()
    import torch

    if not torch.cuda.is_available():
        raise BackendUnavailable(
            f"exllamav2 computes on NVIDIA GPUs, and torch {torch.__version__} sees none", param="backend"
        )
    threads = torch.get_num_threads()
    try:
        if PACKAGE not in sys.modules:
            _first_import(package, report, cancelled)
    finally:
        torch.set_num_threads(threads)
    return library_of_modules()


def library_of_modules() -> Library:
    """The classes of the imported package, under our names."""
    package = importlib.import_module(PACKAGE)
    generator = importlib.import_module(f"{PACKAGE}.generator")
    dynamic = importlib.import_module(f"{PACKAGE}.generator.dynamic")
    library = Library(
        config=package.ExLlamaV2Config,
        model=package.ExLlamaV2,
        caches={
            16: package.ExLlamaV2Cache,
            8: package.ExLlamaV2Cache_Q8,
            6: package.ExLlamaV2Cache_Q6,
            4: package.ExLlamaV2Cache_Q4,
        },
        cache_tp=package.ExLlamaV2Cache_TP,
        tokenizer=package.ExLlamaV2Tokenizer,
        generator=generator.ExLlamaV2DynamicGenerator,
        job=generator.ExLlamaV2DynamicJob,
        page_hash=dynamic._tensor_hash_checksum,
        settings=generator.ExLlamaV2Sampler.Settings,
        lora=package.ExLlamaV2Lora,
        attention="",
        attention_reason="no model is loaded",
    )
    return replace(library, engage=lambda *needs: _engaged(library, *needs))


def _engaged(library: Library, config: Any, wanted: AttentionName, devices: Sequence[int]) -> Library:
    """`library` with the paged attention that fits the model of `config` on these GPUs, put in its place.

    Raises InvalidRequest where `wanted` cannot be.
    """
    import torch

    from engine.backends.exllamav2.attention import install, install_flash, model_needs
    from engine.backends.paged_attention.interface import implementation
    from engine.backends.paged_attention.probe import engage, probe

    places = [torch.device("cuda", number) for number in devices]
    choice = engage(wanted, probe(*places, **model_needs(config)), places)
    attn, model = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("attn", "model"))
    if choice.name == "flash":
        install_flash(attn, model)
    else:
        install(attn, model, implementation(choice.name))
    return replace(library, attention=choice.name, attention_reason=choice.reason)


def _first_import(package: Path, report: Report, cancelled: Callable[[], bool]) -> None:
    """Import the package, compiling its kernels where no prebuilt ones are there. Raises as `import_library`."""
    import torch

    build = None if importlib.util.find_spec(EXTENSION) is not None else _build(package)
    variables: dict[str, str | None] = {name: os.environ.get(name) for name in _CHANGED_BY_IMPORT}
    variables |= _NO_ATTENTION
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
            watched(_import_modules, watch.look)
    except LoadCancelled:
        raise
    except BaseException as error:
        forget_failed_build()
        if cancelled():
            raise LoadCancelled("the load was cancelled while kernels were compiled") from None
        _logger.warning("exllamav2 could not be imported", exc_info=error)
        raise explain_import(
            _cause(error), torch_version=torch.__version__, cuda_version=torch.version.cuda or "?"
        ) from error
    watch.done()


def _import_modules() -> None:
    for name in (PACKAGE, f"{PACKAGE}.generator"):
        importlib.import_module(name)


def _cause(error: BaseException) -> BaseException:
    """The library swallows why its kernels could not be imported and stumbles over their missing name: ask again."""
    if isinstance(error, NameError):
        try:
            importlib.import_module(EXTENSION)
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


def _package_folder() -> Path:
    """Where the package lies. Raises BackendUnavailable where there is none, or another release than this is for."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise _not_installed()
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise _not_installed() from None
    if version.partition("+")[0] != VERSION:
        raise _unavailable(
            f"exllamav2 {version} is installed, and this backend is written for {VERSION}: `{_install()}`"
        )
    return Path(found.submodule_search_locations[0])


def planned_build() -> KernelBuild:
    """Where the kernels for this torch and these GPUs are, or would be, compiled. Raises BackendUnavailable where the
    package is not there, or not the right one."""
    return _build(_package_folder())


def _build(package: Path) -> KernelBuild:
    import torch

    capabilities = {torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())}
    cards = os.environ.get("TORCH_CUDA_ARCH_LIST") or "_".join(
        f"sm{major}{minor}" for major, minor in sorted(capabilities)
    )
    return kernel_build(
        package,
        platformdirs.user_cache_path("ericllm") / "kernels",
        f"{PACKAGE}{VERSION}",
        f"torch{torch.__version__}",
        f"cuda{torch.version.cuda}",
        f"py{platform.python_version()}",
        cards,
    )


def _cuda_home() -> Path | None:
    from torch.utils.cpp_extension import CUDA_HOME

    return Path(CUDA_HOME) if CUDA_HOME else None


# Why the library could not be imported, in one sentence that names what to do. Pure.


def explain_import(error: BaseException, *, torch_version: str, cuda_version: str) -> BackendUnavailable:
    """BackendUnavailable for what `import exllamav2` raised, under these versions of torch and of its CUDA."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or text).partition(".")[0]
        if name == "exllamav2":
            return _not_installed()
        install = pip_install(_DISTRIBUTIONS.get(name, name))
        return _unavailable(f"exllamav2 needs the Python package {name}, which is not installed: `{install}`")
    if "undefined symbol" in text or isinstance(error, NameError):
        return _unavailable(
            f"the installed exllamav2_ext was built for another torch than {torch_version}; install the wheel of "
            f"exllamav2 {VERSION} that was built for it, or `{reinstall()}` to have it compiled here"
        )
    if "CUDA_HOME" in text:
        return _unavailable(
            f"exllamav2's kernels must be compiled, and nvcc is missing: install the CUDA {cuda_version} toolkit and "
            f"set CUDA_HOME to it, or install a wheel with kernels built for torch {torch_version}"
        )
    if "Ninja is required" in text:
        return _unavailable(f"exllamav2's kernels must be compiled, and ninja is missing: `{pip_install('ninja')}`")
    if versions := re.search(r"detected CUDA version \(([\d.]+)\).*?compile\s+PyTorch \(([\d.]+)\)", text, re.S):
        return _unavailable(
            f"nvcc is of CUDA {versions[1]} and torch of CUDA {versions[2]}: install the CUDA {versions[2]} toolkit "
            "and set CUDA_HOME to it"
        )
    if "Error building extension" in text:
        return _unavailable(f"exllamav2's kernels could not be compiled: {_compiler_error(text)}{_ENDS_OF_BUILDS}")
    return _unavailable(f"exllamav2 could not be imported: {type(error).__name__}: {_first_line(text)}")


def reinstall() -> str:
    """The command that puts the package in place of what is installed of it, without kernels."""
    return pip_install("--force-reinstall", "--no-deps", f"exllamav2=={VERSION}")


def _not_installed() -> BackendUnavailable:
    return _unavailable(f"exllamav2 is not installed: `{_install()}`")


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


def _install() -> str:
    return pip_install(f"exllamav2=={VERSION}")


def _unavailable(message: str) -> BackendUnavailable:
    return BackendUnavailable(message, param="backend", value="exllamav2")
