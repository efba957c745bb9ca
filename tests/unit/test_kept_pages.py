"""KV pages that a worker leaves in memory: the next one finds those that were full, and no other ones."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from engine.backends.common.page_keys import PageIndex
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.torch import huge_pages
from engine.backends.torch.kv.page_file import PageFile

KEYS = [bytes([number]) * 16 for number in range(8)]


def index_of(memory: bytearray) -> PageIndex:
    return PageIndex(memoryview(memory))


def pool_over(memory: bytearray) -> PagePool:
    return PagePool(4, 16, b"salt", index_of(memory))


@pytest.fixture
def memory() -> bytearray:
    return bytearray(4 * PageIndex.ENTRY_BYTES)


def test_full_pages_are_found_by_the_next_pool_and_others_are_blank(memory: bytearray) -> None:
    first = pool_over(memory)
    pages = first.allocate(3)
    assert pages == [0, 1, 2]
    first.register(0, KEYS[0])
    first.register(1, KEYS[1])
    second = pool_over(memory)
    second.check([])
    assert second.find(KEYS) == [0, 1]
    assert (second.free_pages, second.cached_pages) == (4, 2)
    assert len(second.take_changes().added) == 2, "the dispatcher learns of them"


def test_a_page_that_is_written_to_again_is_not_found(memory: bytearray) -> None:
    first = pool_over(memory)
    for number in range(4):
        (page,) = first.allocate(1) or ()
        first.register(page, KEYS[number])
        first.release([page])
    (reused,) = first.allocate(1) or ()
    assert reused == 0
    assert pool_over(memory).find([KEYS[0]]) == []
    assert pool_over(memory).find([KEYS[1]]) == [1]


def test_pages_that_a_request_used_are_reused_last(memory: bytearray) -> None:
    first = pool_over(memory)
    pages = first.allocate(4)
    assert pages is not None
    for page in pages:
        first.register(page, KEYS[page])
    first.release([2])
    first.release([3])
    first.acquire([3])
    second = pool_over(memory)
    assert second.allocate(1) == [2]
    second.check([[2]])


def test_a_page_whose_key_means_nothing_to_the_next_worker_is_not_left(memory: bytearray) -> None:
    first = pool_over(memory)
    pages = first.allocate(1)
    assert pages is not None
    first.register(pages[0], KEYS[0], is_lasting=False)
    first.release(pages)
    first.acquire(pages)
    assert pool_over(memory).cached_pages == 0


def test_a_file_of_pages_is_found_as_it_was_while_any_process_has_it_open() -> None:
    name, size = f"ericllm-kv-test-{os.getpid()}", 5000
    assert PageFile.find(name, size, 3) is None
    file = PageFile.create(name, size, 3)
    assert file is not None
    assert not file.found
    assert not file.pages.any()
    file.pages[:3] = 7
    file.index.add(1, KEYS[1])
    again = PageFile.find(name, size, 3)
    assert again is not None
    assert again.found
    assert again.pages[:4].tolist() == [7, 7, 7, 0]
    assert again.index.entries() == [(1, KEYS[1])]
    assert PageFile.find(name, 5 << 20, 3) is None, "it has another size"
    assert PageFile.find(name, size, 4) is None, "it has another number of pages"
    del file, again
    assert PageFile.find(name, size, 3) is None


def test_without_memory_for_a_file_pages_are_the_workers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.backends.torch.huge_pages.FileMapping.collapse", lambda mapping: False)

    def short(*given: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", short)
    assert PageFile.create("ericllm-kv-test", 5000, 3) is None


def test_large_pages_are_asked_for_before_the_first_byte_is_written_and_made_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system, asked = huge_pages._libc(), list[tuple[int, bool]]()

    class System:
        mmap, munmap = system.mmap, system.munmap

        def madvise(self, address: int, size_bytes: int, advice: int) -> int:
            asked.append((advice, any(each.stat().st_blocks for each in open_files())))
            return -1

    monkeypatch.setattr(huge_pages, "_libc", System)
    assert PageFile.create("ericllm-kv-test", 5000, 3) is not None
    assert asked == [(mmap.MADV_HUGEPAGE, False), (huge_pages._COLLAPSE, True)]


def open_files() -> list[Path]:
    """Those that this process has open."""
    links = Path("/proc/self/fd").iterdir()
    return [each for each in links if each.exists() and "ericllm-kv-test" in str(each.readlink())]


def test_where_large_pages_cannot_be_had_the_memory_is_reserved_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.backends.torch.huge_pages.FileMapping.collapse", lambda mapping: False)
    file = PageFile.create("ericllm-kv-test", 5000, 3)
    assert file is not None
    (link,) = open_files()
    assert link.stat().st_blocks * 512 == 2 << 20
