"""What the program keeps, nobody else on the machine may read, however loose the mask of modes is."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.api.http.key_file import KeyFile, KeyRecords
from console.bench.history import BenchHistory
from console.chats import ChatSettings, ChatStore
from console.cli.main import main
from console.link.recording.recorder import RecordingWriter
from console.runtime.line_writer import LineWriter
from console.runtime.logs import _file_handler, logging_to
from engine.system.files import replace_file
from engine.system.log import LogRing
from engine.worker_process.logs import NativeOutput
from tests.fakes.bench_scenes import users

GROUP_AND_OTHERS = 0o077


@pytest.fixture(autouse=True)
def a_mask_that_lets_everybody_read() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """What below `folder` anybody else could read or write."""
    below = [path for path in folder.rglob("*") if not path.is_symlink()]
    assert below, "nothing was written"
    return [str(path.relative_to(folder)) for path in below if path.stat().st_mode & GROUP_AND_OTHERS]


def test_conversations_with_all_that_sqlite_keeps_of_them(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "share" / "ericllm" / "chats.db")
    store.add(store.create(ChatSettings()), None, "user", "what nobody else may read")
    names = {path.name for path in (tmp_path / "share" / "ericllm").iterdir()}
    assert names == {"chats.db", "chats.db-wal", "chats.db-shm"}
    assert open_to_others(tmp_path) == []
    store.close()


def test_the_programs_log_and_those_put_aside(tmp_path: Path) -> None:
    (handler,) = _file_handler(tmp_path / "state" / "log")
    handler.doRollover()  # type: ignore[attr-defined]
    handler.close()
    assert len(list((tmp_path / "state" / "log").iterdir())) == 2
    assert open_to_others(tmp_path) == []


def test_a_log_on_a_full_disk_is_said_once_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ericllm.log").symlink_to("/dev/full")
    ring = LogRing()
    with logging_to(ring, tmp_path):
        for number in range(5):
            logging.getLogger("api").info("line %d", number)
        while not (said := [line.message for line in ring.after(0)[1] if "ericllm.log" in line.message]):
            os.sched_yield()
    assert said == [f"{tmp_path}/ericllm.log cannot be written: [Errno 28] No space left on device"]
    assert capfd.readouterr().err == ""


async def test_what_workers_write(tmp_path: Path) -> None:
    output = NativeOutput(lambda line: None, tmp_path / "log" / "worker-w1.log")
    output.started()
    await asyncio.sleep(0)
    output.finish()
    assert open_to_others(tmp_path) == []


def access_log(path: Path, lines: int) -> None:
    writer = LineWriter(path, lambda line: str(line).encode(), max_bytes=10)
    writer.open()
    for number in range(lines):
        writer.put(f"line {number:04}")
    writer.close()


def test_the_access_log_and_those_put_aside(tmp_path: Path) -> None:
    for _ in range(3):
        access_log(tmp_path / "logs" / "access.jsonl", 1)
    assert len(list((tmp_path / "logs").iterdir())) == 3
    assert open_to_others(tmp_path) == []


def test_an_access_log_that_its_operator_opened_to_a_group_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    access_log(path, 1)
    path.chmod(0o640)
    access_log(path, 1)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (path, tmp_path / "access.jsonl.1")]
    assert modes == [0o640, 0o640]


def test_a_recording_while_it_is_made_and_afterwards(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "night.rec"):
        assert (tmp_path / "night.rec-wal").exists()
        assert open_to_others(tmp_path) == []
    assert open_to_others(tmp_path) == []


def test_results_of_benches(tmp_path: Path) -> None:
    BenchHistory(tmp_path / "state" / "ericllm").add(users())
    assert open_to_others(tmp_path) == []


def test_settings_keys_and_what_was_learned(tmp_path: Path) -> None:
    replace_file(tmp_path / "config" / "ericllm" / "config.toml", b'api_key = "sesame"\n')
    replace_file(tmp_path / "state" / "ericllm" / "loads.json", b"{}")
    keys = KeyFile(tmp_path / "keys" / "ericllm")
    with keys.lock():
        keys.write(KeyRecords(secret="00"))
    assert open_to_others(tmp_path) == []


def test_files_of_an_earlier_version_are_taken_from_others_when_the_program_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("DATA", "STATE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))
    data, log = tmp_path / "data" / "ericllm", tmp_path / "state" / "ericllm" / "log"
    for folder in (data, log):
        folder.mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.touch()
    kept = [data / "chats.db", data / "chats.db-wal", log / "ericllm.log.1", log.parent / "benches.sqlite"]
    for path in kept:
        path.touch()
    (data / "link").symlink_to(outside)
    assert main(["--headless", "--model", "./no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err
    assert not [path for path in (*kept, data, log, log.parent) if path.stat().st_mode & GROUP_AND_OTHERS]
    assert stat.S_IMODE(outside.stat().st_mode) == 0o666
