"""KvTiers: copies of full KV pages in host memory and on disk, which outlive the worker that computed them.

A page is a file named by its key, in a folder named by the digest of all that its bytes depend on, so a tier needs no
index and no owner: workers, models and later runs share it, each bounds it, and it may be deleted at any time. A page
that is not there, or is damaged, is computed again.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import logging
import mmap
import os
import queue
import re
import secrets
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import platformdirs

from engine.backends.base import KvTierStats
from engine.backends.common.page_folder import PageFolder, unusable
from engine.backends.common.page_keys import PageKey
from engine.config import ModelSpec
from engine.errors import InvalidRequest
from engine.system.files import claim_folder, replace_file

GIB = 1 << 30
T = TypeVar("T")

# Where the tiers of a model lie.

_SHARED_MEMORY = Path("/dev/shm")
_DISK_FOLDER = "ericllm-kv"
"""A folder of its own in the one that a user names, in which files may be removed."""
_SALT_FILE = "salt"
_SALT_BYTES = 32
_DIGEST_BYTES = 12
_OPEN_S = 10.0
"""As `_HUNG_S`, while a model is loaded; a folder of many pages is measured then."""
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

    Waits for disks, for max 10 s each. Raises InvalidRequest where a tier's folder cannot be used, or holds less than
    the tier's limit.
    """
    salt = None
    for name, root in tier_roots(spec).items():
        try:
            salt, size_bytes = _answered(partial(_claim_root, name, root))
        except OSError as error:
            raise InvalidRequest(unusable(name, root, error), param=f"kv_{name}_gib") from error
        if (limit_bytes := _limit_bytes(spec, name)) > size_bytes:
            raise InvalidRequest(
                f"kv_{name}_gib is {limit_bytes / GIB:g}, but {root.parent if name == 'host' else root} holds "
                f"{size_bytes / GIB:.1f} GiB",
                param=f"kv_{name}_gib",
                limit_bytes=size_bytes,
            )
    return salt


def _limit_bytes(spec: ModelSpec, name: str) -> int:
    return int((spec.kv_host_gib if name == "host" else spec.kv_disk_gib) * GIB)


def unused_host_bytes(spec: ModelSpec) -> int:
    """Return the bytes of RAM that the tiers of a worker on a CPU may still take: the host tier, of which what is in
    shared memory now is taken for a part, the pages that wait for a disk, and those that are being read."""
    unused = 0
    if spec.kv_host_gib:
        used = 0
        with suppress(OSError):
            used = shutil.disk_usage(_SHARED_MEMORY).used
        unused = max(0, int(spec.kv_host_gib * GIB) - used) + _BATCH_BYTES
    return unused + (_QUEUE_BYTES + _MAX_READS * _BATCH_BYTES if spec.kv_disk_gib else 0)


def open_tiers(spec: ModelSpec, pages: DevicePages, digest: str) -> KvTiers | None:
    """Open the tiers of a loaded model; None where it has none. digest: as `pages_digest` returns it.

    A folder that cannot be used, or does not answer, is reported, and a tier without pages: a worker that is started
    again needs none.
    """
    folders: list[PageFolder] = []
    for name, root in tier_roots(spec).items():
        folder = PageFolder(name, root, _limit_bytes(spec, name), digest)
        try:
            _answered(folder.open)
        except OSError as error:
            folder.note_unusable(error)
        folders.append(folder)
    return KvTiers(folders, pages) if folders else None


def _claim_root(name: str, root: Path) -> tuple[bytes, int]:
    """Make the folder of a tier ours alone; return its salt, and the bytes that its file system holds."""
    if name == "host" and not _SHARED_MEMORY.is_dir():
        raise InvalidRequest(f"kv_host_gib needs {_SHARED_MEMORY}, which is not here", param="kv_host_gib")
    claim_folder(root, 0)
    salt_file = root / _SALT_FILE
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # else of two processes that begin, one makes pages that none finds
        salt = salt_file.read_bytes() if salt_file.exists() else b""
        if len(salt) != _SALT_BYTES:
            salt = secrets.token_bytes(_SALT_BYTES)
            replace_file(salt_file, salt)
    finally:
        os.close(descriptor)
    return salt, shutil.disk_usage(root).total


def _answered(look: Callable[[], T]) -> T:
    """Return the result of `look`, which uses the folder of a tier. Raises what that does, and OSError where it does
    not end in time."""
    found: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put(look())
        except Exception as error:
            found.put(error)

    threading.Thread(target=run, name="kv-tiers-open", daemon=True).start()
    try:
        result = found.get(timeout=_OPEN_S)
    except queue.Empty:
        raise OSError(errno.ETIMEDOUT, f"it has not answered for {_OPEN_S:g} s") from None
    if isinstance(result, Exception):
        raise result
    return result


