"""What KV tiers promise: pages outlive their worker, and are restored and stored beside what a step computes."""

from __future__ import annotations

import errno
import gc
import itertools
import math
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.backends.common import kv_tiers, page_folder
from engine.backends.common.kv_tiers import KvTiers
from engine.backends.common.page_folder import PageFolder
from engine.backends.scheduler.async_scheduling import plan_next_step
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.sequences import BatchPlan
from engine.backends.scheduler.sequences import Sequence as TokenSequence
from tests.fakes.scheduling import fed
from tests.fakes.tiered import PAGE_TOKENS, PROMPT, FakePages, TieredWorker, ask, tokens_in

KEY = bytes(range(16))


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """A disk is waited for, however slow the machine is, where a test does not say otherwise."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kv_tiers, "_HUNG_S", math.inf)
        patched.setattr(kv_tiers, "_CLOSE_S", 60.0)
        yield


def test_a_worker_that_is_started_again_computes_no_full_page_again(tmp_path: Path) -> None:
    first = TieredWorker(tmp_path)
    before = ask(first, "a")
    for _ in range(6):
        first.step()
    second = TieredWorker(tmp_path)  # the first was killed: nothing of it was closed
    after = TokenSequence("a", list(before.token_ids), before.prompt_tokens, resumed=True)
    second.scheduler.submit(after)
    plan = second.step()
    assert fed(plan) == {"a": before.num_tokens - (before.num_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS}
    assert tokens_in(second, after) == before.token_ids
    assert second.scheduler.counters.restored_tokens == 44
    assert second.tiers.stats()[0].restored_pages == 11


def test_restored_tokens_count_as_cached_once(tmp_path: Path) -> None:
    ask(first := TieredWorker(tmp_path), "a")
    first.step()
    second = TieredWorker(tmp_path)
    sequence = ask(second, "b")
    second.step()
    assert sequence.cached_tokens == 36
    assert second.scheduler.counters.prefix_query_tokens == 40
    assert second.scheduler.counters.prefix_hit_tokens == 36


def test_pages_of_the_device_come_before_those_of_a_tier(tmp_path: Path) -> None:
    worker = TieredWorker(tmp_path)
    ask(worker, "a")
    worker.step()
    ask(worker, "b")
    worker.step()
    assert worker.scheduler.counters.restored_tokens == 0


def test_while_others_decode_pages_are_restored_a_few_per_step(tmp_path: Path) -> None:
    long = list(range(1, 201))
    first = TieredWorker(tmp_path)
    ask(first, "a", long)
    while first.scheduler.running[0].num_uncomputed > 1 if first.scheduler.running else True:
        first.step()
    ticks = itertools.count()
    second = TieredWorker(tmp_path, clock=lambda: float(next(ticks)))
    ask(second, "other", [99] * 5)
    second.step()
    sequence = ask(second, "b", long)
    seen = []
    while not seen or "b" not in seen[-1]:
        seen.append(fed(second.step()))
    assert len(seen) == 4, "49 pages, 16 per step"
    assert all("other" in each for each in seen), "no step is without a token for the other"
    assert seen[-1]["b"] == 4
    assert sequence.cached_tokens == 196


def stored(root: Path, *prompts: list[int]) -> None:
    """Have the pages of these prompts in the tier."""
    for prompt in prompts:
        ask(worker := TieredWorker(root), "a", prompt)
        while worker.scheduler.running or worker.scheduler.waiting:
            worker.step()
            if worker.scheduler.running and worker.scheduler.running[0].num_uncomputed == 1:
                break


@pytest.mark.parametrize("decodes", [True, False])
def test_all_sequences_together_are_restored_for_the_time_of_one(tmp_path: Path, decodes: bool) -> None:
    prompts = [[index, *range(100, 160)] for index in range(1, 6)]
    stored(tmp_path, *prompts)
    now = 0.0
    worker = TieredWorker(tmp_path, pages=128, clock=lambda: now)
    restore = worker.tiers.restore

    def slow(keys: list[bytes], pages: list[int], wait_s: float) -> int | None:
        nonlocal now
        now += 0.2
        return restore(keys, pages, wait_s)

    if decodes:
        ask(worker, "other", [99] * 5)
        worker.step()
    worker.tiers.restore = slow  # type: ignore[method-assign]
    for index, prompt in enumerate(prompts):
        ask(worker, f"b{index}", prompt)
    steps_s = []
    while any(each.stored_pages or not each.computed for each in worker.scheduler.running) or worker.scheduler.waiting:
        began_s = now
        plan = worker.step()
        assert not decodes or "other" in fed(plan), "no step is without a token for the other"
        steps_s.append(round(now - began_s, 3))
    assert max(steps_s) == (0.2 if decodes else 0.4), "one batch, or those that begin within 0.25 s"
    assert worker.scheduler.counters.restored_tokens == 5 * 60


@pytest.mark.parametrize("target_s", [0.03, 0.12])
def test_pages_are_restored_within_the_time_between_tokens_that_is_promised(tmp_path: Path, target_s: float) -> None:
    long = list(range(1, 241))
    stored(tmp_path, long)
    now = 0.0
    worker = TieredWorker(tmp_path, pages=128, clock=lambda: now)
    worker.scheduler.pacing.set_target(target_s)
    restore = worker.tiers.restore
    worker.tiers.batch_pages = 4

    def slow(keys: list[bytes], pages: list[int], wait_s: float) -> int | None:
        nonlocal now
        now += 0.004
        return restore(keys, pages, wait_s)

    def step() -> BatchPlan:
        nonlocal now
        plan = worker.scheduler.plan()
        now += 0.01 + 0.0002 * sum(len(chunk.token_ids) for chunk in plan.chunks)
        worker.pages.feed(plan)
        worker.scheduler.commit(plan, [[7]] * len(plan.sampled_sequences))
        return plan

    ask(worker, "other", [99] * 30)
    for _ in range(40):
        step()
    ask(worker, "prompt", [98] * 30)
    for _ in range(40):
        step()
    worker.tiers.restore = slow  # type: ignore[method-assign]
    sequence = ask(worker, "b", long)
    restored_s, took_s = [], []
    while sequence.computed < 236:
        began_s = now
        restored_s.append(step().restored_s)
        took_s.append(now - began_s)
    assert sequence.cached_tokens == 236
    assert max(took_s) <= target_s
    assert max(restored_s) >= (0.012 if target_s == 0.03 else 0.056), "as much as fits is read back in a step"
    report = worker.scheduler.pacing.report()
    assert report is not None
    assert report.error is not None
    assert report.error < 0.05, "reading back counts for no price"


def test_pages_are_restored_within_the_target_beside_many_answers_too(tmp_path: Path) -> None:
    long = list(range(1, 241))
    stored(tmp_path, long)
    now = 0.0
    worker = TieredWorker(tmp_path, pages=1200, clock=lambda: now)
    worker.scheduler.limits.set_max_prompts(32)
    worker.scheduler.limits.set_step_tokens(256)
    worker.scheduler.pacing.set_target(0.03)
    restore = worker.tiers.restore
    worker.tiers.batch_pages = 2

    def slow(keys: list[bytes], pages: list[int], wait_s: float) -> int | None:
        nonlocal now
        now += 0.001
        return restore(keys, pages, wait_s)

    def step() -> float:
        nonlocal now
        began_s = now
        plan = worker.scheduler.plan()
        now += 0.01 + 0.0004 * sum(len(chunk.token_ids) for chunk in plan.chunks)
        worker.pages.feed(plan)
        worker.scheduler.commit(plan, [[7]] * len(plan.sampled_sequences))
        return now - began_s

    for number in range(24):
        ask(worker, f"other {number}", [99 - number] * 30)
        for _ in range(4):
            step()
    for _ in range(30):
        step()
    worker.tiers.restore = slow  # type: ignore[method-assign]
    sequence = ask(worker, "b", long)
    took_s = []
    while sequence.computed < 236:
        took_s.append(step())
    assert sequence.cached_tokens == 236
    assert max(took_s) <= 0.03


def test_pages_that_are_restored_when_a_prompt_is_admitted_are_no_part_of_what_its_step_computed(
    tmp_path: Path,
) -> None:
    stored(tmp_path, PROMPT)
    now = 0.0
    worker = TieredWorker(tmp_path, clock=lambda: now)
    restore = worker.tiers.restore
    worker.tiers.batch_pages = 4

    def slow(keys: list[bytes], pages: list[int], wait_s: float) -> int | None:
        nonlocal now
        now += 0.004
        return restore(keys, pages, wait_s)

    worker.tiers.restore = slow  # type: ignore[method-assign]
    ask(worker, "other", [99] * 30)
    assert worker.step().restored_s == 0.0
    ask(worker, "b", PROMPT)
    before_s = now
    assert worker.step().restored_s == pytest.approx(now - before_s)
    assert now - before_s >= 0.004


def test_pages_that_are_restored_before_there_is_anything_to_compute_are_no_part_of_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, list(range(1, 241)))
    now = 0.0
    worker = TieredWorker(tmp_path, pages=128, clock=lambda: now)
    restore = worker.tiers.restore
    worker.tiers.batch_pages = 4

    def slow(keys: list[bytes], pages: list[int], wait_s: float) -> int | None:
        nonlocal now
        now += 0.1
        return restore(keys, pages, wait_s)

    def step() -> BatchPlan:
        nonlocal now
        plan = worker.scheduler.plan()
        if plan.chunks:
            now += 0.01
            worker.pages.feed(plan)
            worker.scheduler.commit(plan, [[7]] * len(plan.sampled_sequences))
        return plan

    worker.tiers.restore = slow  # type: ignore[method-assign]
    took_s: list[float] = []
    pacing = worker.scheduler.pacing
    monkeypatch.setattr(pacing, "observe", lambda plan, seconds: took_s.append(seconds - plan.restored_s))
    ask(worker, "b", list(range(1, 241)))
    plans = [step() for _ in range(12)]
    assert sum(not plan.chunks for plan in plans) > 3
    assert took_s == pytest.approx([0.01] * len(took_s))


def test_pages_that_are_restored_while_a_step_computes_count_for_no_price(tmp_path: Path) -> None:
    long = list(range(1, 241))
    stored(tmp_path, long)
    now = 0.0
    worker = TieredWorker(tmp_path, pages=128, clock=lambda: now)
    worker.scheduler.pacing.set_target(0.03)
    restore = worker.tiers.restore
    worker.tiers.batch_pages = 4

    def slow(keys: list[bytes], pages: list[int], wait_s: float) -> int | None:
        nonlocal now
        now += 0.0034
        return restore(keys, pages, wait_s)

    def step(running: BatchPlan) -> BatchPlan:
        nonlocal now
        ends_s = now + 0.01 + 0.0002 * sum(len(chunk.token_ids) for chunk in running.chunks)
        following = plan_next_step(running, worker.scheduler)
        now = max(now, ends_s)
        for chunk in running.chunks:
            chunk.token_ids[:] = [7 if token < 0 else token for token in chunk.token_ids]  # type: ignore[index]
        worker.pages.feed(running)
        worker.scheduler.commit(running, [[7]] * len(running.sampled_sequences))
        return following

    ask(worker, "other", [99] * 30)
    running = worker.scheduler.plan()
    for _ in range(40):
        running = step(running)
    worker.tiers.restore = slow  # type: ignore[method-assign]
    sequence = ask(worker, "b", long)
    while sequence.computed < 236:
        running = step(running)
    report = worker.scheduler.pacing.report()
    assert report is not None
    assert report.floor_s == pytest.approx(0.0102, rel=0.02)


def test_pages_are_restored_behind_a_step_that_is_not_read_yet(tmp_path: Path) -> None:
    stored(tmp_path, PROMPT)
    worker = TieredWorker(tmp_path, pages=14)
    scheduler = worker.scheduler
    ended, other = ask(worker, "ended", [90] * 9), ask(worker, "other", [91] * 5)
    worker.step()
    launched = scheduler.plan()
    written = scheduler.pin_written(launched)
    scheduler.remove(ended)
    remaining = BatchPlan([other], [launched.chunks[1]])
    sequence = ask(worker, "b")
    plan = plan_next_step(remaining, scheduler)
    assert fed(plan) == {"other": 1, "b": 4}
    worker.pages.feed(launched)  # the device is that late
    scheduler.unpin_written(written)
    scheduler.commit(remaining, [[7]])
    worker.pages.feed(BatchPlan([sequence], [plan.chunks[1]]))
    scheduler.commit(plan, [[7], [7]])
    scheduler.check()
    assert tokens_in(worker, sequence) == PROMPT


def test_a_short_prompt_is_restored_before_a_long_one(tmp_path: Path) -> None:
    long, short = list(range(1, 201)), list(range(50, 80))
    stored(tmp_path, long, short)
    ticks = itertools.count()
    worker = TieredWorker(tmp_path, clock=lambda: float(next(ticks)))
    ask(worker, "other", [99] * 5)
    worker.step()
    ask(worker, "long", long)
    worker.step()
    ask(worker, "short", short, client=1)
    assert any("short" in fed(worker.step()) for _ in range(3))
    assert worker.scheduler.running[1].stored_pages


def test_a_long_prompt_is_restored_though_short_ones_keep_coming(tmp_path: Path) -> None:
    long, shorts = list(range(1, 201)), [[index, *range(100, 130)] for index in range(30)]
    stored(tmp_path, long, *shorts)
    ticks = itertools.count()
    worker = TieredWorker(tmp_path, pages=200, clock=lambda: float(next(ticks)))
    ask(worker, "other", [99] * 5)
    worker.step()
    sequence = ask(worker, "long", long)
    for index, short in enumerate(shorts):
        ask(worker, f"short{index}", short, client=1)
        if "long" in fed(worker.step()):
            break
        for each in [each for each in worker.scheduler.running if each.id.startswith("short") and each.cached_tokens]:
            worker.scheduler.remove(each)
    assert sequence.cached_tokens == 196


def test_admission_looks_for_one_page_however_long_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = TieredWorker(tmp_path)
    looked: list[bytes] = []
    monkeypatch.setattr(PageFolder, "has", lambda folder, key: bool(looked.append(key)))
    ask(worker, "a", list(range(1, 201)))
    worker.scheduler.plan()
    assert len(looked) == 1


def test_a_request_whose_tokens_but_one_are_restored_has_ended_its_preemption(tmp_path: Path) -> None:
    now = 0.0
    worker = TieredWorker(tmp_path, clock=lambda: now)
    sequence = ask(worker, "a", list(range(1, 41)))
    worker.step()
    for _ in range(4):
        worker.step()
    assert sequence.num_tokens == 45
    worker.scheduler._preempt(sequence)
    worker.scheduler.pool = PagePool(64, PAGE_TOKENS, b"salt")  # whose pages were reused meanwhile
    worker.step()
    assert worker.scheduler.counters.restored_tokens == 44
    lost = worker.scheduler.times.lost("a").seconds.get("preempted", 0.0)
    now += 5.0
    worker.step()
    assert worker.scheduler.times.lost("a").seconds.get("preempted", 0.0) == lost


def test_a_preempted_sequence_gets_its_pages_back(tmp_path: Path) -> None:
    worker = TieredWorker(tmp_path, pages=14)
    ask(worker, "a", list(range(1, 25)))
    ask(worker, "b", list(range(101, 125)))
    while not worker.scheduler.counters.preemptions:
        worker.step()
    while worker.scheduler.waiting:
        worker.step()
    computed = worker.scheduler.counters.prompt_tokens_computed
    assert computed <= 48 + PAGE_TOKENS, "no more than the last page is computed twice"


def test_pages_of_another_model_are_not_found(tmp_path: Path) -> None:
    ask(first := TieredWorker(tmp_path), "a")
    first.step()
    ask(second := TieredWorker(tmp_path, digest="other"), "b")
    second.step()
    assert second.scheduler.counters.restored_tokens == 0


@pytest.mark.parametrize(("adapter", "restored"), [("tuned\0v1", 36), ("tuned", 0)])
def test_pages_of_an_adapter_outlive_it_where_its_key_names_its_content(
    tmp_path: Path, adapter: str, restored: int
) -> None:
    ask(first := TieredWorker(tmp_path), "a", adapter=adapter)
    first.step()
    ask(second := TieredWorker(tmp_path), "b", adapter=adapter)
    second.step()
    assert second.scheduler.counters.restored_tokens == restored


def test_a_deleted_folder_costs_its_pages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_folder, "_RETRY_S", math.inf)
    worker = TieredWorker(tmp_path)
    ask(worker, "a")
    worker.step()
    for file in (tmp_path / "host" / "model").iterdir():
        file.unlink()
    (tmp_path / "host" / "model").rmdir()
    for _ in range(10):
        worker.step()
    assert worker.tiers.stats()[0].problem
    sequence = ask(second := TieredWorker(tmp_path), "b")
    second.step()
    assert tokens_in(second, sequence) == PROMPT


def test_a_full_disk_is_one_sentence_and_writes_begin_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = PageFolder("disk", tmp_path, 1 << 20, "model").open()
    now = 100.0
    monkeypatch.setattr(page_folder.time, "monotonic", lambda: now)

    def full(descriptor: int, buffers: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(page_folder.os, "writev", full)
        for _ in range(3):
            folder.write(KEY, b"abcd")
    assert (
        folder.stats().problem == f"KV pages are not kept in the disk tier: No space left on device ({tmp_path}/model)"
    )
    assert len(caplog.records) == 1
    assert not list((tmp_path / "model").iterdir())
    now += 11
    folder.write(KEY, b"abcd")
    content = bytearray(4)
    assert folder.read(KEY, memoryview(content))
    assert content == b"abcd"
    assert folder.stats().problem == ""
    assert folder.stats().skipped_pages == 3


@pytest.mark.parametrize("in_host_memory", [True, False])
def test_both_tiers_get_every_page_and_the_faster_one_what_it_lacks(tmp_path: Path, in_host_memory: bool) -> None:
    first = TieredWorker(tmp_path, names=("host", "disk"), in_host_memory=in_host_memory)
    ask(first, "a")
    first.step()
    first.tiers.close()
    names = sorted(file.name for file in (tmp_path / "host" / "model").iterdir())
    assert len(names) == 10
    assert sorted(file.name for file in (tmp_path / "disk" / "model").iterdir()) == names
    for name in names:
        (tmp_path / "host" / "model" / name).unlink()
    second = TieredWorker(tmp_path, names=("host", "disk"), in_host_memory=in_host_memory)
    sequence = ask(second, "b")
    second.step()
    assert tokens_in(second, sequence) == PROMPT
    assert [each.restored_pages for each in second.tiers.stats()] == [0, 9]
    second.tiers.close()
    assert sorted(file.name for file in (tmp_path / "host" / "model").iterdir()) == names


def test_a_disk_that_stands_still_stops_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = TieredWorker(tmp_path, names=("disk",))
    stuck = threading.Event()
    monkeypatch.setattr(PageFolder, "write", lambda folder, key, content: stuck.wait())
    monkeypatch.setattr(kv_tiers, "_QUEUE_BYTES", 5 * PAGE_TOKENS)
    ask(worker, "a")
    worker.step()
    assert worker.tiers.stats()[0].skipped_pages == 5
    stuck.set()
    worker.tiers.close()


def test_the_memory_of_a_model_is_free_after_its_unload_though_a_disk_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()
    monkeypatch.setattr(PageFolder, "write", lambda folder, key, content: stuck.wait())
    monkeypatch.setattr(kv_tiers, "_CLOSE_S", 0.0)
    pages = FakePages()
    pages.write_pages([0], b"abcd")
    tiers = KvTiers([PageFolder("disk", tmp_path, 1 << 20, "model").open()], pages)
    tiers.store([KEY], [0])
    tiers.close()
    freed = weakref.ref(pages)
    del tiers, pages
    gc.collect()
    assert freed() is None
    stuck.set()


def test_pages_are_copied_in_batches_of_bounded_size(tmp_path: Path) -> None:
    class LargePages(FakePages):
        def read_pages(self, pages: Sequence[int]) -> list[bytes]:
            batches.append(len(pages))
            return [b""] * len(pages)

    batches: list[int] = []
    tiers = KvTiers([PageFolder("host", tmp_path, 1 << 20, "model").open()], LargePages(6 << 20))
    tiers.store([index.to_bytes(16) for index in range(5)], range(5))
    assert batches == [2, 2, 1]


def test_pages_are_written_after_one_whose_writing_raised_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, written = PageFolder.write, list[bytes]()

    def fail_first(folder: PageFolder, key: bytes, content: bytes) -> None:
        written.append(key)
        if len(written) == 1:
            raise RuntimeError("a surprise")
        write(folder, key, content)

    monkeypatch.setattr(PageFolder, "write", fail_first)
    worker = TieredWorker(tmp_path, names=("disk",))
    ask(worker, "a")
    worker.step()
    worker.tiers.close()
    assert "writing KV pages failed" in caplog.text
    folder = PageFolder("disk", tmp_path / "disk", 1 << 20, "model").open()
    assert len(written) == len(PROMPT) // PAGE_TOKENS
    assert [folder.has(key) for key in written] == [False] + [True] * (len(written) - 1)
