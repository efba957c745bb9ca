"""What changed from one snapshot to the next: applied to the old one, it gives the new one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.link.frames import PatchedValue, diff, from_plain, to_plain
from engine.backends.base import BackendStats, SequenceStats
from engine.config import ModelSpec
from engine.errors import ErrorInfo
from engine.snapshot import DeviceReading, Mark, ModelStatus, RequestRow, Second, Snapshot, Totals, WorkerReading

pytestmark = pytest.mark.long

numbers = st.floats(-(2.0**63), 2.0**63, width=32)
counts = st.integers(0, 5)
names = st.sampled_from(["a", "b", "c", "d"])
errors = st.none() | st.builds(ErrorInfo, code=names, message=names, details=st.dictionaries(names, counts, max_size=2))
rows = st.builds(
    RequestRow,
    id=names,
    source=names,
    state=st.sampled_from(["queued", "decode", "finished"]),
    output_tokens=counts,
    age_s=numbers,
    itl_s=st.none() | numbers,
    error=errors,
)
seconds = st.builds(
    Second, at=st.integers(0, 9).map(float), output_tokens=counts, device_utilisation=st.tuples(numbers)
)
sequences = st.builds(SequenceStats, request_id=names, computed_tokens=counts, known_tokens=counts)
workers = st.builds(
    WorkerReading,
    id=names,
    state=st.sampled_from(["loading", "ready"]),
    log_tail=st.lists(names, max_size=2).map(tuple),
    stats=st.builds(BackendStats, waiting=counts, sequences=st.lists(sequences, max_size=2).map(tuple)),
    last_error=errors,
)
devices = st.builds(
    DeviceReading, id=names, name=names, kind=st.just("cuda"), utilisation=st.none() | numbers, total_bytes=counts
)
statuses = st.builds(
    ModelStatus,
    state=st.sampled_from(["ready", "failed"]),
    spec=st.none() | st.builds(ModelSpec, path=st.just(Path("/models/a")), name=names),
    error=errors,
)
snapshots = st.builds(
    Snapshot,
    at=numbers,
    status=statuses,
    requests=st.lists(rows, max_size=4).map(tuple),
    history=st.lists(seconds, max_size=5).map(tuple),
    workers=st.lists(workers, max_size=3).map(tuple),
    devices=st.lists(devices, max_size=3).map(tuple),
    marks=st.lists(st.builds(Mark, at=numbers, text=names), max_size=2).map(tuple),
    totals=st.builds(Totals, finished=st.dictionaries(names, counts, max_size=3)),
)


def patched(old: object, change: object) -> object:
    tree = PatchedValue(old)
    tree.patch(change)  # type: ignore[arg-type]
    return tree.value


@given(old=snapshots, new=snapshots)
def test_a_difference_applied_to_the_old_snapshot_is_the_new_one(old: Snapshot, new: Snapshot) -> None:
    change = diff(old, new)
    travelled = json.loads(msgspec.json.encode(change))
    tree = to_plain(old) if travelled is None else patched(to_plain(old), travelled)
    assert from_plain(tree, Snapshot) == new
    assert (change is None) == (old == new)


@given(walk=st.lists(snapshots, min_size=2, max_size=5))
def test_differences_add_up(walk: list[Snapshot]) -> None:
    tree = to_plain(walk[0])
    for old, new in itertools.pairwise(walk):
        if (change := diff(old, new)) is not None:
            tree = patched(tree, change)
    assert from_plain(tree, Snapshot) == walk[-1]


def test_a_history_that_moves_on_sends_the_new_second_alone() -> None:
    past = tuple(Second(at=float(at)) for at in range(600))
    old = Snapshot(at=1.0, history=past)
    new = Snapshot(at=1.0, history=(*past[1:], Second(at=600.0, output_tokens=7)))
    change = diff(old, new)
    assert change == {"history": [0, [[1, 599], [to_plain(new.history[-1])]]]}


def test_a_row_that_changed_sends_its_changed_fields_alone() -> None:
    first = RequestRow(id="a", source="chat", state="decode", output_tokens=1)
    second = RequestRow(id="b", source="chat", state="queued")
    old = Snapshot(at=1.0, requests=(first, second))
    new = Snapshot(at=1.0, requests=(msgspec.structs.replace(first, output_tokens=2), second))
    assert diff(old, new) == {"requests": [0, [[0, {"output_tokens": [2]}], [1, 1]]]}


@pytest.mark.parametrize(
    "change", [{"requests": [0, [[3, {"id": ["x"]}]]]}, {"at": {"x": None}}, {"gone": None}, [0, [3]]]
)
def test_a_change_of_another_value_is_refused(change: object) -> None:
    with pytest.raises(ValueError, match="does not belong"):
        patched(to_plain(Snapshot(at=1.0)), change)
