"""KvTiers: copies of full KV pages in host memory and on disk, which outlive the worker that computed them.

A page is a file named by its key, in a folder named by the digest of all that its bytes depend on, so a tier needs no
index and no owner: workers, models and later runs share it, each bounds it, and it may be deleted at any time. A page
that is not there, or is damaged, is computed again.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import os
import queue
import re
import secrets
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import platformdirs

from engine.backends.base import KvTierStats
from engine.backends.common.page_keys import PageKey
from engine.config import ModelSpec
from engine.errors import InvalidRequest
from engine.system.files import claim_folder, make_private_folder, replace_file

GIB = 1 << 30

# One tier: a folder of page files.

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
_HUNG_S = 2.0
"""A file system that has not answered for so long is not used until it does."""


class PageFolder:
    """Page files of all models below `root`, at most about `limit_bytes`, the least recently used removed first.

    A removed file of this process's size is written again: memory that exists costs a third of new, which the kernel
    zeroes. It loses its name first, so nothing finds it, and who has it open yet sees that it is no longer named so.

    name: "host" or "disk".  digest: of all that the bytes of this model's pages depend on, besides their tokens.
    """

    def __init__(self, name: str, root: Path, limit_bytes: int, digest: str) -> None:
        """Make the folder where there is none. Raises OSError."""
        self.name, self.limit_bytes = name, limit_bytes
        self.restored_pages = self.damaged_pages = self.skipped_pages = 0
        self.problem = ""
        self._root, self._folder = root, root / digest
        self._used_bytes = self._unchecked_bytes = self._files = self._file_bytes = 0
        self._paused_until_s = 0.0
        self._spares: list[Path] = []
        make_private_folder(self._folder)
        self.measure()

    def has(self, key: PageKey) -> bool:
        """Return whether there is a file of the page."""
        with suppress(OSError):
            return self._file(key).exists()
        return False

    def read(self, key: PageKey, size: int) -> bytes | None:
        """Return the `size` bytes of a page; None where they cannot be read. A damaged file is removed."""
        file = self._file(key)
        try:
            with file.open("rb", buffering=0) as stream:
                header, content = stream.read(_HEADER.size), stream.read(size + 1)
                with suppress(OSError):  # a full or read-only disk can still be read
                    os.utime(stream.fileno())
                is_whole = len(content) == size and header == _header(key, content)
                if not is_whole and not _is_named(stream.fileno(), file):
                    return None  # it was removed, and is being written again
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report(f"KV pages of the {self.name} tier cannot be read: {error.strerror} ({self._folder})")
            return None
        if is_whole:
            self.restored_pages += 1
            return content
        self.damaged_pages += 1
        self._report(f"the KV page file {file} was damaged and is removed; its tokens are computed again")
        with suppress(OSError):
            file.unlink()
        return None

    def write(self, key: PageKey, content: bytes) -> None:
        """Write the file of a page, all of it or nothing. One that fails, or has no room, is skipped."""
        if self._used_bytes > self.limit_bytes * _OVERSHOOT or time.monotonic() < self._paused_until_s:
            self.skipped_pages += 1
            return
        header = _header(key, content)
        try:
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
        with suppress(IndexError):  # another thread may take them too
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
        spares = set(map(str, self._spares))
        found = [each for each in _files_in(self._root) if each[2] not in spares]
        now, used, count = time.time(), sum(size for _, size, _ in found), len(found)
        keep_bytes, order = used, range(count)
        if used > self.limit_bytes:
            keep_bytes = int(self.limit_bytes * _KEEP_SHARE)
            import numpy as np  # here, as estimates read this module and must stay quick

            order = np.argsort([used_s for used_s, _, _ in found]).tolist()  # during which the steps go on
        for used_s, size, file in map(found.__getitem__, order):
            stale = now - used_s > _UNFINISHED_S and file.rpartition(os.sep)[2].startswith(_UNFINISHED)
            if used > keep_bytes or stale:
                self._remove(Path(file), is_spare=not stale and size == self._file_bytes)
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
                self._spares.append(spare)
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
        self.skipped_pages += 1
        self._paused_until_s = time.monotonic() + _RETRY_S
        with suppress(OSError):
            make_private_folder(self._folder)  # which may have been deleted
        self._report(f"KV pages are not kept in the {self.name} tier: {error.strerror} ({self._folder})")

    def _report(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            _log.warning("%s", problem)


def _files_in(root: Path) -> Iterator[tuple[float, int, str]]:
    """Yield time of last use, size and path of each file in the folders in `root`, of those that can be looked at."""
    for folder in _entries(root):
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


def _header(key: PageKey, content: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, zlib.crc32(content, zlib.crc32(key)), len(content))


# Where the tiers of a model lie.

_SHARED_MEMORY = Path("/dev/shm")
_DISK_FOLDER = "ericllm-kv"
"""A folder of its own in the one that a user names, in which files may be removed."""
_SALT_FILE = "salt"
_SALT_BYTES = 32
_DIGEST_BYTES = 12
_SPLIT = re.compile(r"-\d{5}-of-")


def tier_roots(spec: ModelSpec) -> dict[str, Path]:
    """Return the folders of the tiers that `spec` wants, by name, the fastest first."""
    roots: dict[str, Path] = {}
    if spec.kv_host_gib:
        roots["host"] = _SHARED_MEMORY / f"ericllm-kv-{os.geteuid()}"
    if spec.kv_disk_gib:
        roots["disk"] = (spec.kv_dir or platformdirs.user_cache_path("ericllm")) / _DISK_FOLDER
    return roots


def tier_salt(spec: ModelSpec) -> bytes | None:
    """Return the salt of the keys of the pages in the slowest tier, made where there is none; None without tiers.

    Raises InvalidRequest where a tier's folder cannot be used.
    """
    salt = None
    for name, root in tier_roots(spec).items():
        salt = _claim_root(name, root)
    return salt


def unused_host_bytes(spec: ModelSpec) -> int:
    """Return the bytes of RAM that the host tier may still take; what is in shared memory now is taken for its own."""
    if not spec.kv_host_gib:
        return 0
    used = 0
    with suppress(OSError):
        used = shutil.disk_usage(_SHARED_MEMORY).used
    return max(0, int(spec.kv_host_gib * GIB) - used)


def open_tiers(spec: ModelSpec, pages: DevicePages, facts: Sequence[str]) -> KvTiers | None:
    """Open the tiers of a loaded model; None where it has none. facts: what its pages depend on besides `spec`.

    Raises InvalidRequest where a tier's folder cannot be used, or memory holds less.
    """
    digest = pages_digest(spec, facts)
    folders: list[PageFolder] = []
    for name, root in tier_roots(spec).items():
        _claim_root(name, root)
        limit_bytes = int((spec.kv_host_gib if name == "host" else spec.kv_disk_gib) * GIB)
        with _refuse_unusable(name, root):
            size_bytes = shutil.disk_usage(root).total
        if limit_bytes > size_bytes:
            raise InvalidRequest(
                f"kv_{name}_gib is {limit_bytes / GIB:g}, but {root.parent if name == 'host' else root} holds "
                f"{size_bytes / GIB:.1f} GiB",
                param=f"kv_{name}_gib",
                limit_bytes=size_bytes,
            )
        with _refuse_unusable(name, root):
            folders.append(PageFolder(name, root, limit_bytes, digest))
    return KvTiers(folders, pages) if folders else None


def _claim_root(name: str, root: Path) -> bytes:
    """Make the folder of a tier ours alone, and return its salt."""
    if name == "host" and not _SHARED_MEMORY.is_dir():
        raise InvalidRequest(f"kv_host_gib needs {_SHARED_MEMORY}, which is not here", param="kv_host_gib")
    salt_file = root / _SALT_FILE
    with _refuse_unusable(name, root):
        claim_folder(root, 0)
        if not salt_file.exists():
            replace_file(salt_file, secrets.token_bytes(_SALT_BYTES))
        return salt_file.read_bytes()


@contextmanager
def _refuse_unusable(name: str, root: Path) -> Iterator[None]:
    """Raise InvalidRequest for an OSError."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(
            f"the folder of the {name} tier of the KV cache cannot be used: {error.strerror or error} ({root})",
            param=f"kv_{name}_gib",
        ) from error


