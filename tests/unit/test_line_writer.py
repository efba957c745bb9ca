"""Lines into a file by a thread: order, rotation, files that others move, and what cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from console.runtime import line_writer
from console.runtime.line_writer import KEPT_FILES, LineWriter
from engine.system.slow_disk import SlowWrite, WriteWatch


def encode(line: object) -> bytes:
    return str(line).encode()


def test_lines_come_in_order_and_all_of_them(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "lines", encode, max_bytes=10**6)
    writer.open()
    for number in range(5000):
        writer.put(number)
    writer.close()
    assert (tmp_path / "lines").read_text().split() == [str(number) for number in range(5000)]
    assert writer.lost == 0


def test_a_file_that_grows_too_long_is_put_aside(tmp_path: Path) -> None:
    for number in range(KEPT_FILES + 3):
        writer = LineWriter(tmp_path / "lines", encode, max_bytes=10)
        writer.open()
        writer.put(f"number {number}")
        writer.close()
    assert (tmp_path / "lines").read_text() == "number 6\n"
    assert (tmp_path / "lines.1").read_text() == "number 5\n"
    assert len(list(tmp_path.iterdir())) == KEPT_FILES + 1


def test_a_file_that_somebody_else_put_aside_is_begun_anew(tmp_path: Path) -> None:
    written = threading.Event()

    def telling(line: object) -> bytes:
        written.set()
        return encode(line)

    writer = LineWriter(tmp_path / "lines", telling, max_bytes=10**6)
    writer.open()
    (tmp_path / "lines").rename(tmp_path / "moved")
    writer.put("after")
    assert written.wait(60)
    writer.close()
    assert (tmp_path / "lines").read_text() == "after\n"
    assert (tmp_path / "moved").read_text() == ""


def test_a_pipe_is_written_to_and_never_put_aside(tmp_path: Path) -> None:
    pipe = tmp_path / "lines"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = LineWriter(pipe, encode, max_bytes=3)
    writer.open()
    for line in ("one", "two"):
        writer.put(line)
    writer.close()
    assert os.read(reading, 100) == b"one\ntwo\n"
    os.close(reading)
    assert (writer.lost, list(tmp_path.iterdir())) == (0, [pipe])


def test_what_cannot_be_written_is_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "folder"
    writer = LineWriter(folder / "lines", encode, max_bytes=10**6)
    writer.open()
    (folder / "lines").unlink()
    folder.rmdir()
    folder.write_text("in the way")
    writer.put("one")
    writer.put("two")
    writer.close()
    assert writer.lost == 2
    assert len(caplog.messages) == 1
    assert "cannot be written" in caplog.text


def test_a_queue_that_is_full_and_a_slow_disk_are_noted_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = WriteWatch(iter([0.0, 3.0, 3.0]).__next__)
    monkeypatch.setattr(line_writer, "writes", noted)
    monkeypatch.setattr(line_writer, "_WAITING_LINES", 1)
    path = tmp_path / "lines"
    writer = LineWriter(path, encode, max_bytes=10**6)
    writer.put("one")
    writer.put("two")
    writer.open()
    writer.close()
    assert noted.take() == {path: SlowWrite(3.0, 1)}


def test_a_line_that_cannot_be_made_is_left_out_alone(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "lines", lambda line: bytes(str(line), "ascii"), max_bytes=10**6)
    writer.open()
    for line in ("one", "\udcff", "two"):
        writer.put(line)
    writer.close()
    assert (tmp_path / "lines").read_text() == "one\ntwo\n"
    assert writer.lost == 1


def test_stdout_that_nobody_reads_any_more_costs_its_lines_alone() -> None:
    program = """if True:
        import sys, threading
        from console.runtime.line_writer import LineWriter
        writer = LineWriter(None, lambda line: str(line).encode(), max_bytes=1)
        writer.open()
        sys.stdin.read()
        writer.put("nobody reads this")
        writer.close()
        print(writer.lost, file=sys.stderr)
    """
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as ran:
        assert ran.stdout is not None
        ran.stdout.close()
        ran.stdout = None
        _, said = ran.communicate(b"go", timeout=60)
    assert (ran.returncode, said.split()[-1:]) == (0, [b"1"])
