"""Files that are looked at now and then, to be read again once somebody saved them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


class Watched:
    """paths: files, or folders whose `*.toml` are meant. None of them need be there."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether anything was written, made or removed since the last call. One stat a file; safe on any thread."""
        seen, self._seen = self._seen, self._look()
        return seen != self._seen

    def _look(self) -> dict[Path, tuple[int, int, int]]:
        found = {}
        for path in self._files():
            with contextlib.suppress(OSError):
                stat = path.stat()
                found[path] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return found

    def _files(self) -> Iterator[Path]:
        for path in self._paths:
            yield from path.glob("*.toml") if path.is_dir() else (path,)
