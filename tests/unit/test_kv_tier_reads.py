"""Pages that are read back from KV tiers: whole ones alone, past a disk that hangs, into memory that is there."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import threading
import time
import tracemalloc
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from engine.backends.common import kv_tiers
from engine.backends.common.kv_tiers import KvTiers
from engine.backends.common.page_folder import PageFolder
from engine.backends.scheduler.sequences import Sequence as TokenSequence
from tests.fakes.scheduling import fed
from tests.fakes.tiered import PROMPT, FakePages, TieredWorker, ask, tokens_in

KEYS = [index.to_bytes(16) for index in range(20)]
CONTENTS = [bytes([index] * 4) for index in range(20)]


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """A disk is waited for, however slow the machine is, where a test does not say otherwise."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kv_tiers, "_HUNG_S", math.inf)
        patched.setattr(kv_tiers, "_CLOSE_S", 60.0)
        yield


@pytest.fixture
def folders(tmp_path: Path) -> list[PageFolder]:
    return [PageFolder(name, tmp_path / name, 1 << 20, "model").open() for name in ("host", "disk")]


def written(folder: PageFolder, numbers: Iterable[int]) -> PageFolder:
    """Write pages of KEYS to the folder, and return it."""
    for number in numbers:
        folder.write(KEYS[number], CONTENTS[number])
    return folder


