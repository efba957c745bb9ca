"""Recordings of somebody who means harm: each is one sentence, or plays as far as it makes sense."""

from __future__ import annotations

import itertools
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from console.link.frames import Frame, to_plain
from console.link.recording import reader
from console.link.recording.link import Playhead, ReplayLink
from console.link.recording.reader import Recording
from console.link.recording.recorder import RecordingWriter
from console.link.recording.store import SEGMENT_BYTES, Packer, RecordingUnusable
from console.text import MAX_TIME
from engine.snapshot import LogEntry, RequestRow, Snapshot
from tests.fakes.bounds import outcome, within_bounds

pytestmark = pytest.mark.long

BEGAN = 1_780_000_000.0
MIB = 2**20


def frame(at: float) -> Frame:
    rows = (RequestRow(id=f"r{int(at) // 7}", source="api", state="decode", output_tokens=int(at)),)
    return Frame(snapshot=Snapshot(at=BEGAN + at, requests=rows))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A recording of 200 seconds, in four segments."""
    path = tmp_path / "night.rec"
    with RecordingWriter(path) as writer:
        for at in range(200):
            writer.add(frame(at), (LogEntry(at=BEGAN + at, level=20, source="engine", message=f"line {at}"),))
    return path


def change(path: Path, *statements: str, values: tuple[object, ...] = ()) -> None:
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement, values)
    database.close()


def size_of(path: Path) -> int:
    return path.stat().st_size


def played(path: Path) -> Recording | str:
    """The recording with all of its segments looked at, or why that cannot be, within bounds."""

    def play() -> Recording:
        recording = Recording(path)
        ends = [*range(0, len(recording.times), 59), len(recording.times) - 1]
        for index in ends:
            recording.frame(index)
        recording.lines(recording.ends, 0)
        return recording

    return outcome(play, size_of(path), RecordingUnusable)


def bomb(raw: bytes) -> bytes:
    return zlib.compress(raw, 9)


def zeros() -> bytes:
    """400 MiB of zero bytes, deflated."""
    packer = zlib.compressobj(9)
    return b"".join([*(packer.compress(bytes(MIB)) for _ in range(400)), packer.flush()])


# -- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        zeros,
        lambda: bomb(b"\xdb\x00\x80\x00\x00" + b"x" * (8 * MIB)),
        lambda: bomb(b"\xdd\x00\x3f\xff\x00" + b"\x90" * 0x3FFF00),
        bomb(b"\xdd\xff\xff\xff\xff"),
        lambda: bomb(b"\x91" * MIB),
        bomb(msgspec.msgpack.encode({"snapshot": float("nan")})),
        bomb(msgspec.msgpack.encode(to_plain(frame(0)) | {"answers": {"a": ["x" * 70_000]}})),
        zlib.compress(b"\xc0")[:-1],
        b"",
        b"\x00",
        5,
        10**9,
        "text",
    ],
)
def test_a_frame_that_is_a_bomb_or_none_is_one_sentence(path: Path, data: Any) -> None:
    value = data() if callable(data) else data  # what is large is made when it is used
    change(path, "UPDATE frames SET data = ? WHERE id = 1", values=(value,))
    said = played(path)
    assert said == f"{path} is damaged or truncated"


def test_a_segment_of_bombs_ends_before_the_memory_does(path: Path) -> None:
    raw = msgspec.msgpack.encode({"answers": {"x": [[0] * 19_000]}})
    packer = Packer()
    first = packer.pack(to_plain(frame(0)))
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM frames")
        insert = "INSERT INTO frames (at, segment, data) VALUES (?, 1, ?)"
        database.execute(insert, (BEGAN, first))
        for at in range(1, 900):
            compressor = zlib.compressobj(9, zdict=packer._seen)
            database.execute(insert, (BEGAN + at, compressor.compress(raw) + compressor.flush()))
            packer._look_back(raw)
            packer.num_bytes = 0
    database.close()
    recording = Recording(path)
    assert recording.frame(0).snapshot.requests == frame(0).snapshot.requests
    said = outcome(lambda: recording.frame(899), size_of(path), RecordingUnusable)
    assert said == f"{path} is damaged or truncated"


def test_changes_that_multiply_a_list_are_one_sentence(path: Path) -> None:
    packer = Packer()
    first = packer.pack(to_plain(frame(0)))
    rows = [packer.pack({"snapshot": {"requests": [0, [[0, 2**n], [0, 2**n]]]}}) for n in range(24)]
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM frames")
        insert = "INSERT INTO frames (at, segment, data) VALUES (?, 1, ?)"
        for at, data in enumerate((first, *rows)):
            database.execute(insert, (BEGAN + at, data))
    database.close()
    assert played(path) == f"{path} is damaged or truncated"


def test_a_segment_that_costs_too_much_is_one_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_SEGMENT_COPIED", 1000)
    recording = Recording(path)
    recording.frame(0)
    with pytest.raises(RecordingUnusable, match="damaged"):
        recording.frame(59)


def test_after_a_damaged_segment_the_next_ones_play_forwards_and_backwards(path: Path) -> None:
    change(path, "UPDATE frames SET data = x'0102' WHERE id = 90")
    recording = Recording(path)
    assert recording.frame(70).snapshot.requests == frame(70).snapshot.requests
    for _ in range(2):
        with pytest.raises(RecordingUnusable, match="damaged"):
            recording.frame(100)
        assert recording.frame(80).snapshot.requests == frame(80).snapshot.requests
        assert recording.frame(150).snapshot.requests == frame(150).snapshot.requests


def test_a_damaged_frame_is_tried_once_and_not_with_every_look(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(path, "UPDATE frames SET data = x'0102' WHERE id = 90")
    link = ReplayLink(Recording(path), lambda: 0.0)
    link.playhead.seek(BEGAN + 100, 0.0)
    tries: list[int] = []
    read = link.recording.frame
    monkeypatch.setattr(link.recording, "frame", lambda index: (tries.append(index), read(index))[1])
    for _ in range(10):
        assert link.snapshot() == frame(0).snapshot or link.snapshot()
        assert link.standing().reach == "lost"
    assert tries == [100]


# -- the index --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE frames SET at = 'now' WHERE id = 100",
        "UPDATE frames SET at = x'00' WHERE id = 100",
        "UPDATE frames SET at = 9e999 WHERE id = 100",
        "UPDATE frames SET at = 1e300 WHERE id = 100",
        f"UPDATE frames SET at = {MAX_TIME} WHERE id = 100",
        "UPDATE frames SET at = -1e300 WHERE id = 100",
        f"UPDATE frames SET at = {BEGAN + 5} WHERE id = 100",
        "UPDATE frames SET segment = 5000 WHERE id = 100",
        "UPDATE frames SET segment = -1 WHERE id = 100",
        "UPDATE frames SET segment = 9223372036854775807 WHERE id = 100",
        "UPDATE frames SET segment = 'x' WHERE id = 100",
        "UPDATE frames SET segment = 1 WHERE id = 100",
    ],
)
def test_an_index_that_makes_no_sense_plays_until_there_and_says_so(path: Path, damage: str) -> None:
    change(path, "PRAGMA ignore_check_constraints=ON", damage)
    recording = played(path)
    assert isinstance(recording, Recording)
    assert len(recording.times) == 99
    assert recording.damage == f"{path} is damaged or truncated; it ends there"


def test_an_index_that_begins_with_nonsense_is_one_sentence(path: Path) -> None:
    change(path, "UPDATE frames SET at = -5")
    assert played(path) == f"{path} is damaged or truncated; it ends there"


def test_a_segment_without_an_end_is_read_no_further_than_one_may_be(path: Path) -> None:
    change(
        path,
        "DELETE FROM frames WHERE id > 1",
        "WITH RECURSIVE n(x) AS (SELECT 2 UNION ALL SELECT x + 1 FROM n WHERE x < 100000)"
        f" INSERT INTO frames SELECT x, {BEGAN} + x, 1, x'00' FROM n",
    )
    recording = outcome(lambda: Recording(path), size_of(path), RecordingUnusable)
    assert isinstance(recording, Recording)
    assert len(recording.times) == reader.MAX_SEGMENT_FRAMES
    assert recording.damage


def test_more_frames_than_are_taken_are_left_out_and_that_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_FRAMES", 150)
    recording = played(path)
    assert isinstance(recording, Recording)
    assert len(recording.times) == 150
    assert recording.damage


def test_frames_a_microsecond_apart_play_at_the_same_cost() -> None:
    times = [BEGAN + number / 10**6 for number in range(10**6)]
    head = Playhead(times, now=0.0)
    head.change_speed(+5, 0.0)
    with within_bounds():
        for tick in range(1000):
            head.position(tick / 10_000)
    gaps = Playhead([BEGAN + 11 * number for number in range(10**6)], now=0.0)
    with within_bounds():
        for tick in range(1000):
            gaps.position(float(tick))


# -- the database -----------------------------------------------------------------------------------------------------

_ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT"


@pytest.mark.parametrize(
    "statements",
    [
        ("DROP TABLE frames", f"CREATE VIEW frames (id, at, segment, data) AS {_ENDLESS} x, x * 1.0, x, '' FROM n"),
        (
            "DROP TABLE lines",
            f"CREATE VIEW lines (id, at, level, source, message) AS {_ENDLESS} x, x, 1, '', '' FROM n",
        ),
        ("DROP TABLE seconds", f"CREATE VIEW seconds (segment, data) AS {_ENDLESS} x, x FROM n"),
        ("CREATE TRIGGER more AFTER INSERT ON frames BEGIN DELETE FROM frames; END",),
        ("CREATE TABLE other (x)",),
        ("ALTER TABLE frames ADD COLUMN more AS (zeroblob(1000000000))",),
        ("CREATE VIRTUAL TABLE words USING fts5(x)",),
    ],
)
def test_a_database_that_computes_what_it_holds_is_no_recording(path: Path, statements: tuple[str, ...]) -> None:
    change(path, *statements)
    assert played(path) == f"{path} is not a recording of ericllm: it has other tables"
    with pytest.raises(RecordingUnusable, match="it has other tables"):
        RecordingWriter(path)


def pages(path: Path, edit: Callable[[list[bytearray]], None]) -> None:
    """Change a file page by page."""
    content = path.read_bytes()
    size = int.from_bytes(content[16:18], "big")
    found = [bytearray(content[start : start + size]) for start in range(0, len(content), size)]
    edit(found)
    path.write_bytes(b"".join(found))


def point_all_children_at_the_first(page: bytearray) -> None:
    """A B-tree page inside of a table or an index: all of its children are one."""
    cells = int.from_bytes(page[3:5], "big")
    offsets = [int.from_bytes(page[12 + 2 * cell : 14 + 2 * cell], "big") for cell in range(cells)]
    child = page[offsets[0] : offsets[0] + 4]
    for offset in offsets:
        page[offset : offset + 4] = child
    page[8:12] = child


def test_pages_that_stand_for_many_are_not_gone_through_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "night.rec"
    with RecordingWriter(path) as writer:
        lines = [LogEntry(at=BEGAN + at, level=20, source="e", message="x" * 200) for at in range(30_000)]
        writer.add(frame(0), lines)

    def edit(found: list[bytearray]) -> None:
        for page in found[1:]:
            if page[0] in (2, 5):
                point_all_children_at_the_first(page)

    pages(path, edit)
    recording = played(path)
    assert isinstance(recording, Recording | str)


def test_log_lines_are_no_more_than_can_be_held(path: Path) -> None:
    text = "x" * MIB
    change(
        path,
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 60)"
        f" INSERT INTO lines (at, level, source, message) SELECT {BEGAN}, 20, 'e', ? FROM n",
        values=(text,),
    )
    recording = Recording(path)
    with within_bounds():
        _, lines = recording.lines(BEGAN, 0)
    assert sum(len(line.message) for line in lines) <= reader.MAX_LOG_TEXT


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE lines SET message = x'ff' WHERE id = 150",
        "UPDATE lines SET message = CAST(x'fffefd' AS TEXT) WHERE id = 150",
        "UPDATE lines SET level = 'high' WHERE id = 150",
        "UPDATE lines SET level = 1e300 WHERE id = 150",
        "UPDATE lines SET source = 5.5 WHERE id = 150",
    ],
)
def test_a_log_line_of_another_type_is_one_sentence(path: Path, damage: str) -> None:
    change(path, damage)
    found = played(path)
    if isinstance(found, Recording):  # SQLite itself makes text of numbers, and stops at what is no text
        _, lines = found.lines(found.ends, 0)
        assert all(isinstance(line.message, str) and isinstance(line.level, int) for line in lines)
    else:
        assert found == f"{path} is damaged or truncated"


@pytest.mark.parametrize("data", [zeros, 10**9, "x", bomb(b"\x05"), bomb(b"\x91\x05")])
def test_a_past_that_is_a_bomb_is_one_sentence(path: Path, data: Any) -> None:
    change(path, "UPDATE seconds SET data = ?", values=(data() if callable(data) else data,))
    assert played(path) == f"{path} is damaged or truncated"


def test_a_past_of_many_empty_segments_is_looked_through_no_further_than_it_is_shown(path: Path) -> None:
    with sqlite3.connect(path) as database:
        empty = Packer().pack([])
        database.execute("UPDATE frames SET id = id + 1000000, segment = segment + 1000000")
        database.execute("DELETE FROM seconds")
        rows = ((number, empty) for number in range(200_000))
        database.executemany("INSERT INTO seconds VALUES (?, ?)", rows)
    database.close()
    recording = Recording(path)
    with within_bounds():
        recording.frame(0)


@pytest.mark.parametrize(("start", "step"), [(0, 3), (100, 7), (5000, 61), (16384, 1), (40_000, 97)])
def test_bytes_that_were_changed_are_one_sentence_or_play(path: Path, start: int, step: int) -> None:
    content = bytearray(path.read_bytes())
    for place in itertools.islice(range(start, len(content), step), 500):
        content[place] ^= 0xA5
    path.write_bytes(content)
    assert isinstance(played(path), Recording | str)


# -- making them ------------------------------------------------------------------------------------------------------


def test_a_segment_that_has_grown_large_ends_before_its_minute_does(tmp_path: Path) -> None:
    path = tmp_path / "night.rec"
    with RecordingWriter(path) as writer:
        for at in range(20):
            many = tuple(RequestRow(id=f"{at}-{number}", source="api", state="decode") for number in range(5000))
            writer.add(Frame(snapshot=Snapshot(at=BEGAN + at, requests=many)))
    segments = {segment for (segment,) in sqlite3.connect(path).execute("SELECT segment FROM frames")}
    assert len(segments) > 1
    recording = Recording(path)
    assert len(recording.frame(19).snapshot.requests) == 5000
    assert recording._packer.num_bytes < 2 * SEGMENT_BYTES


def test_what_is_too_much_to_be_read_again_is_not_recorded(tmp_path: Path) -> None:
    answers: dict[str, Any] = {"a": "x" * (5 * MIB)}
    with (
        RecordingWriter(tmp_path / "night.rec") as writer,
        pytest.raises(RecordingUnusable, match=r"Too much to record: 5\.0 MiB"),
    ):
        writer.add(Frame(snapshot=Snapshot(at=BEGAN), answers=answers))
