"""What KV tiers promise: pages outlive their worker, and no token ever comes from a wrong or damaged one."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from pathlib import Path

import msgspec
import pytest

from engine.backends.common import kv_tiers
from engine.backends.common.kv_tiers import PageFolder, open_tiers, tier_salt
from engine.backends.scheduler.sequences import Sequence
from engine.config import ModelSpec
from engine.errors import InvalidRequest
from tests.fakes.scheduling import fed
from tests.fakes.tiered import PAGE_TOKENS, FakePages, TieredWorker

PROMPT = list(range(1, 41))
KEY = bytes(range(16))


def ask(worker: TieredWorker, name: str, prompt: list[int] = PROMPT, *, adapter: str = "") -> Sequence:
    new = Sequence(name, list(prompt), len(prompt), adapter=adapter)
    worker.scheduler.submit(new)
    return new


def tokens_in(worker: TieredWorker, sequence: Sequence) -> list[int]:
    positions = range(sequence.computed)
    size = PAGE_TOKENS
    return [worker.pages.tokens[sequence.pages[each // size], each % size] for each in positions]


def test_a_worker_that_is_started_again_computes_no_full_page_again(tmp_path: Path) -> None:
    first = TieredWorker(tmp_path)
    before = ask(first, "a")
    for _ in range(6):
        first.step()
    second = TieredWorker(tmp_path)  # the first was killed: nothing of it was closed
    after = Sequence("a", list(before.token_ids), before.prompt_tokens, resumed=True)
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


def test_a_deleted_folder_costs_its_pages_alone(tmp_path: Path) -> None:
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
    folder = PageFolder("disk", tmp_path, 1 << 20, "model")
    now = 100.0
    monkeypatch.setattr(kv_tiers.time, "monotonic", lambda: now)

    def full(descriptor: int, buffers: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(kv_tiers.os, "writev", full)
        for _ in range(3):
            folder.write(KEY, b"abcd")
    assert (
        folder.stats().problem == f"KV pages are not kept in the disk tier: No space left on device ({tmp_path}/model)"
    )
    assert len(caplog.records) == 1
    assert not list((tmp_path / "model").iterdir())
    now += 11
    folder.write(KEY, b"abcd")
    assert folder.read(KEY, 4) == b"abcd"
    assert folder.stats().problem == ""
    assert folder.stats().skipped_pages == 3


def test_a_write_that_is_cut_short_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PageFolder("disk", tmp_path, 1 << 20, "model")
    monkeypatch.setattr(kv_tiers.os, "writev", lambda descriptor, buffers: 3)
    folder.write(KEY, b"abcd")
    assert not list((tmp_path / "model").iterdir())


def test_the_least_recently_used_pages_are_removed_beyond_the_limit(tmp_path: Path) -> None:
    folder = PageFolder("host", tmp_path, 10_000, "model")
    keys = [index.to_bytes(16) for index in range(10)]
    for index, key in enumerate(keys):
        folder.write(key, bytes(976))
        os.utime(tmp_path / "model" / key.hex(), (index, index))
    assert folder.read(keys[0], 976) is not None, "it is the most recently used now"
    folder.write((10).to_bytes(16), bytes(976))
    folder.measure()
    assert [folder.has(key) for key in keys] == [True, False, False, *[True] * 7]
    assert folder.stats().used_bytes <= 10_000


def test_processes_that_share_a_folder_keep_its_limit_together(tmp_path: Path) -> None:
    folders = [PageFolder("host", tmp_path, 20_000, digest) for digest in ("one", "two", "one")]
    for index in range(60):
        folder = folders[index % 3]
        folder.write(index.to_bytes(16), bytes(1000))
        if folder.is_due:
            folder.measure()
    total = sum(file.stat().st_size for file in tmp_path.glob("*/*"))
    assert 15_000 < total < 24_000


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    folder = PageFolder("host", tmp_path, 1 << 20, "model")
    for name, age_s in (("old", 120), ("new", 0)):
        file = tmp_path / "model" / f".{name}"
        file.write_bytes(b"half")
        os.utime(file, (time.time() - age_s,) * 2)
    folder.measure()
    assert [file.name for file in (tmp_path / "model").iterdir()] == [".new"]


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


def spec(tmp_path: Path, **wanted: object) -> ModelSpec:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "model.safetensors").write_bytes(b"weights")
    return msgspec.convert({"path": model, "name": "m", "kv_dir": tmp_path / "kv", **wanted}, ModelSpec)


def folder_of(wanted: ModelSpec, *facts: str) -> Path:
    before = set((wanted.kv_dir or Path()).glob("*"))
    tiers = open_tiers(wanted, FakePages(), facts)
    assert tiers is not None
    tiers.close()
    new = set((wanted.kv_dir or Path()).glob("*")) - before
    return next(iter(new), Path())


def test_a_folder_is_for_one_model_its_settings_and_its_kernels(tmp_path: Path) -> None:
    base = spec(tmp_path, kv_disk_gib=0.01)
    tier_salt(base)
    assert folder_of(base, "kernels") != Path()
    assert folder_of(base, "kernels") == Path(), "the same again"
    assert folder_of(base, "others") != Path()
    for change in ({"cache_bits": 8}, {"alpha_value": 2.0}, {"num_experts": 1}, {"weights": "int8"}):
        assert folder_of(spec(tmp_path, kv_disk_gib=0.01, **change), "kernels") != Path(), change
    (base.path / "model.safetensors").write_bytes(b"other weights")
    assert folder_of(base, "kernels") != Path()


def test_the_salt_is_the_same_in_every_run_and_its_owners_alone(tmp_path: Path) -> None:
    wanted = spec(tmp_path, kv_disk_gib=0.01)
    salt = tier_salt(wanted)
    assert salt is not None
    assert len(salt) == 32
    assert tier_salt(wanted) == salt
    assert (tmp_path / "kv" / "salt").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert tier_salt(spec(tmp_path)) is None


def test_a_folder_that_others_can_write_to_is_emptied_before_it_is_used(tmp_path: Path) -> None:
    wanted = spec(tmp_path, kv_disk_gib=0.01)
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    (tmp_path / "kv" / "salt").write_bytes(b"theirs")
    assert tier_salt(wanted) != b"theirs"
    assert (tmp_path / "kv").stat().st_mode & 0o022 == 0


def test_a_tier_that_cannot_be_had_is_refused_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"^the folder of the disk tier of the KV cache cannot be used: .*file"):
        tier_salt(spec(tmp_path, kv_disk_gib=1, kv_dir=tmp_path / "file"))
    with pytest.raises(InvalidRequest, match=r"^kv_disk_gib is 65536, but .*kv holds \d+\.\d GiB$"):
        open_tiers(spec(tmp_path, kv_disk_gib=65536), FakePages(), ())
    monkeypatch.setattr(kv_tiers, "_SHARED_MEMORY", tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match=r"^kv_host_gib needs .*nowhere, which is not here$"):
        tier_salt(spec(tmp_path, kv_host_gib=1))