class HungDisk:
    """A disk whose reads wait until `answers` is set. reads: keys of those that have begun, as `has_begun` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, self.has_begun = threading.Event(), threading.Event()
        self.reads: list[bytes] = []
        read = PageFolder.read

        def hang(folder: PageFolder, key: bytes, content: memoryview) -> bool:
            if folder.name == "disk":
                self.reads.append(key)
                self.has_begun.set()
                assert self.answers.wait(60)
            return read(folder, key, content)

        monkeypatch.setattr(PageFolder, "read", hang)


def on_disk(root: Path) -> None:
    """Have the pages of PROMPT on the disk tier."""
    worker = TieredWorker(root, names=("disk",))
    ask(worker, "a")
    worker.step()
    worker.tiers.close()


def test_a_disk_that_hangs_holds_up_no_other_request_and_its_pages_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk(tmp_path)
    disk = HungDisk(monkeypatch)
    worker = TieredWorker(tmp_path, names=("disk",), waits_for_disk=False)
    other = TokenSequence("other", [99] * 3, 3)
    worker.scheduler.submit(other)
    while "other" not in fed(worker.step()):
        disk.answers.set()
    disk.answers.clear()
    sequence = ask(worker, "b")
    assert [fed(worker.step()) for _ in range(3)] == [{"other": 1}] * 3
    monkeypatch.undo()
    monkeypatch.setattr(kv_tiers, "_HUNG_S", 0.0)
    assert fed(worker.step()) == {"other": 1, "b": 40}
    assert sequence.cached_tokens == 0
    (stats,) = worker.tiers.stats()
    assert stats.problem == (f"the disk tier of the KV cache is not used until it answers ({tmp_path}/disk/model)")
    fresh = ask(worker, "c", [50] * 9)
    assert fed(worker.step())["c"] == 9, "it does not even look"
    worker.scheduler.remove(fresh)
    disk.answers.set()
    worker.tiers._reader._queue.put(None)
    worker.tiers._reader._thread.join(60)
    monkeypatch.undo()
    assert worker.tiers.has(KEYS[0])
    assert worker.tiers.stats()[0].problem == ""


def test_a_disk_that_answers_late_gives_its_pages_in_a_later_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk(tmp_path)
    disk = HungDisk(monkeypatch)
    worker = TieredWorker(tmp_path, names=("disk",), waits_for_disk=False)
    sequence = ask(worker, "b")
    assert fed(worker.step()) == {}
    disk.answers.set()
    while not (plan := fed(worker.step())):
        pass
    assert plan == {"b": 4}
    assert tokens_in(worker, sequence) == PROMPT
    worker.tiers.close()


def test_reads_of_requests_that_have_ended_are_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(tmp_path)
    disk = HungDisk(monkeypatch)
    worker = TieredWorker(tmp_path, names=("disk",), waits_for_disk=False)
    for number in range(10):
        ended = ask(worker, f"e{number}", [number] * 12)
        worker.step()
        worker.scheduler.remove(ended)
    disk.answers.set()
    sequence = ask(worker, "b")
    while "b" not in fed(worker.step()):
        pass
    assert sequence.cached_tokens == 36
    worker.tiers.close()


def test_reads_under_way_at_once_keep_their_pages_apart(
    folders: list[PageFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, disk = FakePages(), written(folders[1], range(6))
    hung = HungDisk(monkeypatch)
    tiers = KvTiers([disk], pages)
    assert [tiers.restore([key], [page], 0.0) for page, key in enumerate(KEYS[:6])] == [None] * 6
    assert len(tiers._reader._reads) == 4
    hung.answers.set()
    for read in tiers._reader._reads.values():
        assert read.is_done.wait(60)
    assert [tiers.restore([key], [page], 60.0) for page, key in enumerate(KEYS[:6])] == [1] * 6
    assert pages.read_pages(range(6)) == CONTENTS[:6]
    assert hung.reads == KEYS[:6], "none is begun while four are under way, or again"
    tiers.close()


@pytest.mark.parametrize("damage", ["torn", "flipped", "swapped", "empty", "longer"])
def test_a_damaged_page_is_removed_and_its_tokens_are_computed_again(tmp_path: Path, damage: str) -> None:
    ask(first := TieredWorker(tmp_path), "a")
    first.step()
    files = sorted((tmp_path / "host" / "model").iterdir())
    if damage == "swapped":
        files[0].write_bytes(files[1].read_bytes())
    for file in files:
        content = bytearray(file.read_bytes())
        if damage == "torn":
            content = content[:-1]
        elif damage == "flipped":
            content[-1] ^= 1
        elif damage == "empty":
            content.clear()
        elif damage == "longer":
            content.append(0)
        file.write_bytes(content)
    second = TieredWorker(tmp_path)
    sequence = ask(second, "b")
    second.step()
    assert tokens_in(second, sequence) == PROMPT
    stats = second.tiers.stats()[0]
    assert stats.damaged_pages >= 1
    assert "damaged" in stats.problem or stats.problem == ""


def test_a_disk_that_cannot_be_read_is_one_sentence_and_costs_its_pages_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(first := TieredWorker(tmp_path), "a")
    first.step()
    second = TieredWorker(tmp_path)

    def stale(*given: object, **named: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as broken:
        broken.setattr(os, "stat", stale)
        sequence = ask(second, "b")
        second.step()
    assert tokens_in(second, sequence) == PROMPT
    third = TieredWorker(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", stale)
        sequence = ask(third, "b")
        third.step()
    assert tokens_in(third, sequence) == PROMPT
    assert third.tiers.stats()[0].problem == (
        f"KV pages of the host tier cannot be read: {os.strerror(errno.ESTALE)} ({tmp_path}/host/model)"
    )


def test_pages_of_two_tiers_are_filled_in_order(folders: list[PageFolder]) -> None:
    written(folders[0], range(2))
    written(folders[1], range(2, 5))
    pages = FakePages()
    tiers = KvTiers(folders, pages)
    assert tiers.restore(KEYS[:6], [7, 6, 5, 4, 3, 2], 60.0) == 5
    assert pages.read_pages([7, 6, 5, 4, 3]) == CONTENTS[:5]
    tiers.close()


@pytest.mark.parametrize("hung", [[True], [False, True]], ids=["before", "meanwhile"])
def test_a_disk_that_hangs_takes_nothing_from_what_is_in_memory(
    folders: list[PageFolder], monkeypatch: pytest.MonkeyPatch, hung: list[bool]
) -> None:
    written(folders[0], range(2))
    pages, disk, answers = FakePages(), HungDisk(monkeypatch), iter(hung)
    tiers = KvTiers(folders, pages)
    monkeypatch.setattr(tiers, "_is_hung", lambda folder: next(answers))
    assert tiers.restore(KEYS[:4], range(4), 0.0) == 2
    assert pages.read_pages(range(2)) == CONTENTS[:2]
    disk.answers.set()
    tiers.close()


def test_the_host_tier_gets_copies_of_what_was_read_from_disk(
    folders: list[PageFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that it was read into is used again before they are written."""
    host, disk = folders[0], written(folders[1], range(2))
    goes_on, write = threading.Event(), PageFolder.write
    monkeypatch.setattr(PageFolder, "write", lambda *given: (goes_on.wait(60), write(*given)))
    tiers = KvTiers([host, disk], FakePages())
    assert [tiers.restore([key], [page], 60.0) for page, key in enumerate(KEYS[:2])] == [1, 1]
    goes_on.set()
    tiers.close()
    pages = FakePages()
    assert KvTiers([host], pages).restore(KEYS[:2], range(2)) == 2
    assert pages.read_pages(range(2)) == CONTENTS[:2]


