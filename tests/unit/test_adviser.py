"""What the adviser says of an engine: silence where all is well, else what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from console.adviser import Look, Open, Turn
from console.adviser.evidence import Counts
from engine.backends.base import BackendStats, ItlReport
from engine.config import DeviceShare
from engine.snapshot import Goodput, Insight, Percentiles, Second, Snapshot
from tests.fakes import fleet_scenes, scenes
from tests.fakes.adviser import ended, found, healthy, steady
from tests.fakes.scenes import GIB, NOW

SCENES: tuple[Callable[[], Snapshot], ...] = (
    scenes.busy,
    scenes.cpu_idle,
    scenes.empty,
    scenes.loading,
    scenes.failed,
    scenes.eight_gpus,
    fleet_scenes.simulated,
    fleet_scenes.two_models,
    fleet_scenes.one_idle,
    fleet_scenes.two_nodes,
)


@pytest.mark.parametrize("scene", [healthy, *SCENES], ids=lambda scene: scene.__name__)
def test_nothing_is_said_where_all_is_well(scene: Callable[[], Snapshot]) -> None:
    assert list(found(scene())) == []


def test_preemptions_ask_for_fewer_prompts() -> None:
    advice = found(healthy(max_prompts=16), Counts(preemptions=12))["preempted"]
    assert "12 times in the last minute" in advice.sentence
    assert advice.action == Turn("max_prompts", -2)
    assert found(healthy(), Counts(preemptions=2)) == {}
    assert found(healthy(max_prompts=1), Counts(preemptions=12))["preempted"].action is None


def test_a_queue_with_room_in_the_cache_asks_for_more_prompts() -> None:
    advice = found(healthy(queued=20, kv_usage=0.5, history=steady(queued=20)))["queue"]
    assert "20 requests wait, all 16 slots are in use: KV pages are 50% full" in advice.sentence
    assert "14 at a time fit" in advice.sentence
    assert advice.action == Turn("max_prompts", 6)


def test_a_queue_of_six_at_one_percent_of_kv_pages_proposes_ten_at_a_time() -> None:
    workers = healthy().workers[:1]
    advice = found(healthy(queued=6, kv_usage=0.01, history=steady(queued=6), workers=workers, max_prompts=4))["queue"]
    assert "10 at a time fit" in advice.sentence
    assert advice.action == Turn("max_prompts", 6)


@pytest.mark.parametrize(("waiting", "kv_usage", "more"), [(8, 0.5, 4), (9, 0.75, 1), (200, 0.05, 24), (200, 0.0, 24)])
def test_no_more_prompts_are_asked_for_than_wait_and_than_pages_hold(waiting: int, kv_usage: float, more: int) -> None:
    advice = found(healthy(queued=waiting, kv_usage=kv_usage, history=steady(queued=waiting)))["queue"]
    assert advice.action == Turn("max_prompts", more)


def test_a_growing_queue_says_so() -> None:
    history = tuple(msgspec.structs.replace(second, queued=index) for index, second in enumerate(steady(40)))
    assert "the queue grows" in found(healthy(queued=40, history=history))["queue"].sentence


def test_a_queue_with_a_full_cache_asks_for_a_worker_where_one_fits() -> None:
    roomy = (scenes.gpu(0), scenes.gpu(1), scenes.gpu(2, free_bytes=23 * GIB))
    crowded = healthy(queued=20, kv_usage=0.9, history=steady(queued=20, kv_usage=0.9), devices=roomy)
    assert found(crowded)["queue"].action == Turn("num_workers", 1)
    assert "GPU2 has 23.0 GiB free" in found(crowded)["queue"].sentence
    packed = scenes.changed(crowded, devices=roomy[:2])
    assert found(packed)["queue"].action is None
    assert "another device" in found(packed)["queue"].sentence


def test_a_queue_while_tokens_are_late_does_not_ask_for_more_prompts() -> None:
    late = Insight(goodput=Goodput(slo_itl_s=0.02))
    snapshot = healthy(queued=20, history=steady(queued=20), insight=late, itl=Percentiles(p95=0.031))
    assert found(snapshot)["queue"].action is None
    assert found(snapshot)["itl_over_slo"].action == Turn("max_prompts", -2)
    assert "31 ms, above the SLO of 20 ms" in found(snapshot)["itl_over_slo"].sentence


def test_an_itl_that_answers_alone_miss_says_how_long_their_steps_take() -> None:
    late = Insight(goodput=Goodput(slo_itl_s=0.02))
    for floor_s, said in ((0.025, True), (0.015, False)):
        stats = BackendStats(itl=ItlReport(target_s=0.02, floor_s=floor_s, answers=12))
        snapshot = healthy(
            insight=late, itl=Percentiles(p95=0.031), workers=(scenes.worker(0, active=12, stats=stats),)
        )
        sentence = found(snapshot)["itl_over_slo"].sentence
        assert ("steps of 12 answers take 25 ms without any prompt" in sentence) == said


def test_no_knob_is_offered_where_a_single_answer_misses_the_target() -> None:
    stats = BackendStats(itl=ItlReport(target_s=0.02, floor_s=0.08, answers=1))
    snapshot = healthy(
        insight=Insight(goodput=Goodput(slo_itl_s=0.02)), workers=(scenes.worker(0, active=1, stats=stats),)
    )
    advice = found(snapshot)["itl_over_slo"]
    assert "teps of 1 answer take 80 ms without any prompt" in advice.sentence
    assert "fewer bits" in advice.sentence
    assert advice.action is None


def test_a_target_that_answers_alone_miss_is_reported_while_most_tokens_are_in_time_and_not_when_idle() -> None:
    promised = Insight(goodput=Goodput(slo_itl_s=0.02))
    stats = BackendStats(itl=ItlReport(target_s=0.02, floor_s=0.025, answers=12))
    for active in (12, 0):
        workers = (scenes.worker(0, active=active, stats=stats),)
        advice = found(healthy(insight=promised, itl=Percentiles(p95=0.019), workers=workers)).get("itl_over_slo")
        assert (advice is not None) == bool(active)
        if advice is not None:
            assert "Steps of 12 answers take 25 ms without any prompt, above the ITL target of 20 ms" in advice.sentence
            assert advice.action == Turn("max_prompts", -2)


def test_memory_that_ran_out_before_does_not_ask_for_more_prompts() -> None:
    stats = BackendStats(pages_total=4096, pages_free=2000, prompts_limit=6)
    workers = tuple(scenes.worker(index, active=6, stats=stats) for index in range(2))
    advice = found(healthy(queued=20, kv_usage=0.5, history=steady(queued=20), workers=workers))["queue"]
    assert "12 slots" in advice.sentence
    assert advice.action is None


@pytest.mark.parametrize(
    "changes",
    [
        {"queued": 20, "history": steady(queued=20)[:10]},
        {"queued": 20, "history": (*steady(queued=20), Second(at=NOW, queued=0))},
        {"queued": 0, "history": steady(queued=20)},
        {"queued": 3, "history": steady(queued=3)},
        {"queued": 20, "history": steady(queued=20), "workers": ()},
    ],
    ids=["just begun", "it was empty", "it is empty", "short", "no worker"],
)
def test_a_queue_that_is_no_trouble_is_not_spoken_of(changes: dict[str, Any]) -> None:
    assert found(healthy(**changes)) == {}


def test_free_memory_is_spoken_of_only_under_load() -> None:
    devices = (scenes.gpu(0), scenes.gpu(1), scenes.gpu(2, free_bytes=23 * GIB))
    advice = found(healthy(devices=devices, history=steady(running=15)))["memory_unused"]
    assert "GPU2 has 23.0 GiB free, and another worker needs 16.0 GiB, while 94%" in advice.sentence
    assert advice.action == Turn("num_workers", 1)
    assert found(healthy(devices=devices)) == {}


@pytest.mark.parametrize(("busy", "said"), [(0.4, True), (0.95, False)])
def test_no_worker_is_proposed_on_a_simulated_device_whose_processor_is_busy(busy: float, said: bool) -> None:
    share = DeviceShare(device="sim:0", layers=32, weights_bytes=GIB, kv_bytes=GIB)
    one = scenes.worker(0, active=8, devices=("sim:0",), used=(share,))
    devices = (fleet_scenes.sim(0), fleet_scenes.sim(1), scenes.cpu(utilisation=0.1))
    history = steady(running=15, queued=20, kv_usage=0.9, device_utilisation=(0.9, 0.0, busy))
    advice = found(healthy(workers=(one,), devices=devices, queued=20, kv_usage=0.9, history=history))
    assert (advice["queue"].action is not None) is said
    assert ("memory_unused" in advice) is said


def test_full_pages_beside_free_memory_ask_for_a_larger_cache() -> None:
    devices = (scenes.gpu(0), scenes.gpu(1, free_bytes=7 * GIB))
    advice = found(healthy(devices=devices, history=steady(running=15, kv_usage=0.97)))["memory_unused"]
    assert "KV pages are 97% full while GPU1 has 7.0 GiB free" in advice.sentence
    assert advice.action == Open("models")


def test_answers_cut_off_by_the_context_are_told_from_those_cut_by_max_tokens() -> None:
    whole = ended(10, finish="stop", output_tokens=40)
    cut = ended(3, prompt_tokens=8000, output_tokens=192, max_tokens=192)
    advice = found(healthy(requests=(*whole, *cut)))["truncated"]
    assert "3 of the last 13 answers were cut off by the context of 8,192 tokens, before" in advice.sentence
    assert advice.action == Open("models")
    assert found(healthy(requests=(*whole, *ended(20)))) == {}
    assert found(healthy(requests=(*whole, *cut[:1]))) == {}


def test_answers_cut_off_for_want_of_pages_say_so() -> None:
    advice = found(healthy(requests=ended(4, max_tokens=4000)))["truncated"]
    assert "KV pages that ran out" in advice.sentence


def test_drafts_that_do_not_hold_are_spoken_of() -> None:
    advice = found(healthy(), Counts(draft_tokens=8000, draft_accepted=1600))["drafts_rejected"]
    assert "Only 20% of 8,000 draft tokens" in advice.sentence
    assert found(healthy(), Counts(draft_tokens=8000, draft_accepted=6000)) == {}
    assert found(healthy(), Counts(draft_tokens=90, draft_accepted=0)) == {}


def test_a_context_that_nobody_needs_is_spoken_of() -> None:
    seen = Insight(longest_context_tokens=1210, finished={"stop": 4000})
    advice = found(healthy(insight=seen, history=steady(kv_usage=0.18)))["context_unused"]
    assert "1,210 of the 8,192 tokens" in advice.sentence
    assert "18%" in advice.sentence
    assert found(healthy(insight=seen, history=steady(kv_usage=0.7))) == {}
    assert found(healthy(insight=Insight(longest_context_tokens=1210, finished={"stop": 9}))) == {}
    assert found(healthy(insight=Insight(longest_context_tokens=6000, finished={"stop": 4000}))) == {}


def test_a_prefix_cache_without_hits_is_spoken_of() -> None:
    stats = BackendStats(pages_total=4096, pages_free=2000, prefix_query_tokens=500_000, prefix_hit_tokens=2000)
    workers = tuple(scenes.worker(index, stats=stats) for index in range(2))
    advice = found(healthy(workers=workers, prefix_hit_rate=0.004))["prefix_useless"]
    assert "0.4% of 1.0M prompt tokens" in advice.sentence
    assert found(healthy(workers=workers, prefix_hit_rate=0.3)) == {}
    assert found(healthy(prefix_hit_rate=0.0)) == {}


def test_a_device_at_its_limits_is_named() -> None:
    devices = (scenes.gpu(0, temperature_c=91.0), scenes.gpu(1, power_w=349.0))
    heard = found(healthy(devices=devices))
    assert "GPU0 is at 91 °C" in heard["device_hot"].sentence
    assert "GPU1 draws 349 of max 350 W" in heard["power_limit"].sentence
    assert found(healthy(devices=(scenes.gpu(0, power_w=349.0, utilisation=0.1),))) == {}


def test_a_worker_that_the_engine_finds_slower_than_its_peers_is_named() -> None:
    workers = (scenes.worker(0), scenes.worker(1), scenes.worker(2, slowness=2.6))
    advice = found(healthy(workers=workers))["slow_worker"]
    assert "w2: its steps take 2.6 times as long as its peers'" in advice.sentence
    assert advice.action == Look("w2")
    assert found(healthy(workers=(scenes.worker(0), scenes.worker(1, tokens_per_s=20.0)))) == {}
