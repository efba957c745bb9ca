"""The one place where exllamav3 is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.backends.common.exllamav3_checkpoint import read_folder
from engine.backends.exllama.package import LibraryPackage, Report, import_package
from engine.config import ModelSpec

_SOURCES = (".c", ".cpp", ".cu")


@dataclass(frozen=True, slots=True)
class Library:
    """The library's classes, imported. The fields are named after what they are, not after the library's names.

    page_hash: how pages of the cache are known (see `jobs.CacheScope`).
    cache: of all layers, each of which is `float_layer` or, with bits per element, `packed_layer`.
    """

    config: Any
    model: Any
    cache: Any
    float_layer: Any
    packed_layer: Any
    generator: Any
    job: Any
    page_hash: Any


def count_sources(folder: Path) -> int:
    """Files of the kernels in the package at `folder` that are compiled for CUDA."""
    kernels = folder / "exllamav3_ext"
    files = (file.relative_to(kernels) for file in kernels.rglob("*") if file.suffix in _SOURCES)
    return sum(file.parts[0] != "rocm" for file in files)


PACKAGE = LibraryPackage(
    name="exllamav3",
    version="1.6.5",
    extension="exllamav3_ext",
    modules=("exllamav3", "exllamav3.generator"),
    count_sources=count_sources,
    variables={},
)


def import_library(
    report: Report, *, spec: ModelSpec | None = None, cancelled: Callable[[], bool] = lambda: False
) -> Library:
    """The library. report: called with the number of compiled kernel files, on this thread.

    spec: its folder is read first, so that a model which cannot be loaded costs no compilation.
    Raises BackendUnavailable, LoadCancelled, and for the folder what `read_folder` raises.
    """
    if spec is not None:
        read_folder(spec.path)
    import_package(PACKAGE, report, cancelled)
    return library_of_modules()


def library_of_modules() -> Library:
    """The classes of the imported package, under our names."""
    package = importlib.import_module(PACKAGE.name)
    return Library(
        config=package.Config,
        model=package.Model,
        cache=package.Cache,
        float_layer=package.CacheLayer_fp16,
        packed_layer=package.CacheLayer_quant,
        generator=package.Generator,
        job=package.Job,
        page_hash=importlib.import_module(f"{PACKAGE.name}.generator.pagetable").tensor_hash_checksum,
    )