def pages_digest(spec: ModelSpec, facts: Sequence[str]) -> str:
    """Return the digest of all that the bytes of a model's pages depend on, besides tokens and adapter. facts: what it
    is besides `spec`."""
    chosen = (spec.weights, spec.cache_bits, spec.alpha_value, spec.compress_pos_emb, spec.num_experts)
    parts = [*map(str, chosen), *_weights_stamp(spec.path), *(_weights_stamp(spec.lora) if spec.lora else ()), *facts]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _weights_stamp(path: Path) -> list[str]:
    """Return names, sizes and times of the files of a model or an adapter, which change when they do."""
    if path.is_dir():
        named = (each for each in path.iterdir() if each.suffix in (".safetensors", ".json", ".gguf"))
        files = sorted(each for each in named if each.is_file())
    else:
        files = sorted(path.parent.glob(_SPLIT.sub("-*-of-", glob.escape(path.name))))
    found = [(each.name, each.stat()) for each in files]
    # The sizes of two checkpoints are equal, and copied times may be; the time of the inode's change cannot be set.
    return [str(path), *(f"{name} {each.st_size} {each.st_mtime_ns} {each.st_ctime_ns}" for name, each in found)]


# All tiers of a loaded model.

_BATCH_PAGES = 16
_BATCH_BYTES = 16 << 20
_QUEUE_BYTES = 256 << 20
_CLOSE_S = 2.0

