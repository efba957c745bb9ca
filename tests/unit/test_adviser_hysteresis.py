"""The adviser over time: nothing flickers, is said twice, or is mixed up between engines and models."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.adviser import Adviser, Turn, thresholds
from console.adviser.evidence import OWN_LOADS
from engine.snapshot import RequestRow, Second, Snapshot, Totals
from tests.fakes import scenes
from tests.fakes.adviser import at, codes, healthy, hot, steady
from tests.fakes.scenes import GIB, NOW


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
    adviser.follow(advice)
    assert adviser.advice == ()
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
    assert codes(adviser.advice) == ["device_hot"]
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
    return snapshot.target_workers if knob == "num_workers" else snapshot.max_prompts


def own(source: str, count: int = 20) -> tuple[RequestRow, ...]:
    """Live requests of a load that this program sends."""
    return tuple(
        RequestRow(id=f"{source}{number}", source=source, state="queued", prompt_tokens=9) for number in range(count)
    )


@pytest.mark.parametrize("source", OWN_LOADS)
def test_of_a_load_of_this_programs_own_it_is_said_whose_it_is_and_nothing_is_proposed(source: str) -> None:
    adviser = Adviser()
    queue = {"queued": 20, "running": 16, "history": steady(queued=20)}
    (advice,) = adviser.listen(at(0, **queue, requests=own(source)))
    assert (advice.code, advice.action) == ("own_load", None)
    assert "20 of 36 live requests: nothing is proposed from them" in advice.sentence
    assert adviser.listen(at(0.5, **queue, requests=own(source, 18)))[0].sentence.count("18 of 36") == 1


def test_what_a_load_of_its_own_left_behind_is_not_advice_for_a_minute() -> None:
    adviser = Adviser()
    queue = {"queued": 20, "history": steady(queued=20)}
    adviser.listen(at(0, **queue, requests=own("sample")))
    assert adviser.listen(at(2, **queue)) == ()
    assert adviser.listen(at(thresholds.WINDOW_S - 1, **queue)) == ()
    assert codes(adviser.listen(at(thresholds.WINDOW_S + 1, **queue))) == ["queue"]


def test_a_proposal_of_real_load_goes_when_a_sample_load_begins() -> None:
    adviser = Adviser()
    queue = {"queued": 20, "history": steady(queued=20)}
    assert codes(adviser.listen(at(0, **queue))) == ["queue"]
    assert codes(adviser.listen(at(1, **queue, requests=own("sample")))) == ["own_load"]


def test_a_hot_device_is_spoken_of_whoever_sends_the_load() -> None:
    adviser = Adviser()
    for second in range(12):
        said = adviser.listen(scenes.changed(hot(second), requests=own("bench")))
    assert codes(said) == ["device_hot"]


def test_a_queue_is_said_with_the_numbers_of_the_snapshot_and_not_once_it_is_gone() -> None:
    adviser = Adviser()
    adviser.listen(at(0, queued=20, history=steady(queued=20)))
    (advice,) = adviser.listen(at(0.25, queued=10, history=steady(queued=20)))
    assert advice.sentence.startswith("10 requests wait")
    assert adviser.listen(at(0.5, queued=0, history=steady(queued=0))) == ()


def test_a_queue_about_its_threshold_does_not_flicker() -> None:
    adviser = Adviser()
    heard = set()
    for second in range(30):
        queued = 9 if second % 2 == 0 else 6  # of 16 slots
        heard.add(tuple(codes(adviser.listen(at(second, queued=queued, history=steady(queued=9))))))
    assert heard == {("queue",)}


def test_advice_is_checked_against_the_snapshot_of_that_moment() -> None:
    adviser = Adviser()
    (advice,) = adviser.listen(at(0, queued=20, history=steady(queued=20)))
    now = adviser.check(advice, at(0.2, queued=12, history=steady(queued=20)))
    assert now is not None and isinstance(now.action, Turn) and isinstance(advice.action, Turn)
    assert now.sentence.startswith("12 requests wait")
    assert 0 < now.action.by <= advice.action.by
    assert adviser.check(advice, at(0.4, queued=0, history=steady(queued=0))) is None
    assert adviser.check(advice, at(0.4, queued=20, history=steady(queued=20), requests=own("sample"))) is None
