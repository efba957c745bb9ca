"""PageFile: the KV pages of a worker on a CPU, in memory that the worker which takes its place finds again."""

from __future__ import annotations

import os
import sys

from engine.backends.common.page_keys import PageIndex
from engine.backends.torch.huge_pages import LARGE_PAGE_BYTES, FileMapping, shared_tensor
from engine.backends.torch.weights.shared import find_ram_files


class PageFile:
    """An anonymous RAM file of KV pages and their index, mapped with large pages where the system has them.

    It is never sealed: one worker writes to it, and a process that keeps it open hands it to the next one. A kill
    leaves all that was written, and a page is in the index only while it is full of computed tokens.

    pages: their bytes.  index: their keys.  found: True if an earlier worker wrote to it.
    """

    def __init__(self, descriptor: int, pages_bytes: int, num_pages: int, *, found: bool) -> None:
        """Map a file. Raises OSError."""
        self.found = found
        end = pages_bytes + num_pages * PageIndex.ENTRY_BYTES
        size_bytes = -(-end // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        if not found:
            os.truncate(descriptor, size_bytes)
        elif os.fstat(descriptor).st_size != size_bytes:
            raise OSError(f"{size_bytes} bytes of KV pages are not {os.fstat(descriptor).st_size}")
        mapping = FileMapping(descriptor, size_bytes, writer=descriptor)
        content = shared_tensor(mapping.view)
        if not found:
            mapping.advise_large_pages()
            content[::LARGE_PAGE_BYTES] = 0  # a large page takes the place of some small one only
            if not mapping.collapse():
                os.posix_fallocate(descriptor, 0, size_bytes)
        self.pages = content[:pages_bytes]
        self.index = PageIndex(content[pages_bytes:end].numpy().data)

    @classmethod
    def find(cls, name: str, pages_bytes: int, num_pages: int) -> PageFile | None:
        """Return the file of that name which a process of this user has open; None if there is none."""
        for path in find_ram_files(_full_name(name, num_pages)):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:  # its process has just ended
                continue
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    return cls(descriptor, pages_bytes, num_pages, found=True)
            except OSError:
                continue
            finally:
                os.close(descriptor)
        return None

    @classmethod
    def create(cls, name: str, pages_bytes: int, num_pages: int) -> PageFile | None:
        """Return a new file of zeroed pages; None where the system has none, or too little memory."""
        if sys.platform != "linux":
            return None
        try:
            descriptor = os.memfd_create(_full_name(name, num_pages), os.MFD_CLOEXEC)
        except OSError:
            return None
        try:
            return cls(descriptor, pages_bytes, num_pages, found=False)
        except OSError:
            return None
        finally:
            os.close(descriptor)


def _full_name(name: str, num_pages: int) -> str:
    """Other numbers of pages may be equally many large pages, and have their index elsewhere."""
    return f"{name}-{num_pages}"
