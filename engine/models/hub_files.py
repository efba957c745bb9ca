"""One file from the hub into its cache, going on where an earlier try ended, whoever ended it.

What has come is kept in a file of our own, "<commit>.<name>.part" among the cache's blobs; once it is whole, and its
content is what the hub's digest says, it becomes the blob that huggingface_hub would have written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from engine.errors import ModelLoadFailed
from engine.models.hub_cache import part_file, repo_folder
from engine.models.hub_client import HubClient, HubRefused, StoredFile

MAX_TRIES = 5
"""In a row without a byte that is new."""

MAX_WAIT_S = 300.0
"""Before a retry, whatever the hub asks for: its own windows are that long."""

_RETRY_S = 1.0
_READ_BYTES = 2**20
_GIB = 2**30


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def fetch_file(
    hub: HubClient,
    repo_id: str,
    commit: str,
    name: str,
    size: int,
    *,
    count: Callable[[int], None],
    pause: Callable[[float], object],
) -> None:
    """Fetch a file and put it into the cache: its content among the blobs, a link to it into the commit's snapshot.

    name: as `hub_plan` lets it through.  size: bytes as the list of files says, 0 where it does not.
    count: hears of every change of how much of the file is there, and ends the download by raising.
    pause: waits before a retry.
    Raises ModelLoadFailed while somebody else fetches the file, and for content that is not what was announced;
    OSError, and what HubClient raises.
    """
    stored = hub.stored_file(repo_id, commit, name)
    if size and stored.size is not None and stored.size != size:
        raise ModelLoadFailed(
            f"the hub at {hub.endpoint} announces {name} with {size:,} bytes, and then with {stored.size:,}",
            model=repo_id,
        )
    size = size or stored.size or 0
    blob = repo_folder(repo_id) / "blobs" / stored.digest
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = part_file(repo_id, commit, name)
    if blob.is_file():
        part.unlink(missing_ok=True)
    else:
        with open(part, "a+b", opener=opener_without_links) as stream:
            _hold(stream, part, name)
            transfer = _FileTransfer(hub, stored, name, size, stream, count)
            try:
                transfer.complete(pause)
            except _Unannounced:
                part.unlink()
                raise
            part.replace(blob)
    _link(repo_folder(repo_id) / "snapshots" / commit / name, blob)


def opener_without_links(path: str, flags: int) -> int:
    """Opener for `open`: what a file is called in a cache that several users share may be another's link to a file
    of ours. Raises OSError for a link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


class _Unannounced(ModelLoadFailed):
    """What came is not what the hub announced, and nothing of it is kept."""


class _FileTransfer:
    """The bytes of one file on their way into `stream`, digested as they come; first those that are in it already."""

    def __init__(
        self,
        hub: HubClient,
        stored: StoredFile,
        name: str,
        size: int,
        stream: BinaryIO,
        count: Callable[[int], None],
    ) -> None:
        self._hub, self._stored, self._name, self._size = hub, stored, name, size
        self._stream, self._count = stream, count
        self._digest = self._new_digest()
        self._have = 0

    def complete(self, pause: Callable[[float], object]) -> None:
        """Fetch what is lacking, and check it; a connection that breaks off is made again."""
        self._digest_present()
        require_space(Path(self._stream.name).parent, self._size - self._have, self._name)
        tries = 0
        while self._have < self._size:
            had = self._have
            error: Exception = ModelLoadFailed(f"{self._name} ends after {had:,} of {self._size:,} bytes")
            wait_s: float | None = _RETRY_S
            try:
                self._receive()
            except Exception as caught:
                error, wait_s = caught, _retry_after_s(caught)
            tries = 1 if self._have > had else tries + 1
            if self._have < self._size:
                if wait_s is None or tries > MAX_TRIES:
                    raise error
                pause(wait_s)
        self._stream.flush()
        if (found := self._digest.hexdigest()) != self._stored.digest:
            raise _Unannounced(
                f"{self._name} is damaged or was changed on its way: its digest is {found}, and the hub announces"
                f" {self._stored.digest}; nothing of it is kept",
                file=self._name,
            )

    def _digest_present(self) -> None:
        """Take over what an earlier try left; one that is larger than the file can be is begun again."""
        self._have = self._stream.seek(0, 2)
        if self._have > self._size:
            self._restart()
        self._stream.seek(0)
        while chunk := self._stream.read(_READ_BYTES):
            self._digest.update(chunk)
            self._count(0)

    def _receive(self) -> None:
        with self._hub.content(self._stored.url, self._have) as (continues, chunks):
            if self._have and not continues:
                self._restart()
            for chunk in chunks:
                if self._have + len(chunk) > self._size:
                    raise _Unannounced(
                        f"the hub sends more of {self._name} than the {self._size:,} bytes that it announces",
                        file=self._name,
                    )
                self._count(len(chunk))
                self._stream.write(chunk)
                self._digest.update(chunk)
                self._have += len(chunk)

    def _restart(self) -> None:
        self._stream.truncate(0)
        self._count(-self._have)
        self._digest, self._have = self._new_digest(), 0

    def _new_digest(self) -> _Digest:
        if len(self._stored.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self._size, usedforsecurity=False)  # as git names its blobs


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise ModelLoadFailed with the numbers where the disk of `folder` cannot take `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelLoadFailed(
            f"{what} needs {needed / _GIB:.1f} GiB more in {folder}, where {free / _GIB:.1f} GiB are free",
            needed_bytes=needed,
            free_bytes=free,
        )


def _retry_after_s(error: Exception) -> float | None:
    """Return how long to wait before another try, None where that is no use."""
    if isinstance(error, HubRefused):
        return None if error.retry_after_s is None else min(error.retry_after_s, MAX_WAIT_S)
    is_transient = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    return _RETRY_S if is_transient else None


def _hold(stream: BinaryIO, part: Path, name: str) -> None:
    """Until it is closed nobody else writes it. Who had it before may have completed and moved it meanwhile."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(stream.fileno()), part.lstat()):
            return
    raise ModelLoadFailed(f"{name} is being downloaded already; try again when that has ended")


def _link(pointer: Path, blob: Path) -> None:
    """Have a name in a snapshot stand for a blob, as huggingface_hub does: by a relative link, or by a copy."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.unlink(missing_ok=True)
    depth = len(pointer.relative_to(blob.parent.parent).parents) - 1
    try:
        pointer.symlink_to(Path(*[".."] * depth, "blobs", blob.name))
    except FileExistsError:  # another download of this commit was quicker
        pass
    except OSError:  # a file system without links
        shutil.copyfile(blob, pointer)
