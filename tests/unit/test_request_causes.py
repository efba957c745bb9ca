"""Each second of a request has one cause, the causes add up to its latency, and the right one is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.backends.base import TimeLost
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.config import EngineConfig
from engine.requests.causes import (
    OWN_WORK,
    WINDOW_S,
    Cause,
    CauseWindow,
    TimeLedger,
    WaitClock,
    Why,
    describe,
    describe_all,
    knobs_of,
)
from tests.fakes.scheduling import submit

KNOBS = {"max_prompts": 4, "step_tokens": 512}


def on_worker(ledger: TimeLedger, clock: WaitClock, lost: TimeLost | None = None, slow_s: float = 0.0) -> Why:
    """Dispatched after 1 s, its first token after 2 s, its end after 10 s. slow_s: that the worker lost meanwhile."""
    ledger.dispatched(1.0, 5.0)
    ledger.got_tokens(2.0)
    ledger.worker_reported(lost or TimeLost())
    ledger.left(10.0, 5.0 + slow_s)
    return ledger.why(10.0)


def prepared() -> Why:
    """It arrived 7 s before it was submitted, of which it waited 1 s for the model."""
    ledger = TimeLedger(knobs=KNOBS)
    ledger.seconds["load"] = 1.0
    ledger.prepared(-7.0, 0.0)
    ledger.enter(0.0, WaitClock(0.0))
    ledger.dispatched(0.0)
    ledger.got_tokens(1.0)
    ledger.left(3.0)
    return ledger.why(3.0)


def queued(reason: Cause) -> Why:
    """It waited from 0 to 8 for this."""
    clock, ledger = WaitClock(0.0), TimeLedger(knobs=KNOBS)
    clock.turn(0.0, reason)
    ledger.enter(0.0, clock)
    ledger.dispatched(8.0)
    ledger.got_tokens(9.0)
    ledger.left(10.0)
    return ledger.why(10.0)


def reported(name: str, seconds: float = 6.0) -> Why:
    """Its worker said so."""
    clock, ledger = WaitClock(0.0), TimeLedger(knobs=KNOBS)
    ledger.enter(0.0, clock)
    return on_worker(ledger, clock, TimeLost(seconds={name: seconds}, behind="other#3"))


def slow() -> Why:
    """Its worker was four times as slow as the others."""
    clock, ledger = WaitClock(0.0), TimeLedger(knobs=KNOBS)
    ledger.enter(0.0, clock)
    return on_worker(ledger, clock, slow_s=6.0)


def unread() -> Why:
    """It took 1 s, and its client read the end 9 s later."""
    clock, ledger = WaitClock(0.0), TimeLedger(knobs=KNOBS)
    ledger.enter(0.0, clock)
    ledger.dispatched(0.0)
    ledger.got_tokens(0.5)
    ledger.left(1.0)
    ledger.read_to_end(9.0)
    return ledger.why(1.0)


def worker_died() -> Why:
    """Its worker died after 1 s; another one had it after 6, and was where it had been after 8."""
    clock, ledger = WaitClock(0.0), TimeLedger(knobs=KNOBS)
    ledger.enter(0.0, clock)
    ledger.dispatched(0.0)
    ledger.got_tokens(0.5)
    ledger.left(1.0, lost=True)
    ledger.enter(1.0, clock)
    ledger.dispatched(6.0)
    ledger.got_tokens(8.0)
    ledger.left(10.0)
    return ledger.why(10.0)


def moved() -> Why:
    """It waited 8 s between two models."""
    ledger = TimeLedger(knobs=KNOBS)
    ledger.enter(0.0, WaitClock(0.0))
    ledger.enter(8.0, WaitClock(8.0))
    ledger.dispatched(8.0)
    ledger.left(10.0)
    return ledger.why(10.0)


@pytest.mark.parametrize(
    ("play", "cause"),
    [
        (prepared, "prepare"),
        (lambda: queued("slot"), "slot"),
        (lambda: queued("load"), "load"),
        (lambda: queued("swap"), "swap"),
        (moved, "swap"),
        (lambda: reported("pages"), "pages"),
        (lambda: reported("step_tokens"), "step_tokens"),
        (lambda: reported("prompts"), "prompts"),
        (lambda: reported("prefill_prompts"), "prompts"),
        (lambda: reported("preempted"), "preempted"),
        (lambda: reported("grammar"), "grammar"),
        (slow, "slow_worker"),
        (unread, "client"),
        (worker_died, "lost_worker"),
    ],
)
def test_the_first_cause_is_the_right_one_and_the_causes_add_up_to_the_latency(
    play: Callable[[], Why], cause: Cause
) -> None:
    why = play()
    assert next(each for each in why.causes if each not in OWN_WORK) == cause
    assert next(iter(why.causes)) == cause
    assert why.total_s == pytest.approx(10.0)
    assert sum(why.causes.values()) == pytest.approx(10.0)
    assert "(" in why.sentence
    assert ":" in why.sentence


def test_the_sentence_names_the_knob_and_its_value() -> None:
    assert queued("slot").sentence == "Waited 8.00 s (80%) for a slot: raise max prompts (now 4)."


def test_time_is_written_as_everywhere_else() -> None:
    assert describe({"slot": 130.0, "decode": 172.0}).sentence.startswith("Waited 2:10 (43%) for a slot")
    assert describe({"slot": 0.029, "decode": 0.1}).sentence.startswith("Waited 29 ms (22%) for a slot")


def test_what_took_hardly_any_of_the_time_gets_no_advice() -> None:
    assert describe({"decode": 1.0, "client": 0.0003}).sentence == ""


def test_an_itl_target_is_named_to_the_tenth_of_a_millisecond() -> None:
    for target_s, shown in ((0.0005, "0.5 ms"), (0.03, "30 ms"), (2.0, "2.00 s")):
        knobs = knobs_of(EngineConfig(slo_itl_s=target_s))
        assert f"slo_itl (now {shown})" in describe({"prompts": 1.0, "decode": 1.0}, knobs=knobs).sentence
    assert "step tokens (now 512)" in describe({"prompts": 1.0, "decode": 1.0}, knobs=knobs_of(EngineConfig())).sentence


def test_the_time_on_a_worker_is_kept_where_the_request_goes_back_to_a_queue() -> None:
    ledger = TimeLedger()
    ledger.enter(0.0, WaitClock(0.0))
    ledger.dispatched(1.0)
    ledger.got_tokens(2.0)
    ledger.enter(6.0, WaitClock(6.0))
    ledger.dispatched(7.0)
    ledger.left(9.0)
    assert ledger.why(9.0).causes == {"decode": 6.0, "slot": 2.0, "prefill": 1.0}


def test_the_wait_for_a_client_counts_once_however_often_it_is_known_better() -> None:
    ledger = TimeLedger()
    ledger.read_to_end(0.5)
    ledger.read_to_end(9.0)
    assert ledger.why(0.0).causes == {"client": 9.0}


def test_a_worker_whose_clock_runs_fast_never_makes_the_causes_exceed_the_latency() -> None:
    assert reported("pages", seconds=50.0).total_s == pytest.approx(10.0)


def test_a_request_that_only_did_its_own_work_gets_no_advice() -> None:
    ledger = TimeLedger()
    ledger.enter(0.0, WaitClock(0.0))
    ledger.dispatched(0.0)
    ledger.got_tokens(2.0)
    ledger.left(10.0)
    assert ledger.why(10.0) == Why(total_s=10.0, causes={"decode": 8.0, "prefill": 2.0})


def test_the_seconds_counted_while_a_request_lives_add_up_to_its_latency() -> None:
    clock, ledger, seen = WaitClock(0.0), TimeLedger(), dict[Cause, float]()

    def count(now: float) -> None:
        for cause, more in ledger.count(now).items():
            seen[cause] = seen.get(cause, 0.0) + more

    ledger.enter(0.0, clock)
    count(1.0)
    assert seen == {"slot": 1.0}
    ledger.dispatched(2.0)
    count(3.0)
    ledger.worker_reported(TimeLost(seconds={"prompts": 1.5}))
    ledger.got_tokens(4.0)
    count(5.0)
    ledger.left(10.0)
    count(10.0)
    ledger.read_to_end(0.5)
    count(10.5)
    assert seen == pytest.approx({cause: spent for cause, spent in ledger.seconds.items() if spent})
    assert sum(seen.values()) == pytest.approx(10.5)


def test_the_window_has_the_last_minute_of_all_requests_and_of_each_worker() -> None:
    window = CauseWindow()
    window.add({"load": 100.0})
    for _ in range(WINDOW_S + 1):
        window.tick(["w0", "w1"])
    window.add({"slot": 4.0})
    window.add({"decode": 1.0, "prompts": 3.0}, "w0")
    window.add({"decode": 2.0}, "w1")
    window.tick(["w0", "w1"])
    assert window.recent() == {"slot": 4.0, "decode": 3.0, "prompts": 3.0}
    assert window.recent("w0") == {"decode": 1.0, "prompts": 3.0}
    window.tick(["w1"])
    assert (window.recent("w0"), window.recent("w1")) == ({}, {"decode": 2.0})


def test_the_sentence_about_all_requests_names_the_largest_cause_and_its_knob() -> None:
    why = describe_all({"decode": 10.0, "slot": 30.0}, KNOBS)
    assert why.sentence == "Requests waited 30.0 s (75%) for a slot: raise max prompts (now 4)."
    assert next(iter(why.causes)) == "slot"


def test_no_knob_is_named_where_requests_hardly_waited() -> None:
    assert describe_all({"decode": 99.0, "slot": 1.0}, KNOBS).sentence == ""


class Steps:
    """A scheduler on a clock that the test turns."""

    def __init__(self, *, pages: int = 64, max_prompts: int = 8, step_tokens: int = 16) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(
            PagePool(pages, 4),
            max_prompts=max_prompts,
            step_tokens=step_tokens,
            max_model_len=200,
            clock=lambda: self.now,
        )

    def step(self, seconds: float = 1.0) -> str:
        """One step, and what limited it."""
        plan = self.scheduler.plan()
        self.now += seconds
        self.scheduler.commit(plan, [[7] for _ in plan.sampled_sequences])
        return plan.limit


def test_a_sequence_beyond_max_prompts_waits_for_a_slot() -> None:
    steps = Steps(max_prompts=1)
    submit(steps.scheduler, "a", 4)
    submit(steps.scheduler, "b", 4)
    assert [steps.step(), steps.step()] == ["max_prompts"] * 2
    assert steps.scheduler.times.lost("b").seconds == {"slot": 2.0}


def test_a_sequence_for_which_no_pages_are_free_waits_for_pages() -> None:
    steps = Steps(pages=4)
    submit(steps.scheduler, "a", 10)
    submit(steps.scheduler, "b", 10)
    assert steps.step() == "kv_pages"
    assert steps.scheduler.times.lost("b").seconds == {"pages": 1.0}


def test_a_sequence_waits_while_another_prompt_uses_up_the_step_tokens() -> None:
    steps = Steps(step_tokens=8)
    submit(steps.scheduler, "a", 16)
    submit(steps.scheduler, "b", 8)
    assert steps.step() == "step_tokens"
    lost = steps.scheduler.times.lost("b")
    assert lost.seconds == {"step_tokens": 1.0}
    assert lost.behind == "a"


def test_of_two_prompts_that_used_up_the_step_tokens_the_one_that_did_so_for_longer_is_named() -> None:
    steps = Steps(step_tokens=8)
    for name, tokens in (("a", 17), ("b", 33), ("c", 8)):
        submit(steps.scheduler, name, tokens)
    while not steps.scheduler.times.lost("c").seconds.get("step_tokens", 0.0) >= 6.0:
        steps.step()
    assert steps.scheduler.times.lost("c").behind == "b"


def test_an_answer_loses_what_a_step_with_the_prompt_of_another_took_longer_and_knows_whose_it_was() -> None:
    steps = Steps()
    submit(steps.scheduler, "a", 4)
    steps.step()
    steps.step(0.1)
    submit(steps.scheduler, "b", 12)
    steps.step(1.0)
    lost = steps.scheduler.times.lost("a")
    assert lost.seconds == {"prompts": pytest.approx(0.9)}
    assert lost.behind == "b"


def test_a_preempted_sequence_has_lost_all_until_it_is_where_it_was() -> None:
    steps = Steps(pages=6)
    first = submit(steps.scheduler, "a", 8)
    submit(steps.scheduler, "b", 8)
    while not steps.scheduler.counters.preemptions:
        steps.step()
    steps.step()
    steps.scheduler.remove(first)
    steps.step(5.0)
    assert steps.scheduler.times.lost("b").seconds["preempted"] >= 5.0


def test_what_a_removed_sequence_lost_is_read_once() -> None:
    steps = Steps(max_prompts=1)
    submit(steps.scheduler, "a", 4)
    second = submit(steps.scheduler, "b", 4)
    steps.step()
    steps.scheduler.remove(second)
    assert steps.scheduler.times.lost("b").seconds == {"slot": 1.0}
    assert steps.scheduler.times.lost("b") == TimeLost()
