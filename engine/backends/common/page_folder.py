"""PageFolder: one KV tier, a folder of page files that several processes share."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.backends.base import KvTierStats
from engine.backends.common.page_keys import PageKey
from engine.system.files import claim_folder, make_private_folder

_HEADER = struct.Struct("<8sIQ")
_MAGIC = b"ericllm1"
_UNFINISHED = "."
_UNFINISHED_S = 60.0
"""A file without its final name that is older belongs to a process that died while it wrote."""
_KEEP_SHARE = 7 / 8
_OVERSHOOT = 1.125
_CHECKED_SHARE = 1 / 32
"""Share of the limit after whose writing the folder is measured again, as other processes write to it too."""
_RETRY_S = 10.0
"""Time without writes after one that failed."""
_log = logging.getLogger(__name__)


class PageFolder:
    """Page files of all models below `root`, at most about `limit_bytes`, the least recently used removed first.

    A removed file of this process's size is written again: memory that exists costs a third of new, which the kernel
    zeroes. It loses its name first, so nothing finds it, and who has it open yet sees that it is no longer named so.
    Such files take up to an eighth of the limit, of all processes together.

    name: "host" or "disk".  digest: of all that the bytes of this model's pages depend on, besides their tokens.

    Call `open` first. Where that fails, there are no pages, and writing one tries again.
    """

    def __init__(self, name: str, root: Path, limit_bytes: int, digest: str) -> None:
        self.name, self.limit_bytes = name, limit_bytes
        self.restored_pages = self.damaged_pages = self.skipped_pages = 0
        self.problem = ""
        self._root, self._folder = root, root / digest
        self._used_bytes = self._files = self._file_bytes = 0
        self._unchecked_bytes = limit_bytes
        self._paused_until_s = 0.0
        self._spares: set[Path] = set()
        self._is_claimed = False

    def open(self) -> PageFolder:
        """Make the folder where there is none, its owner's alone, and measure it. Raises OSError."""
        self._claim()
        self.measure()
        self.problem = ""  # it may be that it did not answer in time
        return self

    def _claim(self) -> None:
        self._is_claimed = False
        claim_folder(self._root, 0)
        make_private_folder(self._folder)
        if self._folder.is_symlink():  # whose files are not counted
            raise NotADirectoryError(errno.ENOTDIR, f"{self._folder.name} is a link")
        self._is_claimed = True

    def has(self, key: PageKey) -> bool:
        """Return whether there is a file of the page."""
        with suppress(OSError):
            return self._is_claimed and self._file(key).exists()
        return False

    def read(self, key: PageKey, content: memoryview) -> bool:
        """Fill `content` with the page, which is as long; return whether it was there, whole. A damaged file is
        removed."""
        file = self._file(key)
        if not self._is_claimed:
            return False
        header, more = bytearray(_HEADER.size), bytearray(1)
        try:
            with file.open("rb", buffering=0) as stream:
                length = os.readv(stream.fileno(), (header, content, more))
                with suppress(OSError):  # a full or read-only disk can still be read
                    os.utime(stream.fileno())
                is_whole = length == len(header) + len(content) and header == _header(key, content)
                if not is_whole and not _is_named(stream.fileno(), file):
                    return False  # it was removed, and is being written again
        except FileNotFoundError:
            return False
        except OSError as error:
            self._report(f"KV pages of the {self.name} tier cannot be read: {error.strerror} ({self._folder})")
            return False
        if is_whole:
            self.restored_pages += 1
            return True
        self.damaged_pages += 1
        self._report(f"a damaged KV page of the {self.name} tier is removed and computed again ({self._folder})")
        with suppress(OSError):
            file.unlink()
        return False

    def write(self, key: PageKey, content: bytes) -> None:
        """Write the file of a page, all of it or nothing. One that fails, or has no room, is skipped."""
        if self._used_bytes > self.limit_bytes * _OVERSHOOT or time.monotonic() < self._paused_until_s:
            self.skipped_pages += 1
            return
        header = _header(key, content)
        try:
            if not self._is_claimed:
                self._claim()
            with self._unfinished() as (unfinished, descriptor):
                if os.writev(descriptor, (header, content)) != len(header) + len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.truncate(descriptor, len(header) + len(content))
                unfinished.rename(self._file(key))
        except OSError as error:
            self._write_failed(error)
            return
        self.problem = ""
        self._files += 1
        self._file_bytes = len(header) + len(content)
        self._used_bytes += len(content)
        self._unchecked_bytes += len(content)

    @contextmanager
    def _unfinished(self) -> Iterator[tuple[Path, int]]:
        """Open a file without its final name: a spare one, or a new one. It is removed where the block fails."""
        descriptor = -1
        with suppress(KeyError):  # another thread may take them too
            while descriptor < 0:
                unfinished = self._spares.pop()
                with suppress(OSError):  # another process found it stale
                    os.utime(unfinished)
                    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CLOEXEC)
        if descriptor < 0:
            unfinished = self._unfinished_name()
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            yield unfinished, descriptor
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise
        finally:
            os.close(descriptor)

    def _unfinished_name(self) -> Path:
        return self._folder / f"{_UNFINISHED}{secrets.token_hex(8)}"  # two containers may have equal process ids

    @property
    def is_due(self) -> bool:
        """True if `measure` should be called."""
        return self._used_bytes > self.limit_bytes or self._unchecked_bytes > self.limit_bytes * _CHECKED_SHARE

    def measure(self) -> None:
        """Count the files of all processes, and remove the least recently used ones beyond the limit."""
        if not self._is_claimed:
            return
        ours, now = set(map(str, self._spares.copy())), time.time()  # steps take spares meanwhile
        found: list[tuple[float, int, str]] = []
        removed, others_bytes = set(ours), 0
        for each in _files_in(self._root):
            used_s, size, file = each
            if file in ours:
                removed.discard(file)
            elif not file.rpartition(os.sep)[2].startswith(_UNFINISHED):
                found.append(each)
            elif abs(now - used_s) <= _UNFINISHED_S:  # the clock may have been set
                others_bytes += size
            else:
                self._remove(Path(file), is_spare=False)
        self._spares.difference_update(map(Path, removed))
        used, count = sum(size for _, size, _ in found) + others_bytes, len(found)
        keep_bytes, spare_bytes = used, self.limit_bytes * (1 - _KEEP_SHARE) - others_bytes
        order: Sequence[int] = ()
        if used > self.limit_bytes:
            keep_bytes = int(self.limit_bytes * _KEEP_SHARE)
            import numpy as np  # here, as estimates read this module and must stay quick

            order = np.argsort([used_s for used_s, _, _ in found]).tolist()  # during which the steps go on
        for _, size, file in map(found.__getitem__, order):
            if used <= keep_bytes:
                break
            has_room = len(self._spares) * size < spare_bytes
            self._remove(Path(file), is_spare=has_room and size == self._file_bytes)
            used -= size
            count -= 1
        self._used_bytes, self._files, self._unchecked_bytes = used, count, 0

    def _remove(self, file: Path, *, is_spare: bool) -> None:
        """Remove a file of a page, to be written again if it `is_spare`."""
        with suppress(OSError):
            if is_spare:
                spare = self._unfinished_name()
                file.rename(spare)
                os.utime(spare)  # else it is stale
                self._spares.add(spare)
            else:
                file.unlink()

    def stats(self) -> KvTierStats:
        """Return the gauges and counters of the tier."""
        return KvTierStats(
            name=self.name,
            used_bytes=self._used_bytes,
            limit_bytes=self.limit_bytes,
            pages=self._files,
            restored_pages=self.restored_pages,
            damaged_pages=self.damaged_pages,
            skipped_pages=self.skipped_pages,
            problem=self.problem,
        )

    def _file(self, key: PageKey) -> Path:
        return self._folder / key.hex()

    def _write_failed(self, error: OSError) -> None:
        self._paused_until_s = time.monotonic() + _RETRY_S
        with suppress(OSError):
            self._claim()  # it may have been deleted, and another user's folder be there now
        self.skip(error.strerror or str(error))

    def skip(self, why: str) -> None:
        """Count a page that is not written, and report why."""
        self.skipped_pages += 1
        self._report(f"KV pages are not kept in the {self.name} tier: {why} ({self._folder})")

    def note_unusable(self, error: OSError) -> None:
        """Report that the folder cannot be opened."""
        self._report(unusable(self.name, self._root, error))

    def note_hung(self, seconds: float | None) -> None:
        """Report that a read has taken so long; None for that it does not any more."""
        hung = f"the {self.name} tier of the KV cache is not used until it answers ({self._folder})"
        if seconds is not None:
            self._report(hung)
        elif self.problem == hung:
            self.problem = ""

    def _report(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            _log.warning("%s", problem)


def _files_in(root: Path) -> Iterator[tuple[float, int, str]]:
    """Yield time of last use, size and path of each file in the folders in `root`, of those that can be looked at."""
    for folder in _entries(root):
        with suppress(OSError):
            if not folder.is_dir(follow_symlinks=False):
                continue  # what a link leads to is not ours to remove
        for file in _entries(folder.path):
            with suppress(OSError):
                status = file.stat(follow_symlinks=False)
                yield status.st_mtime, status.st_size, file.path


def _is_named(descriptor: int, file: Path) -> bool:
    """Return whether an open file has that name."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), file.stat())
    return False


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:
        yield from entries


def _header(key: PageKey, content: bytes | memoryview) -> bytes:
    return _HEADER.pack(_MAGIC, zlib.crc32(content, zlib.crc32(key)), len(content))


def unusable(name: str, root: Path, error: OSError) -> str:
    """Return the sentence on a tier whose folder cannot be used."""
    return f"the folder of the {name} tier of the KV cache cannot be used: {error.strerror or error} ({root})"
