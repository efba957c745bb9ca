"""Where other users of this machine can see keys, or read and change what is kept."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from console.secret_file import exposed
from console.settings import Settings
from console.sources import Sources
from engine.models.files import is_folder


def key_warnings(settings: Settings, sources: Sources) -> Iterator[str]:
    """Yield a sentence for each place from which other users of this machine could read a key."""
    if settings.api_key is not None and sources.origin("api_key").source == "flag":
        yield "Every user of this machine sees --api-key in its list of processes: use `--api-key-file FILE` instead"
    if "api_key" in sources.saved and (problem := exposed(sources.file)):
        yield problem
    for file in (settings.api_key_file, settings.tls_key):
        if file is not None and (problem := exposed(file)):
            yield problem


def folder_warnings(folders: Iterable[Path]) -> Iterator[str]:
    """Yield a sentence for each folder of ours that belongs to another user, whatever its mode."""
    for folder in folders:
        if is_folder(folder) and folder.stat().st_uid not in (0, os.geteuid()):
            yield (
                f"{folder} belongs to another user, who can replace what is kept in it: `sudo chown -R $USER {folder}`"
            )
