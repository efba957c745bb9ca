"""Recordings: frames come back as they were, after a crash too, and a file that is none is one sentence."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.link.chat import ChatMessage
from console.link.frames import Frame
from console.link.protocol import ApiStatus
from console.link.recording.link import SPEEDS, OnlyRecorded, Playhead, ReplayLink, time_of
from console.link.recording.reader import Recording
from console.link.recording.recorder import Recorder, RecordingWriter
from console.link.recording.store import Packer, RecordingUnusable, round_fractions
from console.link.rpc import as_link
from engine.config import SamplingParams
from engine.metrics.history import tens_of
from engine.snapshot import LogEntry, RequestRow, Second, Snapshot
from tests.fakes.link import FakeLink

pytestmark = pytest.mark.long

BEGAN = 1_780_000_000.0


def frame(at: float, *, history: int = 600) -> Frame:
    """The engine `at` seconds after the recording began."""
    seconds = tuple(Second(at=BEGAN + int(at) - age, output_tokens=int(at) - age) for age in range(history, -1, -1))
    rows = (RequestRow(id=f"r{int(at) // 7}", source="api", state="decode", output_tokens=int(at)),)
    snapshot = Snapshot(at=BEGAN + at, history=seconds[-600:], requests=rows, running=1, log_total=int(at) + 1)
    return Frame(snapshot=snapshot, api=ApiStatus(running=True, requests=int(at)))


def without_hour(shown: Frame) -> Frame:
    """A frame as it was recorded: its hour is made of the seconds where it is read."""
    return msgspec.structs.replace(shown, snapshot=msgspec.structs.replace(shown.snapshot, hour=()))


def line(at: float) -> LogEntry:
    return LogEntry(at=BEGAN + at, level=20, source="engine", message=f"line {at:g}")


def record(path: Path, moments: Iterable[float]) -> None:
    with RecordingWriter(path) as writer:
        for at in moments:
            writer.add(frame(at), (line(at),))


def test_every_frame_comes_back_as_it_was_from_wherever_one_looks(tmp_path: Path) -> None:
    record(tmp_path / "night.rec", range(150))
    recording = Recording(tmp_path / "night.rec")
    for index in (0, 149, 3, 61, 60, 59, 148, 10):
        assert without_hour(recording.frame(index)) == frame(index)
    assert (recording.begins, recording.ends) == (BEGAN, BEGAN + 149)
    assert recording.index_at(BEGAN + 5.9) == 5
    assert recording.index_at(BEGAN - 100) == 0


def test_a_recording_is_one_file_once_it_is_closed(tmp_path: Path) -> None:
    record(tmp_path / "night.rec", range(3))
    assert [path.name for path in tmp_path.iterdir()] == ["night.rec"]


def test_the_history_reaches_back_over_segments_and_gaps(tmp_path: Path) -> None:
    record(tmp_path / "night.rec", [0, 1, 2])
    record(tmp_path / "night.rec", [100, 101])
    snapshot = Recording(tmp_path / "night.rec").frame(4).snapshot
    history = snapshot.history
    assert snapshot.hour[-40:] == tens_of(history)[-40:]
    assert [second.at - BEGAN for second in history] == [float(at) for at in range(-498, 102)]


def test_recording_goes_on_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "night.rec"
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.unit.test_recording import *
writer = RecordingWriter(Path({str(path)!r}))
for at in range(20):
    writer.add(frame(at), (line(at),))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert len(Recording(path).times) == 20
    record(path, range(15, 25))
    recording = Recording(path)
    assert [at - BEGAN for at in recording.times] == list(range(25))
    assert without_hour(recording.frame(22)) == frame(22)
    assert recording.lines(BEGAN + 100, 0)[0] == 25


def test_two_programs_do_not_record_into_one_file(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "night.rec"), pytest.raises(RecordingUnusable, match="in use by another recording"):
        RecordingWriter(tmp_path / "night.rec")


def test_a_recording_can_be_read_while_it_is_made(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "night.rec") as writer:
        writer.add(frame(0), (line(0),))
        assert without_hour(Recording(tmp_path / "night.rec").frame(0)) == frame(0)


def test_what_is_no_recording_is_one_sentence(tmp_path: Path) -> None:
    for name, content, said in (
        ("text", b"hello " * 1000, "is not a recording"),
        ("empty", b"", "is not a recording"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecordingUnusable, match=said):
            Recording(tmp_path / name)
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    for opened in (Recording, RecordingWriter):
        with pytest.raises(RecordingUnusable, match="is not a recording of ericllm"):
            opened(tmp_path / "other")
    for name in ("nothing", "n" * 300):
        with pytest.raises(RecordingUnusable, match="No such file: "):
            Recording(tmp_path / name)
    with RecordingWriter(tmp_path / "young"):
        pass
    with pytest.raises(RecordingUnusable, match="has no frames yet"):
        Recording(tmp_path / "young")
    with pytest.raises(RecordingUnusable, match="cannot be used"):
        RecordingWriter(tmp_path / "no" / "folder")


def test_a_file_that_is_cut_off_plays_as_far_as_it_goes_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "night.rec"
    record(path, range(1200))
    whole = path.read_bytes()
    lengths = []
    for size in (len(whole) // 2, len(whole) * 3 // 4, len(whole) - 1):
        path.write_bytes(whole[:size])
        link = ReplayLink(Recording(path), lambda: 0.0)
        lengths.append(len(link.recording.times))
        assert "is damaged or truncated; it ends there" in link.recording.damage
        assert link.standing().reach == "recording"
        link.playhead.seek(link.recording.ends, 0.0)
        assert link.snapshot().requests == frame(lengths[-1] - 1).snapshot.requests
        assert link.standing().reach == "lost"
        assert link.standing().reason == link.recording.damage
        with pytest.raises(RecordingUnusable, match=r"is (damaged or )?truncated"):
            RecordingWriter(path)
    assert 0 < lengths[0] < lengths[1] < lengths[2]


def test_a_file_that_is_cut_off_before_its_first_frame_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "night.rec"
    record(path, range(200))
    whole = path.read_bytes()
    for size in (100, 5000, 16384, 20000):
        path.write_bytes(whole[:size])
        with pytest.raises(RecordingUnusable, match=r"is damaged or truncated|not a recording"):
            Recording(path)


def test_a_damaged_frame_is_told_and_the_others_play(tmp_path: Path) -> None:
    path = tmp_path / "night.rec"
    record(path, range(130))
    with sqlite3.connect(path) as database:
        database.execute("UPDATE frames SET data = x'0102' WHERE id = 30")
    database.close()
    now = [0.0]
    link = ReplayLink(Recording(path), lambda: now[0])
    link.playhead.seek(BEGAN + 40, now[0])
    assert msgspec.structs.replace(link.snapshot(), hour=()) == frame(0).snapshot
    assert link.standing().reach == "lost"
    assert "damaged" in link.standing().reason
    link.playhead.seek(BEGAN + 100, now[0])
    assert msgspec.structs.replace(link.snapshot(), hour=()) == frame(100).snapshot
    assert link.standing().reach == "recording"


def test_a_minute_of_a_busy_machine_takes_well_under_200_kilobytes(tmp_path: Path) -> None:
    import random

    draw = random.Random(7)
    ids = [f"chatcmpl-{draw.getrandbits(128):032x}" for _ in range(32)]
    seconds = tuple(
        Second(
            at=BEGAN - 600 + at,
            output_tokens=draw.randint(500, 900),
            device_utilisation=tuple(draw.random() for _ in range(8)),
            ttft_p95=draw.random(),
        )
        for at in range(1000)
    )
    with RecordingWriter(tmp_path / "busy.rec") as writer:
        sizes = []
        for at in range(241):
            rows = tuple(
                RequestRow(
                    id=each,
                    source="api",
                    state="decode",
                    worker=f"w{place % 8}",
                    output_tokens=at * 20 + draw.randint(0, 9),
                    age_s=at + draw.random(),
                    itl_s=draw.random() / 50,
                    tokens_per_s=draw.random() * 50,
                )
                for place, each in enumerate(ids)
            )
            snapshot = Snapshot(at=BEGAN + at, history=seconds[at : at + 600], requests=rows, running=32)
            writer.add(Frame(snapshot=snapshot))
            if at in (119, 239):
                sizes.append(_stored(tmp_path / "busy.rec"))
    assert (sizes[1] - sizes[0]) / 2 < 150_000


def _stored(path: Path) -> int:
    with sqlite3.connect(path) as database:
        frames = database.execute("SELECT sum(length(data)) FROM frames").fetchone()[0]
        seconds = database.execute("SELECT sum(length(data)) FROM seconds").fetchone()[0]
    database.close()
    return int(frames + seconds)


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5) | st.floats(-(2.0**63), 2.0**63),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(values=st.lists(plain_values, max_size=5))
@settings(max_examples=60)
def test_what_is_packed_comes_back_in_order_to_five_digits(values: list[object]) -> None:
    packing, unpacking = Packer(), Packer()
    assert [unpacking.unpack(packing.pack(value)) for value in values] == [round_fractions(value) for value in values]


@given(number=st.floats(allow_nan=False, allow_infinity=False))
def test_rounding_keeps_five_digits_and_unix_times_whole(number: float) -> None:
    assert round_fractions(number) == pytest.approx(number, rel=1e-5, abs=0)
    assert round_fractions(round_fractions(number)) == round_fractions(number)
    assert round_fractions(BEGAN + 0.123456) == BEGAN + 0.123456


# -- the playhead ----


def test_the_playhead_goes_at_its_speed_stops_and_stays_at_the_end() -> None:
    head = Playhead([BEGAN + at for at in range(101)], now=50.0)
    assert head.position(53.5) == BEGAN + 3.5
    head.change_speed(+1, 54.0)
    assert head.speed == 2.0
    assert head.position(56.0) == BEGAN + 8.0
    head.toggle(56.0)
    assert head.position(99.0) == BEGAN + 8.0
    head.toggle(99.0)
    assert head.position(1000.0) == BEGAN + 100
    assert head.ended(1000.0)
    head.toggle(1000.0)
    assert head.position(1000.0) == BEGAN


def test_the_slowest_and_the_fastest_speed_are_the_last() -> None:
    head = Playhead([BEGAN, BEGAN + 1], now=0.0)
    for by, last in ((-1, SPEEDS[0]), (+1, SPEEDS[-1])):
        for _ in range(20):
            head.change_speed(by, 0.0)
        assert head.speed == last
    assert (SPEEDS[0], SPEEDS[-1]) == (0.5, 60.0)


def test_seeking_beyond_either_end_stops_there() -> None:
    head = Playhead([BEGAN, BEGAN + 10], now=0.0)
    head.seek(BEGAN - 5, 0.0)
    assert head.position(0.0) == BEGAN
    head.seek(BEGAN + 50, 0.0)
    assert head.position(0.0) == BEGAN + 10


def test_a_gap_in_the_recording_is_gone_over_at_once() -> None:
    head = Playhead([BEGAN, BEGAN + 1, BEGAN + 5000, BEGAN + 5001], now=0.0)
    assert head.position(0.5) == BEGAN + 0.5
    assert head.position(1.5) == BEGAN + 5000.5


@pytest.mark.parametrize("apart", [15, 60, 3600])
def test_a_recording_of_few_frames_plays_at_its_speed_and_goes_over_what_it_lacks(apart: int) -> None:
    times = [BEGAN + apart * at for at in (0, 1, 2, 50, 51)]
    head = Playhead(times, now=0.0)
    assert head.position(1.5 * apart) == BEGAN + 1.5 * apart
    assert head.position(2.5 * apart) == BEGAN + 50.5 * apart
    assert head.position(9.0 * apart) == times[-1]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("14:02", 14 * 3600 + 120.0),
        ("14:02:11", 14 * 3600 + 131.0),
        ("+90", 50000 + 90.0),
        ("-90", 60000 - 90.0),
        ("50%", 55000.0),
        ("01:00", 86400 + 3600.0),
        ("25:00", None),
        ("soon", None),
        ("", None),
    ],
)
def test_a_time_is_meant_as_people_write_it(said: str, meant: float | None) -> None:
    assert time_of(said, 50000.0, 60000.0, midnight=0.0) == meant


# -- the link ----


async def test_a_recording_takes_no_orders_and_shows_its_log_as_far_as_it_had_come(tmp_path: Path) -> None:
    record(tmp_path / "night.rec", range(30))
    now = [0.0]
    replay = ReplayLink(Recording(tmp_path / "night.rec"), lambda: now[0])
    link = as_link(replay)
    now[0] = 12.5
    assert msgspec.structs.replace(link.snapshot(), hour=()) == frame(12).snapshot
    assert link.snapshot() is link.snapshot()
    total, lines = link.logs(10)
    assert (total, [each.message for each in lines]) == (13, ["line 10", "line 11", "line 12"])
    assert link.settings.rows() == ()
    for order in (link.models.load("demo"), link.reconfigure(num_workers=2), link.stop_api(), link.models.forget("x")):
        with pytest.raises(OnlyRecorded, match="This is a recording"):
            await order
    with pytest.raises(OnlyRecorded):
        async for _ in link.conversation.chat([ChatMessage(role="user", content="hi")], SamplingParams()):
            pass


def test_what_records_and_replays_loads_no_terminal_toolkit() -> None:
    rooms = "console.link.recording.link, console.link.recording.recorder, console.link.readonly"
    code = f"import sys, {rooms}; sys.exit('textual' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def test_what_the_http_side_and_the_settings_told_is_recorded_too(tmp_path: Path) -> None:
    fake = FakeLink()
    with Recorder(fake, tmp_path / "night.rec", interval_s=0.01) as recorder:
        while recorder.frames < 3:
            recorder._thread.join(0.01)
            fake.show(msgspec.structs.replace(fake.current, at=fake.current.at + 1))
    link = as_link(ReplayLink(Recording(tmp_path / "night.rec")))
    assert link.api.report() == fake.api.report()
    assert list(link.settings.rows()) == list(fake.settings.rows())
    assert link.models.defaults() == fake.models.defaults()
    assert link.models.fetching() is None


def test_a_recording_whose_disk_fails_says_why(tmp_path: Path) -> None:
    fake = FakeLink()
    with Recorder(fake, tmp_path / "night.rec", interval_s=0.01) as recorder:
        while not recorder.frames:
            recorder._thread.join(0.01)
        with sqlite3.connect(tmp_path / "night.rec") as other:
            other.execute("DROP TABLE frames")
        other.close()
        while not recorder.problem:
            fake.show(msgspec.structs.replace(fake.current, at=fake.current.at + 1))
            recorder._thread.join(0.01)
    assert "cannot be used" in recorder.problem


def test_winding_back_takes_back_the_log(tmp_path: Path) -> None:
    record(tmp_path / "night.rec", range(30))
    now = [0.0]
    replay = ReplayLink(Recording(tmp_path / "night.rec"), lambda: now[0])
    replay.playhead.seek(BEGAN + 20, 0.0)
    assert (replay.snapshot().log_total, replay.logs(18)[0]) == (21, 21)
    replay.playhead.seek(BEGAN + 3, 0.0)
    assert (replay.snapshot().log_total, replay.logs(21)) == (4, (4, []))


def test_a_frame_that_is_no_later_than_the_last_is_not_kept(tmp_path: Path) -> None:
    record(tmp_path / "night.rec", [0, 1, 1, 0, 2])
    assert len(Recording(tmp_path / "night.rec").times) == 3
    assert msgspec.structs.asdict(Recording(tmp_path / "night.rec").frame(2).snapshot)["log_total"] == 3