def pages_digest(spec: ModelSpec, stamp: Sequence[str], facts: Sequence[str]) -> str:
    """Return the digest of all that the bytes of a model's pages depend on, besides tokens and adapter. stamp: of the
    files that it was loaded from.  facts: what it is besides `spec`."""
    chosen = (spec.weights, spec.cache_bits, spec.alpha_value, spec.compress_pos_emb, spec.num_experts)
    parts = [*map(str, chosen), *stamp, *facts]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def files_stamp(spec: ModelSpec) -> list[str]:
    """Return what changes when the files of a model or of its adapter do; always another where they cannot be seen."""
    try:
        return [*_files_stamp(spec.path), *(_files_stamp(spec.lora) if spec.lora else ())]
    except OSError:
        return [secrets.token_hex(_DIGEST_BYTES)]


def loaded_stamp(spec: ModelSpec, before: Sequence[str]) -> Sequence[str]:
    """Return the stamp of files that were loaded, `before` as it was when that began. If they changed meanwhile, what
    was loaded is neither the old model nor the new one, and the stamp is one that no other worker has."""
    if files_stamp(spec) == before:
        return before
    _log.warning("the files of %s changed while it was loaded; no other worker finds its KV pages", spec.path)
    return [secrets.token_hex(_DIGEST_BYTES)]


def _files_stamp(path: Path) -> list[str]:
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
_MAX_READS = 4
_HUNG_S = 2.0
"""A disk that has not answered for so long is not used until it does."""
_HUGE_PAGE_BYTES = 2 << 20

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

    def write_pages(self, pages: Sequence[int], contents: memoryview) -> None:
        """Fill the pages with their contents, which follow each other."""


