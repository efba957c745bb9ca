"""The one place where exllamav2 is imported: its side effects undone, its failures as one sentence each.

Importing it compiles CUDA kernels where they are not there yet, narrows torch to one thread for the whole process and
looks for three attentions of which we want none (see `attention`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs

from engine.backends.base import LoadProgress
from engine.backends.exllama.folder import read_folder
from engine.backends.exllama.import_faults import VERSION, explain_import, not_installed, other_version
from engine.backends.exllama.kernels import (
    EXTENSION,
    POLL_S,
    KernelBuild,
    build_variables,
    environment,
    forget_failed_build,
    kernel_build,
    watched,
)
from engine.backends.exllama.parts import Library
from engine.config import AttentionName, ModelSpec
from engine.errors import BackendUnavailable, LoadCancelled
from engine.ram import read_ram

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

    report: told how many files of the kernels are compiled, on this thread. spec: its folder is read first, so that a
    model which cannot be loaded costs no compilation.
    Raises BackendUnavailable, LoadCancelled, and for the folder what `folder.read_folder` raises.
    """
    if spec is not None:
        read_folder(spec.path)
    package = _package_folder()
    import torch

    if not torch.cuda.is_available():
        raise BackendUnavailable(
            f"exllamav2 computes on NVIDIA GPUs, and torch {torch.__version__} sees none here", param="backend"
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

    from engine.backends.exllama.attention import install, install_flash, model_needs
    from engine.backends.paged_attention.face import implementation
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
        with build.held(watch.wait) if build is not None else nullcontext(), environment(**variables):
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
        self._told = False

    def look(self) -> None:
        """Report, or stop the compilers: the import then fails by itself."""
        if self._build is None:
            return
        if self._cancelled():
            self._build.stop()
        elif self._build.begun and self._build.compiled < self._build.sources:
            self._tell(self._build.compiled)

    def wait(self) -> None:
        """Another process builds: report how far it is. Raises LoadCancelled."""
        if self._cancelled():
            raise LoadCancelled("the load was cancelled while kernels were compiled")
        self.look()
        time.sleep(POLL_S)

    def done(self) -> None:
        """Everything is compiled; said only where anything was said before."""
        if self._told and self._build is not None:
            self._tell(self._build.sources)

    def _tell(self, done: int) -> None:
        self._told = True
        total = self._build.sources if self._build is not None else done
        self._report(LoadProgress(phase="kernels", done=done, total=total, unit="files"))


def _package_folder() -> Path:
    """Where the package lies. Raises BackendUnavailable where there is none, or another release than this is for."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise not_installed()
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise not_installed() from None
    if version.partition("+")[0] != VERSION:
        raise other_version(version)
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
