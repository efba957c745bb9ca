"""Recordings changed at random, in bytes or in what they hold: each plays as far as it can, or is one sentence."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from console.link.recording.link import ReplayLink
from console.link.recording.reader import Recording
from console.link.recording.store import Packer, RecordingUnusable
from tests.fakes import scenes
from tests.fakes.bounds import outcome
from tests.fakes.elsewhere import recording_of
from tests.fakes.mutations import changed, damaged

pytestmark = pytest.mark.long

COLUMNS = ("frames.id", "frames.at", "frames.segment", "frames.data", "seconds.segment", "seconds.data", "lines.at")
CELLS = (None, 0, -1, 5, 2**62, 1e300, -1e300, 9e999, "", "x", "9" * 300, b"", b"\x00", b"\xff" * 1000)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A recording of five minutes."""
    return recording_of(scenes.busy(), tmp_path_factory.mktemp("recorded") / "night.rec").read_bytes()


def play(path: Path) -> str:
    """What a replay says of a recording after looking at all that it shows."""
    link = ReplayLink(Recording(path), lambda: 0.0)
    said = {link.recording.damage}
    for index in range(0, len(link.recording.times), 37):
        link.playhead.seek(link.recording.times[index], 0.0)
        link.snapshot()
        link.logs()
        said.add(link.standing().reason)
    link.recording.close()
    return " ".join(said)


def check(path: Path) -> None:
    said = outcome(lambda: play(path), path.stat().st_size, RecordingUnusable)
    assert said.isprintable()


@pytest.mark.parametrize("seed", range(60))
def test_any_bytes_play_or_are_one_sentence(whole: bytes, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    path = tmp_path / "night.rec"
    content = damaged(whole, dice, dice.choice((1, 5, 100)))
    path.write_bytes(content[: dice.randrange(len(content))] if dice.random() < 0.3 else content)
    check(path)


@pytest.mark.parametrize("seed", range(60))
def test_any_cells_play_or_are_one_sentence(whole: bytes, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    path = tmp_path / "night.rec"
    path.write_bytes(whole)
    with sqlite3.connect(path) as database:
        for _ in range(dice.choice((1, 5))):
            table, column = dice.choice(COLUMNS).split(".")
            rowid = dice.randrange(300)
            try:
                database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (dice.choice(CELLS), rowid))
            except sqlite3.Error:  # SQLite itself would not have it
                continue
    database.close()
    check(path)


@pytest.mark.parametrize("seed", range(40))
def test_any_frames_play_or_are_one_sentence(whole: bytes, tmp_path: Path, seed: int) -> None:
    """Values that are changed, and packed as a recorder packs them."""
    dice = random.Random(seed)
    path = tmp_path / "night.rec"
    path.write_bytes(whole)
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT id, segment, data FROM frames WHERE id <= 70 ORDER BY id").fetchall()
        for number, segment, data in rows:
            if number == segment:
                reading, writing = Packer(), Packer()
            value = reading.unpack(data)
            if dice.random() < 0.1:
                value = storable(changed(value, dice, dice.choice((1, 5))))
            database.execute("UPDATE frames SET data = ? WHERE id = ?", (writing.pack(value), number))
    database.close()
    check(path)


def storable(value: Any) -> Any:
    """The value without what msgpack has no form for: integers of more than 64 bits, and lone surrogates."""
    if isinstance(value, dict):
        return {storable(name): storable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [storable(each) for each in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return 2**63 if type(value) is int and not -(2**63) <= value < 2**64 else value
