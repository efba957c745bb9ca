"""What imports the library and loads a model with it, imported themselves only when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.backends.base import LoadProgress
from engine.backends.exllama.parts import Library, LoadedParts
from engine.config import ModelSpec

Report = Callable[[LoadProgress], None]


class ImportLibrary(Protocol):
    """Imports the library for a model; raises ModelLoadFailed, or BackendUnavailable where it cannot run."""

    def __call__(self, report: Report, *, spec: ModelSpec, cancelled: Callable[[], bool]) -> Library: ...


class LoadParts(Protocol):
    """Loads a model with the library; raises ModelLoadFailed and leaves nothing allocated then."""

    def __call__(
        self,
        library: Library,
        spec: ModelSpec,
        *,
        max_prompts: int,
        report: Report,
        cancelled: Callable[[], bool],
    ) -> LoadedParts: ...


def loaders(import_library: ImportLibrary | None, load_parts: LoadParts | None) -> tuple[ImportLibrary, LoadParts]:
    """Those given, or the real ones."""
    if import_library is None:
        from engine.backends.exllama.library import import_library as real_import

        import_library = real_import
    if load_parts is None:
        from engine.backends.exllama.loading import load_parts as real_load

        load_parts = real_load
    return import_library, load_parts