_log = logging.getLogger(__name__)


class DevicePages(Protocol):
    """The pages of a loaded model."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all layers together."""

    @property
    def in_host_memory(self) -> bool:
        """True if reading a page waits for no device."""

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        """Return copies of the pages."""

    def write_pages(self, pages: Sequence[int], contents: Sequence[bytes]) -> None:
        """Fill the pages."""


class KvTiers:
    """The tiers of one loaded model, the fastest first. One thread calls; a second one writes what need not be there at
    once: all of a disk's pages, and all pages of a device with its own memory.

    Pages that are in RAM are in the host tier when `store` returns, so a worker's death loses none of them.
    batch_pages: pages that are copied from or to the device together, some milliseconds of work.
    """

    def __init__(self, folders: Sequence[PageFolder], pages: DevicePages) -> None:
        self.batch_pages = min(_BATCH_PAGES, max(1, _BATCH_BYTES // pages.page_bytes))
        self._folders, self._pages = folders, pages
        self._writer = _Writer()

    def has(self, key: PageKey) -> bool:
        """Return whether some tier has a page."""
        return any(folder.has(key) for folder in self._folders)

    def restore(self, keys: Sequence[PageKey], pages: Sequence[int]) -> int:
        """Fill the pages with these keys; return how many of them, from the first on, were found whole."""
        contents: list[bytes] = []
        for key in keys:
            content = self._read(key)
            if content is None:
                break
            contents.append(content)
        if contents:
            self._pages.write_pages(pages[: len(contents)], contents)
        return len(contents)

    def store(self, keys: Sequence[PageKey], pages: Sequence[int]) -> None:
        """Copy full pages to the tiers that lack them."""
        lacking = [
            (key, page, folders)
            for key, page in zip(keys, pages, strict=True)
            if (folders := [folder for folder in self._folders if not folder.has(key)])
        ]
        in_host_memory = self._pages.in_host_memory
        for start in range(0, len(lacking), self.batch_pages):
            batch = lacking[start : start + self.batch_pages]
            contents = self._pages.read_pages([page for _, page, _ in batch])
            for (key, _, folders), content in zip(batch, contents, strict=True):
                for folder in folders:
                    if folder.name == "host" and in_host_memory:
                        folder.write(key, content)
                        if folder.is_due:
                            self._writer.put(folder, b"", b"")
                    else:
                        self._writer.put(folder, key, content)

    def stats(self) -> tuple[KvTierStats, ...]:
        """Return the gauges and counters of each tier."""
        return tuple(folder.stats() for folder in self._folders)

    def close(self) -> None:
        """Write what is queued, for max 2 seconds."""
        self._writer.close()

    def _read(self, key: PageKey) -> bytes | None:
        for index, folder in enumerate(self._folders):
            content = folder.read(key, self._pages.page_bytes)
            if content is not None:
                for faster in self._folders[:index]:
                    self._writer.put(faster, key, content)
                return content
        return None


class _Writer:
    """A thread that writes pages, and measures folders that are due. It refers to no memory of the model, which is free
    after an unload even where a disk stands still."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[PageFolder, PageKey, bytes] | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, folder: PageFolder, key: PageKey, content: bytes) -> None:
        """Queue a page, or only a look at the folder where `content` is empty; skip it where too much is queued."""
        with self._lock:
            if self._queued_bytes + len(content) > _QUEUE_BYTES:
                folder.skipped_pages += 1
                return
            self._queued_bytes += len(content)
        self._queue.put((folder, key, content))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End once all is written; wait for that for max 2 seconds."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            folder, key, content = queued
            if content and not folder.has(key):
                folder.write(key, content)
            if folder.is_due:
                folder.measure()
            with self._lock:
                self._queued_bytes -= len(content)
