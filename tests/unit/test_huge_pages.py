"""Files of RAM that large pages can back."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.backends.torch import huge_pages
from engine.backends.torch.huge_pages import LARGE_PAGE_BYTES, FileMapping

_DESCRIPTORS = Path("/proc/self/fd")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has files of RAM")


@pytest.fixture
def file() -> Iterator[int]:
    """Three large pages and a bit, of which each begins with its number."""
    fd = os.memfd_create("test")
    for page in range(4):
        os.pwrite(fd, bytes([page + 1]) * 8, page * LARGE_PAGE_BYTES)
    yield fd
    os.close(fd)


def test_a_mapping_begins_where_a_large_page_can(file: int) -> None:
    mapping = FileMapping(file, LARGE_PAGE_BYTES + 8, offset=2 * LARGE_PAGE_BYTES)
    with warnings.catch_warnings(action="ignore"):  # that the tensor cannot be written to
        assert torch.frombuffer(mapping.view, dtype=torch.uint8).data_ptr() % LARGE_PAGE_BYTES == 0
    assert bytes(mapping.view[:8]) == bytes([3]) * 8
    assert bytes(mapping.view[-8:]) == bytes([4]) * 8
    assert mapping.view.readonly


def test_large_pages_are_made_of_whole_ones_before_the_end(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = FileMapping(file, 3 * LARGE_PAGE_BYTES + 8)
    asked: list[tuple[int, int]] = []

    class System:
        def madvise(self, address: int, size_bytes: int, advice: int) -> int:
            asked.append((size_bytes, advice))
            return -1  # as where the system has none: nothing but speed is lost

    with monkeypatch.context() as patched:
        patched.setattr(huge_pages, "_libc", System)
        for end in (2 * LARGE_PAGE_BYTES + 5, LARGE_PAGE_BYTES - 1, 1 << 40):
            if (enlarging := mapping.enlarge_pages(end)) is not None:
                enlarging.join()
    assert asked == [(2 * LARGE_PAGE_BYTES, 25), (3 * LARGE_PAGE_BYTES, 25)]


def test_enlarging_pages_changes_no_byte(file: int) -> None:
    mapping = FileMapping(file, 3 * LARGE_PAGE_BYTES + 8)
    before = bytes(mapping.view)
    enlarging = mapping.enlarge_pages(len(mapping.view))
    assert enlarging is not None
    enlarging.join()
    assert bytes(mapping.view) == before


def test_what_may_be_written_through_a_mapping_ends_with_the_writing_and_then_it_can_be_sealed() -> None:
    writer = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.truncate(writer, LARGE_PAGE_BYTES)
    reader = os.open(f"/proc/self/fd/{writer}", os.O_RDONLY)
    mapping = FileMapping(reader, LARGE_PAGE_BYTES, writer=writer)
    with warnings.catch_warnings(action="ignore"):
        written = torch.frombuffer(mapping.view, dtype=torch.uint8)
    written[:8] = 7
    with pytest.raises(OSError, match="busy"):
        fcntl.fcntl(writer, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    mapping.end_writing()
    fcntl.fcntl(writer, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert written[:9].tolist() == [7] * 8 + [0]
    os.close(reader)
    os.close(writer)


def test_the_file_stays_open_and_mapped_as_long_as_a_part_is_used(file: int) -> None:
    part = FileMapping(file, 2 * LARGE_PAGE_BYTES).view[LARGE_PAGE_BYTES:]
    gc.collect()
    assert bytes(part[:8]) == bytes([2]) * 8
    assert _open_on(file) == 2
    del part
    gc.collect()
    assert _open_on(file) == 1


def test_what_cannot_be_mapped_is_an_error_that_leaves_nothing_open() -> None:
    reader, writer = os.pipe()
    opened = len(list(_DESCRIPTORS.iterdir()))
    with pytest.raises(OSError, match=r"No such device|Invalid argument|Permission denied"):
        FileMapping(reader, LARGE_PAGE_BYTES)
    assert len(list(_DESCRIPTORS.iterdir())) == opened
    os.close(reader)
    os.close(writer)


def _open_on(fd: int) -> int:
    wanted = os.fstat(fd).st_ino
    return sum(_inode(int(each.name)) == wanted for each in _DESCRIPTORS.iterdir())


def _inode(fd: int) -> int:
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return -1
