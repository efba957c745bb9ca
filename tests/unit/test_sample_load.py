"""A sample load: two clients for each slot, behind all others, for some seconds and no longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.tuning.autotune.tuning_runs import Tuning
from engine.errors import Draining, EngineBusy, NoModelLoaded
from tests.fakes.backend import FakeBackend, Gate
from tests.fakes.engines import Backends, serving, started, until

LONG_S = 600.0


async def test_it_sends_from_two_clients_for_each_slot_behind_all_others_until_it_is_stopped(tmp_path: Path) -> None:
    backends = Backends(FakeBackend(gate=Gate()))
    async with serving(tmp_path, backends, max_prompts=3) as engine:
        tuning = Tuning(engine, None, lambda: False)
        await tuning.start_load(seconds=LONG_S)
        await until(lambda: engine.publish().queued == 3)
        snapshot = engine.publish()
        assert (snapshot.running, {row.source for row in snapshot.requests}) == (3, {"sample"})
        assert all(row.priority < 0 for row in snapshot.requests)
        report = tuning.report()
        assert (report.load_clients, report.sends_requests, report.under_way) == (6, True, False)
        assert 0 < report.load_left_s <= LONG_S
        with pytest.raises(EngineBusy, match="Stop it first"):
            await tuning.start_load()
        await tuning.stop_load()
        assert (tuning.report().load_clients, tuning.report().load_left_s) == (0, 0)
        with pytest.raises(EngineBusy, match="It ends with its last requests"):
            await tuning.start_load()
        backends.open_gates()
        await until(lambda: not engine._tracker.live)
        assert engine.publish().totals.finished == {"length": 6}


async def test_it_ends_by_itself_and_cancels_none_of_its_requests(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        tuning = Tuning(engine, None, lambda: False)
        await tuning.start_load(seconds=0.05)
        await until(lambda: not tuning.report().sends_requests)
        await until(lambda: not engine._tracker.live)
        assert engine.publish().totals.finished.keys() == {"length"}


async def test_autotune_does_not_wait_for_it(tmp_path: Path) -> None:
    backends = Backends(FakeBackend(gate=Gate()))
    async with serving(tmp_path, backends, max_prompts=3) as engine:
        tuning = Tuning(engine, None, lambda: False)
        await tuning.start_load(seconds=LONG_S)
        await until(lambda: engine.publish().queued == 3)
        await tuning.cancel()
        assert engine.publish().totals.finished == {"cancelled": 6}


async def test_it_leaves_half_of_the_queue_to_others(tmp_path: Path) -> None:
    backends = Backends(FakeBackend(gate=Gate()))
    async with serving(tmp_path, backends, max_prompts=8, max_queue=4) as engine:
        tuning = Tuning(engine, None, lambda: False)
        await tuning.start_load(seconds=LONG_S)
        assert tuning.report().load_clients == 10
        await tuning.stop_load()


async def test_without_a_model_while_draining_and_during_a_bench_it_does_not_begin(tmp_path: Path) -> None:
    async with started() as engine:
        with pytest.raises(NoModelLoaded):
            await Tuning(engine, None, lambda: False).start_load()
    async with serving(tmp_path) as engine:
        with pytest.raises(EngineBusy):
            await Tuning(engine, None, lambda: True).start_load()
        await engine.drain()
        with pytest.raises(Draining):
            await Tuning(engine, None, lambda: False).start_load()
        assert not engine._tracker.live
