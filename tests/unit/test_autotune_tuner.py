"""A search drives a rig: what it is left at, also where it is cancelled or fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from console.autotune.search import Search
from console.autotune.tuner import Tuner, tried_of
from engine.errors import WorkerFailed
from tests.fakes.simulated_tuning import DEVICES, Device
from tests.fakes.tuning_rig import SimulatedRig

DEVICE = DEVICES[0]


def tuner(rig: SimulatedRig, budget_s: float = 300) -> Tuner:
    device = rig.device
    return Tuner(Search(device.space, device.slo, budget_s=budget_s), rig, clock=rig.clock)


def rig_of(device: Device = DEVICE, **more: int) -> SimulatedRig:
    return SimulatedRig(device, **more)


async def test_everything_is_put_back_unless_it_is_to_be_applied() -> None:
    rig = rig_of()
    best = await tuner(rig).run(apply=False)
    assert best is not None and best.setting != DEVICE.start
    assert (rig.at, rig.loaded) == (DEVICE.start, False)


async def test_applied_it_is_left_at_the_best_setting() -> None:
    rig = rig_of()
    best = await tuner(rig).run(apply=True)
    assert best is not None
    assert (rig.at, rig.loaded) == (best.setting, False)


async def test_cancelled_it_is_put_back() -> None:
    rig = rig_of()
    running = asyncio.ensure_future(tuner(rig).run(apply=True))
    while rig.windows < 5:  # noqa: ASYNC110 - the rig is no event
        await asyncio.sleep(0)
    rig.held = True
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (rig.at, rig.loaded) == (DEVICE.start, False)


async def test_where_the_engine_fails_it_is_put_back_and_the_reason_is_told() -> None:
    rig = rig_of(fails_at=4)
    with pytest.raises(WorkerFailed, match="no request was answered"):
        await tuner(rig).run(apply=True)
    assert (rig.at, rig.loaded) == (DEVICE.start, False)


async def test_what_does_not_fit_is_counted_and_the_search_goes_on() -> None:
    rig = rig_of(replace(DEVICE, memory=60))
    run = tuner(rig)
    assert await run.run(apply=False) is not None
    assert run.refused > 0
    assert run.windows == rig.windows


async def test_it_keeps_to_its_time() -> None:
    rig = rig_of()
    await tuner(rig, 60).run(apply=False)
    assert rig.now_s <= 60 + DEVICE.space.turn_s(rig.used[-2], DEVICE.start)


async def test_what_is_reported_has_the_fastest_first_the_best_and_the_front() -> None:
    rig = rig_of()
    run = tuner(rig)
    best = await run.run(apply=False)
    tried = tried_of(run.search)
    assert [each.tokens_per_s for each in tried] == sorted((each.tokens_per_s for each in tried), reverse=True)
    assert best is not None and [each.setting for each in tried if each.best] == [best.setting]
    assert tried[0].front
    assert sum(each.windows for each in tried) == run.windows


async def test_watchers_are_told_of_every_trial_before_and_after() -> None:
    rig, seen = rig_of(), []
    run = Tuner(
        Search(DEVICE.space, DEVICE.slo, budget_s=30), rig, on_change=lambda: seen.append(run.now), clock=rig.clock
    )
    await run.run(apply=False)
    assert len(seen) == 2 * (run.windows + run.refused) + 1
    assert run.now is None
