"""The adviser: each rule speaks with its numbers where something is wrong, and is silent where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.adviser import Advice, Adviser, Look, Open, Turn, thresholds
from console.adviser.adviser import RULES
from console.adviser.evidence import Counts, Evidence
from engine.backends.base import BackendStats
from engine.config import DeviceShare
from engine.insight_values import Goodput, Insight
from engine.snapshot import Percentiles, RequestRow, Second, Snapshot, Totals
from tests.fakes import fleet_scenes, scenes
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


def steady(seconds: int = 120, **changes: Any) -> tuple[Second, ...]:
    """A history in which nothing changes."""
    values = {"running": 8, "kv_usage": 0.5, "output_tokens": 300} | changes
    return tuple(Second(at=NOW - seconds + index, **values) for index in range(seconds))  # type: ignore[arg-type]


def healthy(**changes: Any) -> Snapshot:
    """Two twins at work on two cards, half their places taken, nobody waiting."""
    share = DeviceShare(device="cuda:0", layers=32, weights_bytes=9 * GIB, kv_bytes=6 * GIB, working_bytes=GIB)
    values: dict[str, Any] = {
        "workers": tuple(scenes.worker(index, active=4, used=(share,)) for index in range(2)),
        "devices": (scenes.gpu(0), scenes.gpu(1)),
        "queued": 0,
        "running": 8,
        "history": steady(),
    }
    return scenes.busy(**(values | changes))


NOTHING = Counts()


def found(snapshot: Snapshot, recent: Counts = NOTHING) -> dict[str, Advice]:
    """What all rules find in one snapshot, by code."""
    evidence = Evidence(snapshot, recent)
    return {advice.code: advice for rule in RULES for advice in rule.find(evidence)}


def ended(count: int, **changes: Any) -> tuple[RequestRow, ...]:
    """Answers that ended."""
    values: dict[str, Any] = {
        "source": "api",
        "state": "finished",
        "prompt_tokens": 500,
        "output_tokens": 100,
        "max_tokens": 100,
        "finish": "length",
    }
    return tuple(RequestRow(id=f"r{changes.get('finish')}{index}", **(values | changes)) for index in range(count))


# -- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", [healthy, *SCENES], ids=lambda scene: scene.__name__)
def test_nothing_is_said_where_all_is_well(scene: Callable[[], Snapshot]) -> None:
    assert list(found(scene())) == []


# -- load -------------------------------------------------------------------------------------------------------------


def test_preemptions_ask_for_fewer_prompts() -> None:
    advice = found(healthy(max_prompts=16), Counts(preemptions=12))["preempted"]
    assert "12 times within a minute" in advice.sentence
    assert advice.action == Turn("max_prompts", -2)
    assert found(healthy(), Counts(preemptions=2)) == {}
    assert found(healthy(max_prompts=1), Counts(preemptions=12))["preempted"].action is None


def test_a_queue_with_room_in_the_cache_asks_for_more_prompts() -> None:
    advice = found(healthy(queued=20, kv_usage=0.5, history=steady(queued=20)))["queue"]
    assert "20 requests wait for 16 places that are all taken: KV pages are 50% full" in advice.sentence
    assert advice.action == Turn("max_prompts", 4)


@pytest.mark.parametrize(("waiting", "kv_usage", "more"), [(8, 0.5, 4), (9, 0.75, 1), (200, 0.05, 4), (200, 0.0, 4)])
def test_no_more_prompts_are_asked_for_than_wait_and_than_pages_hold(waiting: int, kv_usage: float, more: int) -> None:
    advice = found(healthy(queued=waiting, kv_usage=kv_usage, history=steady(queued=waiting)))["queue"]
    assert advice.action == Turn("max_prompts", more)


def test_a_growing_queue_says_so() -> None:
    history = tuple(msgspec.structs.replace(second, queued=index) for index, second in enumerate(steady(40)))
    assert "ever more" in found(healthy(queued=40, history=history))["queue"].sentence


def test_a_queue_with_a_full_cache_asks_for_a_worker_where_one_fits() -> None:
    roomy = (scenes.gpu(0), scenes.gpu(1), scenes.gpu(2, free_bytes=23 * GIB))
    crowded = healthy(queued=20, kv_usage=0.9, history=steady(queued=20, kv_usage=0.9), devices=roomy)
    assert found(crowded)["queue"].action == Turn("workers", 1)
    assert "GPU2 has 23.0 GiB free" in found(crowded)["queue"].sentence
    packed = scenes.changed(crowded, devices=roomy[:2])
    assert found(packed)["queue"].action is None
    assert "another device" in found(packed)["queue"].sentence


def test_a_queue_while_tokens_are_late_does_not_ask_for_more_prompts() -> None:
    late = Insight(goodput=Goodput(slo_itl_s=0.02))
    snapshot = healthy(queued=20, history=steady(queued=20), insight=late, itl=Percentiles(p95=0.031))
    assert found(snapshot)["queue"].action is None
    assert found(snapshot)["itl_over_slo"].action == Turn("max_prompts", -2)
    assert "31 ms, over the 20 ms" in found(snapshot)["itl_over_slo"].sentence


def test_memory_that_ran_out_before_does_not_ask_for_more_prompts() -> None:
    stats = BackendStats(pages_total=4096, pages_free=2000, prompts_limit=6)
    workers = tuple(scenes.worker(index, active=6, stats=stats) for index in range(2))
    advice = found(healthy(queued=20, kv_usage=0.5, history=steady(queued=20), workers=workers))["queue"]
    assert "12 places" in advice.sentence
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
    assert "GPU2 has 23.0 GiB free, and another worker takes 16.0 GiB, while 94%" in advice.sentence
    assert advice.action == Turn("workers", 1)
    assert found(healthy(devices=devices)) == {}


def test_full_pages_beside_free_memory_ask_for_a_larger_cache() -> None:
    devices = (scenes.gpu(0), scenes.gpu(1, free_bytes=7 * GIB))
    advice = found(healthy(devices=devices, history=steady(running=15, kv_usage=0.97)))["memory_unused"]
    assert "KV pages are 97% full while GPU1 has 7.0 GiB free" in advice.sentence
    assert advice.action == Open("models")


# -- answers ----------------------------------------------------------------------------------------------------------


def test_answers_cut_off_by_the_context_are_told_from_those_cut_by_max_tokens() -> None:
    whole = ended(10, finish="stop", output_tokens=40)
    cut = ended(3, prompt_tokens=8000, output_tokens=192, max_tokens=192)
    advice = found(healthy(requests=(*whole, *cut)))["truncated"]
    assert "3 of the last 13 answers were cut off by the context of 8,192 tokens, not by" in advice.sentence
    assert advice.action == Open("models")
    assert found(healthy(requests=(*whole, *ended(20)))) == {}
    assert found(healthy(requests=(*whole, *cut[:1]))) == {}


def test_answers_cut_off_for_want_of_pages_say_so() -> None:
    advice = found(healthy(requests=ended(4, max_tokens=4000)))["truncated"]
    assert "KV pages that ran out" in advice.sentence


def test_drafts_that_do_not_hold_are_spoken_of() -> None:
    advice = found(healthy(), Counts(draft_tokens=8000, draft_accepted=1600))["drafts_rejected"]
    assert "Only 20% of 8,000 tokens" in advice.sentence
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


# -- machines ---------------------------------------------------------------------------------------------------------


def test_a_device_at_its_limits_is_named() -> None:
    devices = (scenes.gpu(0, temperature_c=91.0), scenes.gpu(1, power_w=349.0))
    heard = found(healthy(devices=devices))
    assert "GPU0 is at 91 °C" in heard["device_hot"].sentence
    assert "GPU1 draws 349 of the 350 W" in heard["power_limit"].sentence
    assert found(healthy(devices=(scenes.gpu(0, power_w=349.0, utilisation=0.1),))) == {}


def test_a_worker_slower_than_its_twins_is_named() -> None:
    workers = tuple(scenes.worker(index, active=6, tokens_per_s=rate) for index, rate in enumerate((300, 310, 120)))
    advice = found(healthy(workers=workers))["slow_worker"]
    assert "w2 makes 20 tok/s for each request, its twins 51" in advice.sentence
    assert advice.action == Look("w2")


def test_a_worker_with_more_requests_or_on_another_kind_of_device_is_rightly_slower() -> None:
    more = (scenes.worker(0, active=2, tokens_per_s=200.0), scenes.worker(1, active=8, tokens_per_s=300.0))
    assert found(healthy(workers=more)) == {}
    other = (scenes.worker(0, active=6), scenes.worker(1, active=6, tokens_per_s=20.0, devices=("cpu",)))
    assert found(healthy(workers=other)) == {}


# -- time -------------------------------------------------------------------------------------------------------------


def at(second: float, **changes: Any) -> Snapshot:
    """A healthy snapshot so many seconds after the first."""
    return healthy(at=NOW + second, uptime_s=8120.0 + second, **changes)


def hot(second: float) -> Snapshot:
    """A card that is too hot."""
    return at(second, devices=(scenes.gpu(0, temperature_c=90.0),))


def codes(said: tuple[Advice, ...]) -> list[str]:
    """What was said."""
    return [advice.code for advice in said]


def test_counters_are_looked_at_over_a_minute() -> None:
    adviser = Adviser()
    assert adviser.listen(at(0, totals=Totals(preemptions=500))) == ()
    assert codes(adviser.listen(at(10, totals=Totals(preemptions=507)))) == ["preempted"]
    for second in range(11, 120):
        said = adviser.listen(at(second, totals=Totals(preemptions=507)))
    assert said == ()


def test_counters_of_an_engine_that_started_anew_are_not_mixed_up() -> None:
    adviser = Adviser()
    adviser.listen(at(0, totals=Totals(preemptions=500)))
    assert adviser.listen(at(1, totals=Totals(preemptions=2))) == ()
    assert codes(adviser.listen(at(2, totals=Totals(preemptions=6)))) == ["preempted"]


def test_a_reading_of_the_moment_must_hold_before_it_is_spoken_of() -> None:
    adviser = Adviser()
    heard = [codes(adviser.listen(hot(second))) for second in range(int(thresholds.SETTLE_S) + 1)]
    assert heard[:-1] == [[]] * int(thresholds.SETTLE_S)
    assert heard[-1] == ["device_hot"]


def test_a_short_peak_is_never_spoken_of() -> None:
    adviser = Adviser()
    for second in range(60):
        assert adviser.listen(hot(second) if second % 8 < 3 else at(second)) == ()


def test_what_was_said_stays_a_while_and_then_goes() -> None:
    adviser = Adviser()
    for second in range(12):
        adviser.listen(hot(second))
    assert codes(adviser.listen(at(12 + thresholds.LINGER_S - 2))) == ["device_hot"]
    assert adviser.listen(at(12 + thresholds.LINGER_S + 2)) == ()


def test_a_value_about_its_threshold_does_not_flicker() -> None:
    adviser = Adviser()
    for second in range(15):
        adviser.listen(hot(second))
    heard = {tuple(codes(adviser.listen(hot(second) if second % 3 else at(second)))) for second in range(15, 90)}
    assert heard == {("device_hot",)}


def test_advice_taken_keeps_quiet_until_its_effect_can_be_seen() -> None:
    adviser = Adviser()
    queue = {"queued": 20, "history": steady(queued=20)}
    (advice,) = adviser.listen(at(0, **queue))
    adviser.taken(advice)
    assert adviser.said == ()
    assert adviser.listen(at(thresholds.HUSH_S - 1, **queue)) == ()
    assert codes(adviser.listen(at(thresholds.HUSH_S + 1, **queue))) == ["queue"]


def test_advice_dismissed_is_not_heard_again_but_the_same_of_another_device_is() -> None:
    adviser = Adviser()
    for second in range(12):
        said = adviser.listen(hot(second))
    adviser.dismiss(said[0])
    both = (scenes.gpu(0, temperature_c=90.0), scenes.gpu(1, temperature_c=90.0))
    for second in range(12, 400):
        said = adviser.listen(at(second, devices=both))
    assert [advice.subject for advice in said] == ["cuda:1"]


def test_of_two_that_turn_the_same_knob_the_more_urgent_is_said() -> None:
    adviser = Adviser()
    adviser.listen(at(0))
    said = adviser.listen(at(1, queued=20, history=steady(queued=20), totals=Totals(preemptions=9)))
    assert codes(said) == ["preempted"]


def test_time_that_goes_back_begins_anew() -> None:
    adviser = Adviser()
    for second in range(100, 112):
        adviser.listen(hot(second))
    assert codes(adviser.said) == ["device_hot"]
    assert adviser.listen(hot(3)) == ()


def test_what_was_found_of_one_model_is_not_said_of_another() -> None:
    adviser = Adviser()
    queue = {"queued": 20, "history": steady(queued=20)}
    assert codes(adviser.listen(at(0, **queue))) == ["queue"]
    assert adviser.listen(at(0.5, status=scenes.ready_status("another"))) == ()


def test_another_engine_is_listened_to_with_fresh_ears() -> None:
    adviser = Adviser()
    (advice,) = adviser.listen(at(0, queued=20, history=steady(queued=20), totals=Totals(preemptions=1)))
    adviser.dismiss(advice)
    other = {"uptime_s": 60.0, "queued": 20, "history": steady(queued=20), "totals": Totals(preemptions=900)}
    assert codes(adviser.listen(healthy(at=NOW + 1, **other))) == ["queue"]


def snapshots() -> st.SearchStrategy[Snapshot]:
    """Anything that an engine may report."""
    share = st.floats(0.0, 1.0)
    seconds = st.builds(
        Second,
        at=st.just(NOW),
        running=st.integers(0, 64),
        queued=st.integers(0, 64),
        kv_usage=share,
    )
    worker = st.builds(
        scenes.worker,
        st.integers(0, 3),
        active=st.integers(0, 16),
        max_prompts=st.integers(1, 16),
        tokens_per_s=st.floats(0.0, 5000.0),
        state=st.sampled_from(["ready", "loading", "failed", "draining"]),
    )
    device = st.builds(
        scenes.gpu,
        st.integers(0, 3),
        free_bytes=st.integers(0, 24 * GIB),
        utilisation=st.none() | share,
        temperature_c=st.none() | st.floats(0.0, 120.0),
        power_w=st.none() | st.floats(0.0, 800.0),
        power_limit_w=st.none() | st.floats(0.0, 800.0),
    )
    return st.builds(
        scenes.busy,
        at=st.floats(NOW, NOW + 600.0),
        max_prompts=st.integers(1, 64),
        queued=st.integers(0, 100),
        kv_usage=share,
        prefix_hit_rate=st.none() | share,
        workers=st.lists(worker, max_size=4).map(tuple),
        devices=st.lists(device, max_size=4).map(tuple),
        history=st.lists(seconds, max_size=90).map(tuple),
        totals=st.builds(Totals, preemptions=st.integers(0, 99), draft_tokens=st.integers(0, 9999)),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(snapshots(), max_size=8))
def test_whatever_is_reported_each_thing_is_said_once_with_its_numbers(reported: list[Snapshot]) -> None:
    adviser = Adviser()
    for snapshot in reported:
        said = adviser.listen(snapshot)
        assert len({advice.key for advice in said}) == len(said)
        turned = [advice.action.knob for advice in said if isinstance(advice.action, Turn)]
        assert len(set(turned)) == len(turned)
        assert all(any(char.isdigit() for char in advice.sentence) for advice in said)
        for advice in said:
            if isinstance(advice.action, Turn):
                assert _knob(snapshot, advice.action.knob) + advice.action.by >= 1


def _knob(snapshot: Snapshot, knob: str) -> int:
    return snapshot.target_workers if knob == "workers" else snapshot.max_prompts