class KvTiers:
    """The tiers of one loaded model, the fastest first. One thread calls, and waits for no disk longer than it says: a
    second one reads from it, and a third one writes what need not be there at once, all of a disk's pages, and all
    pages of a device with its own memory. A disk whose thread has hung for 2 s is not used until that goes on.

    Pages that are in RAM are in the host tier when `store` returns, so a worker's death loses none of them.
    batch_pages: pages that are copied from or to the device together, some milliseconds of work.
    """

    def __init__(self, folders: Sequence[PageFolder], pages: DevicePages) -> None:
        self.batch_pages = min(_BATCH_PAGES, max(1, _BATCH_BYTES // pages.page_bytes))
        self._folders, self._pages = folders, pages
        self._disk = next((folder for folder in folders if folder.name == "disk"), None)
        self._in_memory = [folder for folder in folders if folder is not self._disk]
        self._batches = _Batches(self.batch_pages, pages.page_bytes)
        self._reader = _Reader(self._batches)
        self._writer = _Writer()
        if self._disk is None:
            self._reader.close()  # which prepares memory first

    def has(self, key: PageKey) -> bool:
        """Return whether some tier may have a page: a disk is asked when it is read."""
        reads_disk = self._disk is not None and not self._is_hung(self._disk)
        return reads_disk or any(folder.has(key) for folder in self._in_memory)

    def restore(self, keys: Sequence[PageKey], pages: Sequence[int], wait_s: float = _HUNG_S) -> int | None:
        """Fill up to `batch_pages` pages with these keys; return how many of them, from the first on, were found whole.
        None where a disk has not answered within `wait_s`: call again for them."""
        in_memory = _Read(self._batches, keys[: self.batch_pages], self._in_memory, self._writer)
        if self._in_memory:
            in_memory.run()
        if not in_memory.found:
            in_memory.release()
        lacking = tuple(keys[in_memory.found : self.batch_pages])
        on_disk = None
        if lacking and self._disk is not None and not self._is_hung(self._disk):
            on_disk = self._reader.read(lacking, self._folders, self._writer)
            if on_disk is None or not on_disk.is_done.wait(max(0.0, wait_s)):
                if not self._is_hung(self._disk):
                    in_memory.release()
                    return None
                on_disk = None
        found = in_memory.copy_to(self._pages, pages)
        if on_disk is not None:
            self._reader.forget(lacking)
            found += on_disk.copy_to(self._pages, pages[found:])
        return found

    def store(self, keys: Sequence[PageKey], pages: Sequence[int]) -> None:
        """Copy full pages to the tiers that lack them."""
        lacking = [
            (key, page, folders)
            for key, page in zip(keys, pages, strict=True)
            if (folders := [folder for folder in self._folders if folder is self._disk or not folder.has(key)])
        ]
        in_host_memory = self._pages.in_host_memory
        for start in range(0, len(lacking), self.batch_pages):
            batch = lacking[start : start + self.batch_pages]
            contents = self._pages.read_pages([page for _, page, _ in batch])
            for (key, _, folders), content in zip(batch, contents, strict=True):
                for folder in folders:
                    if folder is not self._disk and in_host_memory:
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
        self._reader.close()
        self._batches.clear()
        self._writer.close()

    def _is_hung(self, disk: PageFolder) -> bool:
        hung_s = self._reader.hung_s
        disk.note_hung(None if hung_s < _HUNG_S else hung_s)
        return hung_s >= _HUNG_S


class _Batches:
    """Memory for pages that are read together. One batch that is not in use is kept, as reading into new memory takes
    longer. Several threads may call."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._batch_bytes = -(-pages * page_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._idle: deque[memoryview] = deque(maxlen=1)

    def prepare(self) -> None:
        """Have a batch ready that exists in RAM. While the kernel zeroes it, the other threads go on."""
        with suppress(OSError, MemoryError):  # a read tries again
            memory = self.take()
            with Path("/dev/zero").open("rb", buffering=0) as zeros:
                zeros.readinto(memory)
            self.put(memory)

    def take(self) -> memoryview:
        """Return memory of a batch, which exists in RAM once it is written to. Raises OSError."""
        with suppress(IndexError):
            return self._idle.pop()
        memory = mmap.mmap(-1, self._batch_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel without large pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(memory)

    def put(self, memory: memoryview) -> None:
        """Keep memory for the next read, in place of what is kept."""
        self._idle.append(memory)

    def clear(self) -> None:
        """Free what is kept."""
        self._idle.clear()


class _Read:
    """Pages that are read together. found: how many of them, from the first on, are in its memory, once `is_done`."""

    def __init__(
        self, batches: _Batches, keys: Sequence[PageKey], folders: Sequence[PageFolder], writer: _Writer
    ) -> None:
        self.is_done = threading.Event()
        self.found = 0
        self._batches, self._keys, self._folders, self._writer = batches, keys, folders, writer
        self._memory: memoryview | None = None

    def run(self) -> None:
        """Read the pages up to the first that no folder has, and have the faster folders keep them."""
        try:
            self._memory = self._batches.take()
            self.found = self._fill(self._memory)
        except Exception:  # else no page was ever read again, and no step planned
            _log.exception("reading KV pages failed")

    def _fill(self, memory: memoryview) -> int:
        size = self._batches.page_bytes
        for count, key in enumerate(self._keys):
            page = memory[count * size : (count + 1) * size]
            slower = next((index for index, folder in enumerate(self._folders) if folder.read(key, page)), None)
            if slower is None:
                return count
            for faster in self._folders[:slower]:
                self._writer.put(faster, key, bytes(page))
        return len(self._keys)

    def copy_to(self, device: DevicePages, pages: Sequence[int]) -> int:
        """Fill the pages with those that were found, return how many, and release them."""
        if self._memory is not None and self.found:
            device.write_pages(pages[: self.found], self._memory[: self.found * self._batches.page_bytes])
        self.release()
        return self.found

    def release(self) -> None:
        """Give the memory to another read."""
        if self._memory is not None:
            self._batches.put(self._memory)
            self._memory = None


class _Reader:
    """A thread that reads pages, a batch at a time. It refers to no memory of the model either. It prepares
    memory first, for which a load, a step or the first read would wait otherwise."""

    def __init__(self, batches: _Batches) -> None:
        self._batches = batches
        self._queue: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._reads: dict[Sequence[PageKey], _Read] = {}
        self._began_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="kv-tiers-read", daemon=True)
        self._thread.start()

    @property
    def hung_s(self) -> float:
        """Seconds for which one batch has been read; 0 for none."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def read(self, keys: Sequence[PageKey], folders: Sequence[PageFolder], writer: _Writer) -> _Read | None:
        """Return the reading of these pages, which is begun where it is not under way; None while too much is."""
        if keys not in self._reads:
            if len(self._reads) >= _MAX_READS:
                for old in [old for old, each in self._reads.items() if each.is_done.is_set()]:
                    self.forget(old)  # whose sequence has ended
            if len(self._reads) >= _MAX_READS:
                return None
            self._reads[keys] = started = _Read(self._batches, keys, folders, writer)
            self._queue.put(started)
        return self._reads[keys]

    def forget(self, keys: Sequence[PageKey]) -> None:
        """Forget pages that were read."""
        self._reads.pop(keys, None)

    def close(self) -> None:
        """End, without waiting for what is being read. What is not begun is not read."""
        self._reads.clear()
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)

    def _run(self) -> None:
        self._batches.prepare()
        while (read := self._queue.get()) is not None:
            self._began_s = time.monotonic()
            read.run()
            self._began_s = None
            read.is_done.set()
            del read  # else its memory is kept until the next one


class _Writer:
    """A thread that writes pages, and measures folders that are due. It refers to no memory of the model, which is free
    after an unload even where a disk stands still."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[PageFolder, PageKey, bytes] | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, folder: PageFolder, key: PageKey, content: bytes) -> None:
        """Queue a page, or only a look at the folder where `content` is empty; skip it where too much is queued."""
        with self._lock:
            if self._is_closed:  # a disk that hung has answered after the unload
                return
            if self._queued_bytes + len(content) > _QUEUE_BYTES:
                folder.skip("it is written too slowly")
                return
            self._queued_bytes += len(content)
            self._queue.put((folder, key, content))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End once all is written; wait for that for max 2 seconds."""
        with self._lock:
            self._is_closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            folder, key, content = queued
            try:
                if content and not folder.has(key):
                    folder.write(key, content)
                if folder.is_due:
                    folder.measure()
            except Exception:  # else no page was ever written again
                _log.exception("writing KV pages failed")
            with self._lock:
                self._queued_bytes -= len(content)