@pytest.mark.parametrize("name", ["host", "disk"])
def test_of_more_pages_than_a_batch_has_the_others_are_left_as_they_are(tmp_path: Path, name: str) -> None:
    folder = written(PageFolder(name, tmp_path, 1 << 20, "model").open(), range(20))
    pages = FakePages()
    tiers = KvTiers([folder], pages)
    assert tiers.restore(KEYS, range(20), 60.0) == tiers.batch_pages == 16
    assert pages.read_pages(range(16)) == CONTENTS[:16]
    assert folder.stats().damaged_pages == 0
    assert all(folder.has(key) for key in KEYS)
    tiers.close()


# The memory that pages are read into.


class Batches:
    """Memory of batches. makers: names of the threads that made it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.makers: list[str] = []
        self._made: list[weakref.ref[mmap.mmap]] = []
        make = mmap.mmap

        def record(*given: int, **named: int) -> mmap.mmap:
            self.makers.append(threading.current_thread().name)
            self._made.append(weakref.ref(memory := make(*given, **named)))
            return memory

        monkeypatch.setattr(mmap, "mmap", record)

    def wait_for_count(self, count: int) -> None:
        """Wait until so many are left: a thread may be about to let one go."""
        ends_s = time.monotonic() + 60
        while (left := sum(made() is not None for made in self._made)) != count and time.monotonic() < ends_s:
            time.sleep(0.001)
        assert left == count


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    return Batches(monkeypatch)


def prepared(tiers: KvTiers) -> memoryview:
    """Return the memory that is prepared for the first read, once it is."""
    deadline_s = time.monotonic() + 60
    while not tiers._batches._idle:
        assert time.monotonic() < deadline_s, "it was never prepared"
        time.sleep(0.001)
    return tiers._batches._idle[0]


def resident_bytes(memory: memoryview) -> int:
    in_ram = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(memory)), in_ram) == 0
    return sum(each & 1 for each in in_ram) * mmap.PAGESIZE


@pytest.mark.parametrize("name", ["host", "disk"])
def test_reading_pages_takes_no_new_memory(tmp_path: Path, name: str) -> None:
    class LargePages(FakePages):
        def write_pages(self, pages: Sequence[int], contents: bytes | memoryview) -> None:
            read.append(zlib.crc32(contents))

    read: list[int] = []
    content = os.urandom(1 << 20)
    folder = PageFolder(name, tmp_path, 1 << 30, "model").open()
    keys = [index.to_bytes(16) for index in range(8)]
    for key in keys:
        folder.write(key, content)
    tiers = KvTiers([folder], LargePages(len(content)))
    tracemalloc.start()
    try:
        assert tiers.restore(keys, range(8), 60.0) == 8
        assert tracemalloc.get_traced_memory()[1] < len(content) / 2
    finally:
        tracemalloc.stop()
    assert read == [zlib.crc32(content * 8)]
    tiers.close()


def test_tiers_are_opened_without_waiting_for_memory(
    folders: list[PageFolder], batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", lambda thread: None)
        KvTiers(folders, FakePages(1 << 20))
    assert batches.makers == []


@pytest.mark.parametrize("names", [("host",), ("disk",), ("host", "disk")])
def test_memory_for_the_first_read_is_prepared_and_used_again(
    tmp_path: Path, batches: Batches, names: tuple[str, ...]
) -> None:
    folders = [written(PageFolder(name, tmp_path / name, 1 << 20, "model").open(), range(6)) for name in names]
    tiers = KvTiers(folders, FakePages())
    memory = prepared(tiers)
    assert resident_bytes(memory) == len(memory)
    del memory
    assert [tiers.restore([key], [0], 60.0) for key in KEYS[:7]] == [1] * 6 + [0]
    assert batches.makers == ["kv-tiers-read"]
    tiers.close()
    batches.wait_for_count(0)


def test_a_read_in_memory_waits_for_none_to_be_prepared(
    folders: list[PageFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(kv_tiers._Batches, "prepare", lambda batches: goes_on.wait(60))
    pages = FakePages()
    tiers = KvTiers([written(folders[0], range(2))], pages)
    assert tiers.restore(KEYS[:2], range(2)) == 2
    assert pages.read_pages(range(2)) == CONTENTS[:2]
    goes_on.set()
    tiers._reader._thread.join(60)
    assert not tiers._reader._thread.is_alive(), "it has nothing else to do"


def test_memory_for_a_disk_is_made_where_a_read_begins_and_freed_but_for_one(
    folders: list[PageFolder], batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HungDisk(monkeypatch)
    tiers = KvTiers([written(folders[1], range(4))], FakePages())
    assert [tiers.restore([key], [0], 0.0) for key in KEYS[:4]] == [None] * 4
    assert disk.has_begun.wait(60)
    assert batches.makers == ["kv-tiers-read"]
    disk.answers.set()
    for read in tiers._reader._reads.values():
        assert read.is_done.wait(60)
    del read
    assert batches.makers == ["kv-tiers-read"] * 4
    assert [tiers.restore([key], [0], 60.0) for key in reversed(KEYS[:4])] == [1] * 4
    batches.wait_for_count(1)
    tiers.close()


def test_an_unload_while_a_disk_hangs_keeps_only_the_memory_that_is_read_into(
    folders: list[PageFolder], batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HungDisk(monkeypatch)
    tiers = KvTiers([written(folders[0], range(1)), written(folders[1], range(5))], FakePages())
    prepared(tiers)
    assert [tiers.restore([key], [0], 0.0) for key in KEYS[1:5]] == [None] * 4
    assert disk.has_begun.wait(60)
    assert tiers.restore(KEYS[:1], [0]) == 1
    batches.wait_for_count(2)
    tiers.close()
    batches.wait_for_count(1)
    disk.answers.set()
    tiers._reader._thread.join(60)
    assert disk.reads == KEYS[1:2], "what has not begun is not read any more"
    batches.wait_for_count(0)


@pytest.mark.parametrize("name", ["host", "disk"])
@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), MemoryError()])
def test_pages_are_computed_while_there_is_no_memory_to_read_them_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, error: Exception
) -> None:
    def refuse(*given: int, **named: int) -> None:
        raise error

    folder = written(PageFolder(name, tmp_path, 1 << 20, "model").open(), range(1))
    with monkeypatch.context() as without_memory:
        without_memory.setattr(mmap, "mmap", refuse)
        tiers = KvTiers([folder], FakePages())
        assert tiers.restore(KEYS[:1], [0], 60.0) == 0
    assert "reading KV pages failed" in caplog.text
    assert tiers.restore(KEYS[:1], [0], 60.0) == 1
    tiers.close()


def test_pages_of_the_host_are_copied_to_the_device_once_the_disk_has_answered(
    folders: list[PageFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, hung = FakePages(), HungDisk(monkeypatch)
    tiers = KvTiers([written(folders[0], range(1)), written(folders[1], range(1, 2))], pages)
    assert [tiers.restore(KEYS[:2], [0, 1], 0.0) for _ in range(5)] == [None] * 5
    assert not pages.tokens
    hung.answers.set()
    assert tiers.restore(KEYS[:2], [0, 1], 60.0) == 2
    assert pages.read_pages(range(2)) == CONTENTS[:2]
    tiers.close()


def test_a_disk_that_answers_after_the_end_leaves_no_thread(
    folders: list[PageFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, hung = set(threading.enumerate()), HungDisk(monkeypatch)
    tiers = KvTiers([folders[0], written(folders[1], range(1))], FakePages())
    assert tiers.restore(KEYS[:1], [0], 0.0) is None
    assert hung.has_begun.wait(60)
    tiers.close()
    hung.answers.set()
    tiers._reader._thread.join(60)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()
