"""Secrets in files: how one is read, and who else could read it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from console.settings.schema import Settings
from console.settings.sources import Sources
from engine.errors import InvalidRequest
from engine.models.files import home_expanded, is_folder
from engine.system.files import is_readable_by_others

MAX_SECRET_BYTES = 4096
"""Longest first line that is read: a key has about 40 characters, a token of an identity provider some 2,000."""


def read_secret(file: Path, flag: str) -> str:
    """Return the first line of a file without the spaces around it. Read once, as it may be a pipe.

    flag: what named the file, for the sentence. Raises InvalidRequest where there is no key to be had from it.
    """
    param = flag.lstrip("-").replace("-", "_")
    try:
        with home_expanded(file).open("rb") as stream:
            line = stream.read(MAX_SECRET_BYTES + 1).partition(b"\n")[0]
        secret = line.decode().strip()
    except OSError as error:
        raise InvalidRequest(f"{flag} {file} cannot be read: {error.strerror or error}", param=param) from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{flag} {file} holds no key: its first line is not text", param=param) from None
    if len(line) > MAX_SECRET_BYTES:
        raise InvalidRequest(
            f"{flag} {file} holds no key: its first line has more than {MAX_SECRET_BYTES:,} bytes", param=param
        )
    if not secret:
        raise InvalidRequest(f"{flag} {file} holds no key: its first line is empty", param=param)
    if not secret.isprintable():
        raise InvalidRequest(f"{flag} {file} holds no key: its first line has control characters", param=param)
    return secret


def secret_file_warning(file: Path) -> str:
    """Return a sentence where other users of this machine may read a file with a key; "" where they may not."""
    file = home_expanded(file)
    if not is_readable_by_others(file):
        return ""
    return f"{file} holds a key and is readable by other users: `chmod 600 {file}`"


# Where other users of this machine can see keys, or read and change what is kept.


def key_warnings(settings: Settings, sources: Sources) -> Iterator[str]:
    """Yield a sentence for each place from which other users of this machine could read a key."""
    if settings.api_key is not None and sources.origin("api_key").source == "flag":
        yield "--api-key is visible to every user of this machine (ps): use `--api-key-file FILE` instead"
    if "api_key" in sources.saved and (problem := secret_file_warning(sources.file)):
        yield problem
    for file in (settings.api_key_file, settings.tls_key):
        if file is not None and (problem := secret_file_warning(file)):
            yield problem


def folder_warnings(folders: Iterable[Path]) -> Iterator[str]:
    """Yield a sentence for each folder of ours that belongs to another user, whatever its mode."""
    for folder in folders:
        if is_folder(folder) and folder.stat().st_uid not in (0, os.geteuid()):
            yield (f"{folder} belongs to another user, who can replace its files: `sudo chown -R $USER {folder}`")
