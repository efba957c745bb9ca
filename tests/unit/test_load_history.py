"""What loads really used, remembered to correct the next plan."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.config import DeviceShare
from engine.placement.load_history import (
    MAX_LOADS,
    MAX_MODELS,
    LoadHistory,
    LoadHistoryFile,
    MeasuredLoad,
    measured_load,
    with_resident,
)
from engine.placement.model_memory import Correction
from engine.placement.plan import Placement


def load(used_weights: int = 100, used_working: int = 50) -> MeasuredLoad:
    return MeasuredLoad(
        planned_weights_bytes=100,
        used_weights_bytes=used_weights,
        planned_working_bytes=50,
        used_working_bytes=used_working,
    )


def placed(*shares: tuple[str, int, int], correction: Correction | None = None) -> Placement:
    return Placement(
        shares=tuple(
            DeviceShare(device=device, weights_bytes=weights, working_bytes=working)
            for device, weights, working in shares
        ),
        kv_tokens=16,
        identity="m",
        unseen_bytes=1 if shares[0][0] == "cpu" else 0,
        correction=correction or Correction(),
    )


def test_a_model_that_was_never_loaded_is_not_corrected() -> None:
    assert LoadHistory().correction("m") == Correction()


def test_the_most_that_the_last_loads_took_is_what_corrects() -> None:
    ledger = (
        LoadHistory().with_load("m", load(120, 80)).with_load("m", load(110, 90)).with_load("other", load(200, 500))
    )
    assert ledger.correction("m") == Correction(weights_factor=1.2, working_bytes=40, loads=2)
    for _ in range(MAX_LOADS):
        ledger = ledger.with_load("m", load())
    assert ledger.correction("m") == Correction(loads=MAX_LOADS)


def test_weights_are_corrected_downwards_but_working_memory_never() -> None:
    found = LoadHistory().with_load("m", load(80, 10)).correction("m")
    assert (found.weights_factor, found.working_bytes) == (0.8, 0)


def test_an_absurd_load_corrects_within_bounds() -> None:
    assert LoadHistory().with_load("m", load(10**6, 0)).correction("m").weights_factor == 2.0
    assert LoadHistory().with_load("m", load(1, 0)).correction("m").weights_factor == 0.5
    assert LoadHistory().with_load("m", load(0, 0)).correction("m").weights_factor == 1.0


def test_the_models_loaded_longest_ago_are_forgotten() -> None:
    ledger = LoadHistory()
    for number in range(MAX_MODELS):
        ledger = ledger.with_load(str(number), load())
    ledger = ledger.with_load("0", load()).with_load("new", load())
    assert len(ledger.loads) == MAX_MODELS
    assert ledger.correction("0").loads == 2
    assert ledger.correction("1").loads == 0


def test_a_load_is_compared_with_what_was_planned_before_any_correction() -> None:
    placement = placed(
        ("sim:0", 150, 30), ("sim:1", 150, 40), correction=Correction(weights_factor=1.5, working_bytes=10)
    )
    used = (DeviceShare(device="sim:0", weights_bytes=140, working_bytes=31),)
    found = measured_load(placement, used)
    assert (found.planned_weights_bytes, found.planned_working_bytes, found.devices) == (200, 50, 2)
    assert (found.used_weights_bytes, found.used_working_bytes) == (140, 31)


def test_on_a_cpu_all_that_the_process_holds_counts_and_else_what_shares_leave_out_is_added() -> None:
    used = (DeviceShare(device="cpu", weights_bytes=100, kv_bytes=50, working_bytes=7),)
    placement = placed(("cpu", 100, 20))
    assert measured_load(placement, used, resident_bytes=500).used_working_bytes == 350
    assert measured_load(placement, used).used_working_bytes == 8
    gpu = (DeviceShare(device="cuda:1", weights_bytes=100, working_bytes=7),)
    assert measured_load(placed(("cuda:1", 100, 20)), gpu, resident_bytes=500).used_working_bytes == 7


def test_what_is_noted_is_read_again_by_anybody(tmp_path: Path) -> None:
    used = (DeviceShare(device="sim:0", weights_bytes=110, working_bytes=25),)
    LoadHistoryFile(tmp_path / "state").note(placed(("sim:0", 100, 20)), used)
    LoadHistoryFile(tmp_path / "state").note(placed(("sim:0", 100, 20)), used)
    assert LoadHistoryFile(tmp_path / "state").read().correction("m") == Correction(
        weights_factor=1.1, working_bytes=5, loads=2
    )
    assert [file.name for file in (tmp_path / "state").iterdir()] == ["loads.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"loads": {"m": 3}}', b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "loads.json").write_bytes(content)
    file = LoadHistoryFile(tmp_path)
    assert file.read() == LoadHistory()
    file.note(placed(("sim:0", 100, 20)), (DeviceShare(device="sim:0", weights_bytes=90),))
    assert file.read().correction("m").loads == 1


def test_a_folder_that_cannot_be_written_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "engine"):
        LoadHistoryFile(tmp_path / "file").note(
            placed(("sim:0", 1, 1)), (DeviceShare(device="sim:0", weights_bytes=9),)
        )
    assert "cannot be" in caplog.text


def test_a_load_that_nobody_planned_or_measured_is_not_noted(tmp_path: Path) -> None:
    LoadHistoryFile(tmp_path).note(Placement(shares=(), kv_tokens=1), (DeviceShare(device="cpu"),))
    LoadHistoryFile(tmp_path).note(placed(("cpu", 1, 1)), ())
    assert not list(tmp_path.iterdir())


def test_a_cpu_worker_took_all_that_its_process_holds() -> None:
    share = DeviceShare(device="cpu", layers=6, weights_bytes=10, kv_bytes=20, working_bytes=5)
    assert with_resident([share], 300)[0].working_bytes == 270
    assert with_resident([share], 0) == (share,)
    card = DeviceShare(device="cuda:0", layers=6, weights_bytes=10, kv_bytes=20, working_bytes=5)
    assert with_resident([card], 300) == (card,)
