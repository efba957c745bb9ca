"""What is left of models whose making was ended half-way: gigabytes that nothing uses."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def making_in(root: Path) -> Iterator[None]:
    """Around the making of a model in a folder of `root`: folders there that were never finished are removed first,
    unless a process makes a model there now. Raises OSError where `root` cannot be written."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while another holds it shared
            _remove_unfinished(root)
        fcntl.flock(lock, fcntl.LOCK_SH)  # the kernel lets go of it when its holder dies
        yield


def _remove_unfinished(root: Path) -> None:
    for folder in root.iterdir():
        if folder.is_dir() and not (folder / "config.json").is_file():  # config.json is written last
            shutil.rmtree(folder, ignore_errors=True)
