"""A search drives a rig: what it is left at, also where it is cancelled or fails."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from console.tuning.autotune.rig import KnobsChanged
from console.tuning.autotune.search import WINDOW_S, Search
from console.tuning.autotune.space import Setting
from console.tuning.autotune.tuner import BEGIN_SHARE, Tuner, best_of, tried_of
from engine.errors import NoModelLoaded, WorkerFailed
from engine.metrics.slo import Slo
from tests.fakes.simulated_tuning import DEVICES, Device
from tests.fakes.tuning_rig import SimulatedRig

DEVICE = DEVICES[0]


def tuner(rig: SimulatedRig, budget_s: float = 300) -> Tuner:
    device = rig.device

    def search(window_s: float) -> Search:
        return Search(device.space, device.slo, budget_s=budget_s, window_s=window_s)

    return Tuner(search(WINDOW_S), rig, restart=search, clock=rig.clock)


def rig_of(device: Device = DEVICE, **more: Any) -> SimulatedRig:
    return SimulatedRig(device, **more)


def silence() -> WorkerFailed:
    return WorkerFailed("no answer within the measurement time")


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
    rig.paused = True
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (rig.at, rig.loaded) == (DEVICE.start, False)


async def test_where_the_model_is_gone_it_ends_with_the_reason_and_what_was_measured() -> None:
    rig = rig_of(fails={6: NoModelLoaded("NeuralHermes was unloaded")})
    run = tuner(rig)
    with pytest.raises(NoModelLoaded, match="was unloaded"):
        await run.run(apply=True)
    assert (rig.at, rig.loaded, run.applied) == (DEVICE.start, False, False)
    assert sum(each.windows for each in tried_of(run.search)) == 5
    assert best_of(run.search) is not None


# -- settings that fail -----------------------------------------------------------------------------------------------


async def test_settings_that_answer_nothing_are_out_with_the_reason_and_the_search_goes_on() -> None:
    rig = rig_of(replace(DEVICE, memory=math.inf), silent=lambda setting: setting.workers == 2)
    run = tuner(rig)
    best = await run.run(apply=True)
    assert best is not None and best.setting.workers != 2 and run.applied
    silent = [each.setting for each in run.failed]
    assert silent and all(each.workers == 2 for each in silent)
    assert {each.reason for each in run.failed} == {"no answer within the measurement time"}
    assert not any(each.setting.workers == 2 for each in tried_of(run.search))
    assert sorted(silent) == sorted(each for each in rig.measured if each.workers == 2), "none is measured again"


async def test_settings_that_the_backend_refuses_are_out_and_say_nothing_of_larger_ones() -> None:
    rig = rig_of(DEVICES[1], refuses=lambda setting: setting.cache_bits == 8)
    run = tuner(rig)
    best = await run.run(apply=False)
    assert best is not None and best.setting.cache_bits == 4
    assert any(setting.cache_bits == 16 for setting in rig.measured)
    assert run.refused < len(run.failed)
    assert "heads of 80 elements" in " ".join(each.reason for each in run.failed)


async def test_a_setting_that_answered_once_and_then_fails_is_out() -> None:
    rig = rig_of()
    first = tuner(rig)
    await first.run(apply=False)
    again = next(at for at, each in enumerate(rig.measured, 1) if each in rig.measured[: at - 1])
    rig = rig_of(fails={again: silence()})
    run = tuner(rig)
    assert await run.run(apply=False) is not None
    assert [each.setting for each in run.failed] == [rig.measured[again - 1]]
    assert rig.measured[again - 1] not in {each.setting for each in tried_of(run.search)}


async def test_where_nothing_is_answered_in_the_first_window_longer_ones_are_tried() -> None:
    rig = rig_of(answers_within_s=3 * WINDOW_S)
    run = tuner(rig)
    assert await run.run(apply=False) is not None
    assert run.notes == [
        "no answer within 4 s: trying runs of 8 s",
        "no answer within 8 s: trying runs of 16 s",
    ]
    assert not run.failed
    assert rig.now_s <= 300 + 2 * 16 + DEVICE.space.turn_s(rig.used[-2], DEVICE.start)


async def test_where_the_setting_in_use_never_answers_it_ends_with_one_sentence() -> None:
    rig = rig_of(silent=lambda _: True)
    run = tuner(rig)
    with pytest.raises(WorkerFailed, match="the current settings cannot be measured: no answer"):
        await run.run(apply=True)
    assert set(rig.measured) == {DEVICE.start}
    assert rig.now_s < BEGIN_SHARE * 300 + WINDOW_S
    assert (best_of(run.search), tried_of(run.search)) == (None, ())


# -- knobs that others turn -------------------------------------------------------------------------------------------


async def test_a_window_in_which_another_operator_turned_a_knob_does_not_count_and_it_is_put_back() -> None:
    found = DEVICE.start.with_value("workers", 3)
    rig = rig_of(fails={2: KnobsChanged(DEVICE.start, found)})
    run = tuner(rig)
    assert await run.run(apply=False) is not None
    assert run.notes == ["changed by another operator: workers to 3: run discarded, setting restored"]
    assert rig.measured[1] == rig.measured[2] and rig.used[1] == rig.used[2]
    assert run.windows == rig.windows - 1


async def test_however_often_knobs_are_turned_it_keeps_to_its_time() -> None:
    turned = KnobsChanged(DEVICE.start, DEVICE.start.with_value("workers", 3))
    rig = rig_of(fails=dict.fromkeys(range(3, 10_000), turned))
    run = tuner(rig, 30)
    await run.run(apply=False)
    assert rig.now_s <= 30 + WINDOW_S + 1 + DEVICE.space.turn_s(rig.used[-2], DEVICE.start)
    assert run.windows == 2


# -- where it is left -------------------------------------------------------------------------------------------------


async def test_a_best_that_breaks_the_slo_is_not_applied() -> None:
    device = replace(DEVICE, slo=Slo(itl_s=0.001))
    rig = rig_of(device)
    run = tuner(rig)
    best = await run.run(apply=True)
    assert best is not None and not best.keeps
    assert (run.applied, rig.at) == (False, device.start)


async def test_where_the_best_cannot_be_gone_to_it_is_put_back_and_that_is_reported() -> None:
    rig = rig_of()
    run = tuner(rig)

    def refuses(setting: Setting) -> bool:
        best = best_of(run.search)
        return run.now is None and best is not None and setting == best.setting

    rig.refuses = refuses
    assert await run.run(apply=True) is not None
    assert (run.applied, rig.at) == (False, DEVICE.start)
    assert "heads of 80 elements" in run.unapplied and not run.not_put_back


async def test_it_is_put_back_to_where_it_was_also_where_the_search_began_elsewhere() -> None:
    rig, before = rig_of(), DEVICE.start.with_value("threads", 5)
    run = Tuner(Search(DEVICE.space, DEVICE.slo, budget_s=60), rig, before=before, clock=rig.clock)
    await run.run(apply=False)
    assert rig.at == before


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


async def test_watchers_hear_of_every_trial_before_and_after() -> None:
    rig, seen = rig_of(), []
    run = Tuner(
        Search(DEVICE.space, DEVICE.slo, budget_s=30), rig, on_change=lambda: seen.append(run.now), clock=rig.clock
    )
    await run.run(apply=False)
    assert len(seen) == 2 * (run.windows + run.refused) + 1
    assert run.now is None
