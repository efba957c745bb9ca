"""The folder of a KV tier: its page files, which processes share, and whose it is."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from random import Random

import msgspec
import pytest

from engine.backends.common import kv_tiers, page_folder
from engine.backends.common.kv_tiers import (
    files_stamp,
    loaded_stamp,
    open_tiers,
    pages_digest,
    tier_roots,
    tier_salt,
)
from engine.backends.common.page_folder import PageFolder
from engine.backends.common.torch_load_settings import refuse_settings
from engine.config import ModelSpec
from engine.errors import InvalidRequest
from tests.fakes.tiered import PAGE_TOKENS, FakePages

KEY = bytes(range(16))


def content_of(folder: PageFolder, key: bytes, size: int = 976) -> bytes | None:
    """Return a page of the folder; None where it has none that is whole."""
    content = bytearray(size)
    return bytes(content) if folder.read(key, memoryview(content)) else None


def test_writers_of_one_folder_never_meet_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of a process, or two containers whose processes have the same id."""
    folders = [PageFolder("host", tmp_path, 1 << 20, "model").open() for _ in range(2)]
    monkeypatch.setattr(page_folder.os, "getpid", lambda: 7)
    rename = Path.rename

    def overtaken(file: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        folders[1].write(bytes(16), b"efgh")
        return rename(file, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    folders[0].write(KEY, b"abcd")
    assert [folder.stats().problem for folder in folders] == ["", ""]
    assert (content_of(folders[0], KEY, 4), content_of(folders[0], bytes(16), 4)) == (b"abcd", b"efgh")


def test_a_write_that_is_cut_short_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PageFolder("disk", tmp_path, 1 << 20, "model").open()
    monkeypatch.setattr(page_folder.os, "writev", lambda descriptor, buffers: 3)
    folder.write(KEY, b"abcd")
    assert not list((tmp_path / "model").iterdir())


def filled(root: Path, *, pages: int = 20, size: int = 976) -> tuple[PageFolder, list[bytes]]:
    """A folder that holds ten pages and was given more, and their keys, the oldest first."""
    folder = PageFolder("host", root, 10_000, "model").open()
    keys = [index.to_bytes(16) for index in range(pages)]
    for index, key in enumerate(keys):
        folder.write(key, bytes([index]) * size)
        os.utime(root / "model" / key.hex(), (1000 + index, 1000 + index))
        if folder.is_due:
            folder.measure()
    return folder, keys


def test_a_removed_page_file_is_written_again_and_holds_the_new_page_alone(tmp_path: Path) -> None:
    folder, keys = filled(tmp_path)
    files = list((tmp_path / "model").iterdir())
    inodes = {file.stat().st_ino for file in files}
    new = [index.to_bytes(16) for index in range(100, 102)]
    for key in new:
        folder.write(key, key * 61)
    assert {file.stat().st_ino for file in (tmp_path / "model").iterdir()} == inodes, "no memory was new"
    assert [content_of(folder, key) for key in new] == [key * 61 for key in new]
    assert content_of(folder, keys[0]) is None
    assert sum(file.stat().st_size for file in (tmp_path / "model").iterdir()) <= 11_250


def test_who_reads_a_page_file_while_it_is_written_again_finds_no_page_and_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = filled(tmp_path, pages=10)
    key = (0).to_bytes(16)
    reader = PageFolder("host", tmp_path, 10_000, "model").open()
    opened = Path.open

    def overtaken(file: Path, *given: object, **named: object) -> object:
        stream = opened(file, *given, **named)  # type: ignore[arg-type, call-overload]
        monkeypatch.setattr(Path, "open", opened)
        folder.write((50).to_bytes(16), bytes(976))
        folder.measure()
        while folder._spares:
            folder.write((60 + len(folder._spares)).to_bytes(16), bytes([9]) * 976)
        return stream

    monkeypatch.setattr(Path, "open", overtaken)
    assert content_of(reader, key) is None
    assert (reader.stats().damaged_pages, reader.stats().problem) == (0, "")


def test_a_spare_file_that_another_process_removed_is_no_loss(tmp_path: Path) -> None:
    folder, _ = filled(tmp_path)
    assert folder._spares
    for spare in folder._spares:
        spare.unlink()
    folder.write(KEY, b"abcd" * 244)
    assert content_of(folder, KEY) == b"abcd" * 244
    assert folder.stats().problem == ""


def test_a_page_of_another_size_is_whole_in_a_file_that_was_longer(tmp_path: Path) -> None:
    folder, _ = filled(tmp_path)
    assert folder._spares
    folder.write(KEY, b"abcd")
    assert content_of(folder, KEY, 4) == b"abcd"


def test_the_least_recently_used_pages_are_removed_beyond_the_limit(tmp_path: Path) -> None:
    folder = PageFolder("host", tmp_path, 10_000, "model").open()
    keys = [index.to_bytes(16) for index in range(10)]
    for index, key in enumerate(keys):
        folder.write(key, bytes(976))
        os.utime(tmp_path / "model" / key.hex(), (index, index))
    assert content_of(folder, keys[0]) is not None, "it is the most recently used now"
    folder.write((10).to_bytes(16), bytes(976))
    folder.measure()
    assert [folder.has(key) for key in keys] == [True, False, False, False, *[True] * 6]
    assert folder.stats().used_bytes <= 10_000


def test_processes_that_share_a_folder_keep_its_limit_together(tmp_path: Path) -> None:
    folders = [PageFolder("host", tmp_path, 20_000, digest).open() for digest in ("one", "two", "one")]
    for index in range(60):
        folder = folders[index % 3]
        folder.write(index.to_bytes(16), bytes(1000))
        if folder.is_due:
            folder.measure()
    total = sum(file.stat().st_size for file in tmp_path.glob("*/*"))
    assert 15_000 < total < 24_000


def test_files_that_processes_are_to_write_again_take_an_eighth_of_the_limit_however_many_share_it(
    tmp_path: Path,
) -> None:
    folders = [PageFolder("host", tmp_path, 50_000, "model").open() for _ in range(3)]
    random, totals, pages = Random(1), set[int](), set[int]()
    for turn in range(3000):
        folder, key = random.choices(folders, (90, 9, 1))[0], random.randrange(120).to_bytes(16)
        if not folder.has(key):
            folder.write(key, bytes(984))
            if folder.is_due:
                folder.measure()
        if turn > 500 and not turn % 20:
            files = [file.name for file in (tmp_path / "model").iterdir()]
            totals.add(len(files))
            pages.add(len([name for name in files if not name.startswith(".")]))
    assert min(pages) > 50 * 0.65
    assert max(totals) < 50 * 1.25


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    folder = PageFolder("host", tmp_path, 1 << 20, "model").open()
    for name, age_s in (("old", 120), ("new", 0)):
        file = tmp_path / "model" / f".{name}"
        file.write_bytes(b"half")
        os.utime(file, (time.time() - age_s,) * 2)
    folder.measure()
    assert [file.name for file in (tmp_path / "model").iterdir()] == [".new"]


def spec(tmp_path: Path, **wanted: object) -> ModelSpec:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "model.safetensors").write_bytes(b"weights")
    return msgspec.convert({"path": model, "name": "m", "kv_dir": tmp_path / "kv", **wanted}, ModelSpec)


def folder_of(wanted: ModelSpec, *facts: str) -> Path:
    root = tier_roots(wanted)["disk"]
    before = set(root.glob("*"))
    tiers = open_tiers(wanted, FakePages(), pages_digest(wanted, files_stamp(wanted), facts))
    assert tiers is not None
    tiers.close()
    new = set(root.glob("*")) - before
    return next(iter(new), Path())


def test_a_folder_is_for_one_model_its_settings_and_its_kernels(tmp_path: Path) -> None:
    base = spec(tmp_path, kv_disk_gib=0.01)
    tier_salt(base)
    assert folder_of(base, "kernels") != Path()
    assert folder_of(base, "kernels") == Path(), "the same again"
    assert folder_of(base, "others") != Path()
    for change in ({"cache_bits": 8}, {"alpha_value": 2.0}, {"num_experts": 1}, {"weights": "int8"}):
        assert folder_of(spec(tmp_path, kv_disk_gib=0.01, **change), "kernels") != Path(), change
    weights = base.path / "model.safetensors"
    before = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert folder_of(base, "kernels") != Path(), "other weights of equal size, with the time of the first"


def test_a_link_in_the_models_folder_that_leads_nowhere_is_no_obstacle(tmp_path: Path) -> None:
    wanted = spec(tmp_path, kv_disk_gib=0.01)
    (wanted.path / "extra.json").symlink_to(tmp_path / "nowhere")
    assert folder_of(wanted) != Path()


def test_the_salt_is_the_same_in_every_run_and_its_owners_alone(tmp_path: Path) -> None:
    wanted = spec(tmp_path, kv_disk_gib=0.01)
    salt = tier_salt(wanted)
    assert salt is not None
    assert len(salt) == 32
    assert tier_salt(wanted) == salt
    root = tmp_path / "kv" / "ericllm-kv"
    assert (root / "salt").stat().st_mode & 0o777 == 0o600
    assert root.stat().st_mode & 0o777 == 0o700
    assert tier_salt(spec(tmp_path)) is None


def test_a_folder_that_others_can_write_to_is_emptied_before_it_is_used(tmp_path: Path) -> None:
    wanted = spec(tmp_path, kv_disk_gib=0.01)
    root = tmp_path / "kv" / "ericllm-kv"
    root.mkdir(parents=True)
    root.chmod(0o777)
    (root / "salt").write_bytes(b"theirs")
    assert tier_salt(wanted) != b"theirs"
    assert root.stat().st_mode & 0o022 == 0


def test_nothing_else_in_the_folder_that_a_user_names_is_removed(tmp_path: Path) -> None:
    theirs = tmp_path / "kv" / "thesis" / "chapter"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(bytes(50_000))
    os.utime(theirs, (1, 1))
    (tmp_path / "kv").chmod(0o777)
    wanted = spec(tmp_path, kv_disk_gib=20_000 / (1 << 30))
    worker_pages = FakePages()
    tiers = open_tiers(wanted, worker_pages, "model")
    assert tiers is not None
    for index in range(100):
        worker_pages.tokens.update({(index, offset): index for offset in range(PAGE_TOKENS)})
        tiers.store([index.to_bytes(16)], [index])
    tiers.close()
    assert theirs.stat().st_size == 50_000
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o777
    assert tiers.stats()[0].used_bytes <= 20_000


def test_a_folder_without_a_size_is_refused(tmp_path: Path) -> None:
    refuse_settings(spec(tmp_path, kv_disk_gib=1), on_cpu=True)
    with pytest.raises(InvalidRequest, match=r"^kv_dir is not supported: .* keeps nothing there without kv_disk_gib$"):
        refuse_settings(spec(tmp_path, kv_host_gib=1), on_cpu=True)


def read_only(*given: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_tier_that_cannot_be_had_is_refused_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"^the folder of the disk tier of the KV cache cannot be used: .*file"):
        tier_salt(spec(tmp_path, kv_disk_gib=1, kv_dir=tmp_path / "file"))
    with (
        monkeypatch.context() as broken,
        pytest.raises(InvalidRequest, match=r"^the folder of the disk tier .*: Read-"),
    ):
        broken.setattr(kv_tiers, "claim_folder", read_only)
        tier_salt(spec(tmp_path, kv_disk_gib=1))
    with pytest.raises(InvalidRequest, match=r"^kv_disk_gib is 65536, but .*kv holds \d+\.\d GiB$"):
        tier_salt(spec(tmp_path, kv_disk_gib=65536))
    monkeypatch.setattr(kv_tiers, "_SHARED_MEMORY", tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match=r"^kv_host_gib needs .*nowhere, which is not here$"):
        tier_salt(spec(tmp_path, kv_host_gib=1))


def test_a_folder_that_cannot_be_used_is_reported_by_a_worker_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is started again, say: it needs no pages."""
    root = tmp_path / "kv" / "ericllm-kv"
    root.parent.mkdir()
    root.write_text("no folder")
    tiers = open_tiers(spec(tmp_path, kv_disk_gib=0.01), FakePages(), "model")
    assert tiers is not None
    assert (
        tiers.stats()[0].problem == f"the folder of the disk tier of the KV cache cannot be used: File exists ({root})"
    )
    assert tiers.restore([KEY], [0]) == 0
    (folder,) = tiers._folders
    monkeypatch.setattr(page_folder, "_RETRY_S", 0.0)
    folder.write(KEY, b"abcd")
    assert folder.skipped_pages == 1
    root.unlink()
    folder.write(KEY, b"abcd")
    assert content_of(folder, KEY, 4) == b"abcd"
    assert folder.stats().problem == ""
    tiers.close()


def test_a_folder_that_became_another_users_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = PageFolder("host", tmp_path / "kv", 1 << 20, "model").open()
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv" / "model").mkdir(parents=True)
    monkeypatch.setattr("engine.system.files._is_ours", lambda found: False)
    monkeypatch.setattr(page_folder, "_RETRY_S", 0.0)
    monkeypatch.setattr(page_folder.os, "writev", read_only)  # whatever ends the first attempt
    folder.write(KEY, b"abcd")
    monkeypatch.undo()
    monkeypatch.setattr("engine.system.files._is_ours", lambda found: False)
    folder._paused_until_s = 0.0
    folder.write(KEY, b"abcd")
    assert not list((tmp_path / "kv" / "model").iterdir())
    (tmp_path / "kv" / "model" / KEY.hex()).write_bytes(b"theirs")
    assert (folder.has(KEY), content_of(folder, KEY, 4)) == (False, None)
    folder.measure()
    assert (tmp_path / "kv" / "model" / KEY.hex()).exists()


def test_files_that_changed_while_they_were_loaded_name_no_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = spec(tmp_path)
    before = files_stamp(wanted)
    assert loaded_stamp(wanted, before) == before
    (wanted.path / "model.safetensors").write_bytes(b"WEIGHTS")
    found = [loaded_stamp(wanted, before) for _ in range(2)]
    assert before not in found
    assert files_stamp(wanted) not in found
    assert found[0] != found[1]
    assert "changed while it was loaded" in caplog.text


def test_processes_that_make_a_folder_at_once_have_one_salt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, salts, meets = spec(tmp_path, kv_disk_gib=0.01), list[bytes | None](), threading.Event()
    other = threading.Thread(target=lambda: salts.append(tier_salt(wanted)))
    replace = kv_tiers.replace_file

    def overtaken(file: Path, content: bytes) -> None:
        if other.ident is None:
            other.start()
            meets.wait(0.2)  # the other one is here too, or waits
        meets.set()
        replace(file, content)

    monkeypatch.setattr(kv_tiers, "replace_file", overtaken)
    salts.append(tier_salt(wanted))
    other.join()
    assert salts[0] == salts[1] == tier_salt(wanted)


@pytest.mark.parametrize("damaged", [b"", b"short", bytes(100)])
def test_a_damaged_salt_is_made_again(tmp_path: Path, damaged: bytes) -> None:
    wanted = spec(tmp_path, kv_disk_gib=0.01)
    tier_salt(wanted)
    (tmp_path / "kv" / "ericllm-kv" / "salt").write_bytes(damaged)
    salt = tier_salt(wanted)
    assert salt is not None
    assert len(salt) == 32
    assert tier_salt(wanted) == salt


def test_folders_that_links_lead_to_lose_nothing(tmp_path: Path) -> None:
    theirs = tmp_path / "thesis" / "chapter"
    theirs.parent.mkdir()
    theirs.write_bytes(bytes(50_000))
    (theirs.parent / ".draft").write_bytes(b"")
    for file in theirs.parent.iterdir():
        os.utime(file, (1, 1))
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "link").symlink_to(theirs.parent)
    PageFolder("disk", tmp_path / "kv", 10_000, "model").open()
    assert sorted(file.name for file in theirs.parent.iterdir()) == [".draft", "chapter"]
    with pytest.raises(NotADirectoryError, match="link is a link"):
        PageFolder("disk", tmp_path / "kv", 10_000, "link").open()


def test_what_was_left_unfinished_is_removed_after_the_clock_went_back_too(tmp_path: Path) -> None:
    folder = PageFolder("host", tmp_path, 1 << 20, "model").open()
    file = tmp_path / "model" / ".left"
    file.write_bytes(b"half")
    os.utime(file, (time.time() + 86_400,) * 2)
    folder.measure()
    assert not file.exists()


def test_many_damaged_pages_are_one_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, keys = filled(tmp_path, pages=5)
    for key in keys:
        (tmp_path / "model" / key.hex()).write_bytes(b"torn")
    assert [content_of(folder, key) for key in keys] == [None] * 5
    assert folder.stats().damaged_pages == 5
    assert [record.getMessage() for record in caplog.records] == [
        f"a damaged KV page of the host tier is removed and computed again ({tmp_path}/model)"
    ]


def test_a_disk_that_cannot_be_written_can_still_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PageFolder("disk", tmp_path, 1 << 20, "model").open()
    folder.write(KEY, b"abcd")
    monkeypatch.setattr(page_folder.os, "utime", read_only)
    assert content_of(folder, KEY, 4) == b"abcd"


def test_a_folder_that_does_not_answer_is_refused_while_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiers, "_OPEN_S", 0.01)
    answers = threading.Event()
    monkeypatch.setattr(kv_tiers, "claim_folder", lambda *given: answers.wait(60))
    with pytest.raises(InvalidRequest, match=r"^the folder of the disk tier .*: it has not answered for 0.01 s \("):
        tier_salt(spec(tmp_path, kv_disk_gib=1))
    answers.set()


def test_a_folder_that_answers_too_late_is_no_problem_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_tiers, "_OPEN_S", 0.01)
    answers, claim = threading.Event(), page_folder.claim_folder
    monkeypatch.setattr(page_folder, "claim_folder", lambda *given: (answers.wait(60), claim(*given)))
    tiers = open_tiers(spec(tmp_path, kv_disk_gib=1), FakePages(), "model")
    assert tiers is not None
    assert "it has not answered for 0.01 s" in tiers.stats()[0].problem
    opening = [each for each in threading.enumerate() if each.name == "kv-tiers-open"]
    answers.set()
    for each in opening:
        each.join(60)
    assert tiers.stats()[0].problem == ""
    tiers.close()
