"""Which waiting request goes to which worker: order, places, suspects, prefixes, losses."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.base import BackendStats, PrefixChanges, SequenceStats
from engine.backends.common.page_keys import page_keys
from engine.requests.request import Request
from engine.scheduling.queue import MAX_OVERTAKERS, Dispatcher, Slot
from engine.worker_process.protocol import RequestOutput, StepBatch
from tests.fakes.requests import make_request

PAGE = 16
SALT = b"salt"
PREFIX = list(range(1000, 1000 + 64 * PAGE))


def slots(*active: int, max_prompts: int = 4) -> list[Slot]:
    return [Slot(worker=f"w{i}", active=number, max_prompts=max_prompts) for i, number in enumerate(active)]


def queued(*requests: Request) -> Dispatcher:
    dispatcher = Dispatcher(ageing_s=30.0, page_tokens=PAGE, salt=SALT)
    for each in requests:
        dispatcher.add(each)
    return dispatcher


def assigned(dispatcher: Dispatcher, *active: int, now: float = 0.0, max_prompts: int = 4) -> list[tuple[Request, str]]:
    return dispatcher.assign(slots(*active, max_prompts=max_prompts), now)


def holding(worker: str, prompt: list[int], *others: str) -> Dispatcher:
    """A dispatcher that knows all these workers, of which one reported the pages of `prompt`."""
    dispatcher = queued()
    for each in (worker, *others):
        first = make_request()
        dispatcher.add(first)
        dispatcher.assign([Slot(worker=each, active=0, max_prompts=1)], 0.0)
        dispatcher.remove(first)
    report(dispatcher, worker, added=page_keys(SALT, prompt, PAGE))
    return dispatcher


def report(
    dispatcher: Dispatcher, worker: str, *, added: list[bytes] | None = None, dropped: list[bytes] | None = None
) -> None:
    changes = PrefixChanges(added=tuple(added or ()), dropped=tuple(dropped or ()))
    dispatcher.router.stepped(worker, StepBatch(outputs=[], stats=BackendStats(), prefix=changes))


# --- order ---------------------------------------------------------------------------------------------------------


def test_equal_requests_go_in_the_order_of_their_arrival() -> None:
    first, second, third = (make_request() for _ in range(3))
    assert [each for each, _ in assigned(queued(second, third, first), 0)] == [first, second, third]


def test_a_higher_priority_goes_first() -> None:
    low, high = make_request(priority=0), make_request(priority=5)
    assert [each for each, _ in assigned(queued(low, high), 0)] == [high, low]


def test_who_waited_long_goes_before_a_higher_priority_that_came_later() -> None:
    old, high = make_request(created=0.0), make_request(created=31.0, priority=1)
    assert [each for each, _ in assigned(queued(high, old), 0)] == [old, high]


def test_a_request_that_lost_its_worker_goes_to_the_head_of_the_queue() -> None:
    lost, waiting = make_request(), make_request(priority=9)
    dispatcher = queued(lost)
    assigned(dispatcher, 0)
    dispatcher.add(waiting)
    dispatcher.router.forget("w0")
    dispatcher.add(lost)
    assert [each for each, _ in assigned(dispatcher, 0)] == [lost, waiting]


def test_a_request_that_had_a_worker_under_another_dispatcher_goes_to_the_head_too() -> None:
    moved, waiting = make_request(dispatched=1.0), make_request(priority=9)
    assert [each for each, _ in assigned(queued(waiting, moved), 0)] == [moved, waiting]


def test_a_request_whose_time_is_up_is_not_sent_to_a_worker() -> None:
    late, kept = make_request(timeout_s=5.0), make_request(timeout_s=5.1)
    dispatcher = queued(late, kept)
    assert assigned(dispatcher, 0, now=5.0) == [(kept, "w0")]
    assert len(dispatcher) == 0


def test_everything_can_be_taken_out_in_order() -> None:
    requests = [make_request(priority=n % 3, client="ab"[n % 2]) for n in range(20)]
    lost, suspect = make_request(dispatched=1.0), make_request(deaths=2)
    everything = [*requests, lost, suspect]
    order = [each for each, _ in assigned(queued(*everything), *[0] * 22, max_prompts=1)]
    dispatcher = queued(*everything)
    assert dispatcher.take_all() == order
    assert (len(dispatcher), dispatcher.queued_by_client(), assigned(dispatcher, 0)) == (0, {}, [])


def test_a_queue_can_be_moved_to_another_dispatcher() -> None:
    requests = [make_request(priority=n % 3) for n in range(9)]
    order = [each for each, _ in assigned(queued(*requests), 0, max_prompts=9)]
    assert [each for each, _ in assigned(queued(*queued(*requests).take_all()), 0, max_prompts=9)] == order


def test_what_waits_is_counted_by_client() -> None:
    dispatcher = queued(make_request(client="a"), make_request(client="a", deaths=2), make_request())
    assert dispatcher.queued_by_client() == {"a": 2, "": 1}


def test_a_client_with_a_thousand_requests_does_not_lock_out_one_with_one() -> None:
    crowd = [make_request(client="crowd") for _ in range(1000)]
    dispatcher = queued(*crowd)
    places = slots(0)
    dispatcher.assign(places, 0.0)
    single = make_request(client="single", created=1.0)
    dispatcher.add(single)
    dispatcher.remove(crowd[0])
    places[0].active -= 1
    assert dispatcher.assign(places, 1.0) == [(single, "w0")]


# --- places --------------------------------------------------------------------------------------------------------


def test_no_worker_gets_more_than_max_prompts_and_the_rest_stays_queued() -> None:
    dispatcher = queued(*(make_request() for _ in range(10)))
    assert sorted(worker for _, worker in assigned(dispatcher, 3, 1)) == ["w0", "w1", "w1", "w1"]
    assert len(dispatcher) == 6


def test_a_worker_with_more_than_it_may_have_gets_nothing() -> None:
    assert assigned(queued(make_request()), 7) == []


def test_requests_spread_to_the_least_loaded_worker() -> None:
    assert [worker for _, worker in assigned(queued(make_request()), 2, 1, 3)] == ["w1"]


def test_a_removed_request_is_not_assigned() -> None:
    gone, kept = make_request(), make_request()
    dispatcher = queued(gone, kept)
    dispatcher.remove(gone)
    assert len(dispatcher) == 1
    assert [each for each, _ in assigned(dispatcher, 0)] == [kept]


def test_a_removed_request_may_come_back() -> None:
    request = make_request()
    dispatcher = queued(request)
    for _ in range(100):
        dispatcher.remove(request)
        dispatcher.add(request)
    assert assigned(dispatcher, 0) == [(request, "w0")]
    assert assigned(dispatcher, 0) == []


def test_a_worker_with_prompts_to_compute_is_spared() -> None:
    dispatcher = queued(make_request(PREFIX))
    [(_, busy)] = assigned(dispatcher, 0, 0)
    dispatcher.add(make_request([7] * 100))
    [(_, other)] = assigned(dispatcher, 1, 1)
    assert other != busy


def test_prompts_that_are_computed_weigh_no_more() -> None:
    long = make_request(PREFIX)
    dispatcher = queued(long)
    [(_, worker)] = assigned(dispatcher, 0, 0)
    progress = SequenceStats(request_id=long.wire_id, computed_tokens=len(PREFIX) - 10, known_tokens=len(PREFIX))
    dispatcher.router.stepped(worker, StepBatch(outputs=[], stats=BackendStats(sequences=(progress,))))
    dispatcher.add(make_request([7] * 100))
    loads = (0, 1) if worker == "w0" else (1, 0)
    assert [each for _, each in assigned(dispatcher, *loads)] == [worker]


# --- work ----------------------------------------------------------------------------------------------------------


def test_the_next_place_goes_to_the_client_whose_requests_took_less_work() -> None:
    """One long prompt counts for more than several short ones; cached tokens do not count."""
    dispatcher = queued(make_request([7] * 3000, client="long"))
    assigned(dispatcher, 0)
    shorts, follower = [make_request(client="short") for _ in range(9)], make_request(client="long")
    for each in (follower, *shorts):
        dispatcher.add(each)
    assert [each for each, _ in assigned(dispatcher, 0, max_prompts=10)] == [*shorts, follower]


def test_an_answer_that_gets_longer_than_expected_counts_for_more() -> None:
    one, other = make_request(client="one", max_tokens=20), make_request(client="other", max_tokens=20)
    dispatcher = queued(one, other)
    assigned(dispatcher, 0)
    output = RequestOutput(request_id=one.wire_id, token_ids=[1] * 30)
    dispatcher.stepped("w0", StepBatch(outputs=[output], stats=BackendStats()))
    ones, others = make_request(client="one"), make_request(client="other")
    for each in (ones, others):
        dispatcher.add(each)
    assert dispatcher.in_order() == [others, ones]


def test_work_that_was_cancelled_or_lost_with_a_worker_does_not_count() -> None:
    for worker_dies in (False, True):
        cancelled = make_request([7] * 3000, client="a")
        dispatcher = queued(cancelled, make_request([8] * 300, client="b"))
        for name in ("b", "a"):
            dispatcher.add(make_request(client=name))
        assigned(dispatcher, 0, max_prompts=2)
        assert [each.client for each in dispatcher.in_order()] == ["b", "a"]
        if worker_dies:
            dispatcher.router.forget("w0")
        dispatcher.remove(cancelled)
        assert [each.client for each in dispatcher.in_order()] == ["a", "b"]


def test_the_last_places_are_not_for_a_client_whose_prompts_keep_the_worker_busy() -> None:
    longs = [make_request([n] * 3000, client="long") for n in range(6)]
    dispatcher = queued(*longs)
    places = slots(0, max_prompts=8)
    assert [each for each, _ in dispatcher.assign(places, 0.0)] == longs
    more, short = make_request([9] * 3000, client="long"), make_request(client="short")
    dispatcher.add(more)
    assert dispatcher.assign(places, 0.0) == []
    assert dispatcher.holds_back
    dispatcher.add(short)
    assert dispatcher.assign(places, 0.0) == [(short, "w0")]
    progress = [SequenceStats(request_id=each.wire_id, computed_tokens=2900, known_tokens=3000) for each in longs]
    dispatcher.stepped("w0", StepBatch(outputs=[], stats=BackendStats(sequences=tuple(progress))))
    assert dispatcher.assign(places, 0.0) == [(more, "w0")]
    assert not dispatcher.holds_back


def test_a_request_that_lost_its_worker_may_have_the_last_place() -> None:
    longs = [make_request([n] * 3000, client="long") for n in range(4)]
    dispatcher = queued(*longs[:3])
    places = slots(0)
    dispatcher.assign(places, 0.0)
    longs[3].dispatched = 1.0
    dispatcher.add(longs[3])
    assert dispatcher.assign(places, 0.0) == [(longs[3], "w0")]


# --- suspects ------------------------------------------------------------------------------------------------------


def test_a_suspect_waits_for_an_empty_worker_and_fills_it() -> None:
    suspect, other = make_request(deaths=2), make_request()
    dispatcher = queued(suspect, other)
    assert assigned(dispatcher, 1) == []
    assert assigned(dispatcher, 0) == [(suspect, "w0")]
    assert assigned(dispatcher, 1) == [(other, "w0")]


def test_others_go_on_on_other_workers_while_one_empties_for_a_suspect() -> None:
    suspect = make_request(deaths=2)
    dispatcher = queued(suspect, *(make_request() for _ in range(20)))
    assert sorted(worker for _, worker in assigned(dispatcher, 3, 1, 2)) == ["w0", "w2", "w2"]
    [(first, worker), *others] = assigned(dispatcher, 3, 0, 3)
    assert (first, worker) == (suspect, "w1")
    assert [worker for _, worker in others] == ["w0", "w2"]


def test_a_suspect_whose_time_is_up_empties_no_worker() -> None:
    late, other = make_request(deaths=2, timeout_s=1.0), make_request()
    assert assigned(queued(late, other), 1, now=2.0) == [(other, "w0")]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(1, 3),
    st.randoms(),
)
def test_suspects_are_alone_on_their_worker_and_nobody_waits_for_ever(
    arrivals: list[tuple[bool, int]], workers: int, max_prompts: int, random: object
) -> None:
    dispatcher = queued(*(make_request(deaths=2 * suspect, client=str(client)) for suspect, client in arrivals))
    running: dict[str, list[Request]] = {f"w{n}": [] for n in range(workers)}
    ended = 0
    for _ in range(20 * len(arrivals)):
        guarded = {worker for worker, requests in running.items() if any(each.is_quarantined for each in requests)}
        places = [
            Slot(worker=worker, active=max_prompts if worker in guarded else len(requests), max_prompts=max_prompts)
            for worker, requests in running.items()
        ]
        for each, worker in dispatcher.assign(places, 0.0):
            running[worker].append(each)
        for requests in running.values():
            assert len(requests) <= max_prompts
            assert len(requests) <= 1 or not any(each.is_quarantined for each in requests)
        busy = [requests for requests in running.values() if requests]
        if busy:
            requests = random.choice(busy)  # type: ignore[attr-defined]
            dispatcher.remove(requests.pop(0))
            ended += 1
    assert (ended, len(dispatcher)) == (len(arrivals), 0)


# --- prefixes ------------------------------------------------------------------------------------------------------


def test_a_prompt_goes_to_the_worker_that_reported_its_prefix() -> None:
    dispatcher = holding("w1", PREFIX, "w0")
    dispatcher.add(make_request([*PREFIX, 1]))
    assert [worker for _, worker in assigned(dispatcher, 0, 1)] == ["w1"]


def test_requests_that_arrive_together_follow_the_first_with_their_prefix() -> None:
    dispatcher = queued(*(make_request([*PREFIX, n]) for n in range(3)))
    assert len({worker for _, worker in assigned(dispatcher, 0, 0, 0, 0)}) == 1


def test_a_much_busier_holder_of_the_prefix_does_not_get_it() -> None:
    dispatcher = holding("w1", PREFIX, "w0")
    dispatcher.add(make_request([*PREFIX, 1]))
    assert [worker for _, worker in assigned(dispatcher, 0, 30, max_prompts=40)] == ["w0"]


def test_pages_that_a_worker_dropped_are_not_expected_there() -> None:
    dispatcher = holding("w1", PREFIX, "w0")
    report(dispatcher, "w1", dropped=page_keys(SALT, PREFIX, PAGE))
    dispatcher.add(make_request([*PREFIX, 1]))
    assert [worker for _, worker in assigned(dispatcher, 0, 1)] == ["w0"]


def test_a_prefix_computed_with_another_adapter_is_no_prefix() -> None:
    dispatcher = holding("w1", PREFIX, "w0")
    dispatcher.add(make_request([*PREFIX, 1], adapter="tuned", adapter_key="tuned"))
    assert [worker for _, worker in assigned(dispatcher, 0, 1)] == ["w0"]


def test_a_prefix_is_found_where_the_same_version_of_its_adapter_computed_it() -> None:
    for key, holder in (("tuned\0v2", "w1"), ("tuned\0v1", "w0")):
        dispatcher = holding("w1", [], "w0")
        report(dispatcher, "w1", added=page_keys(SALT, PREFIX, PAGE, "tuned\0v2"))
        dispatcher.add(make_request([*PREFIX, 1], adapter="tuned", adapter_key=key))
        assert [worker for _, worker in assigned(dispatcher, 0, 1)] == [holder]


def test_a_prefix_is_found_where_a_request_of_its_scope_computed_it() -> None:
    for scope, holder in (("alice", "w1"), ("bob", "w0")):
        dispatcher = holding("w1", [], "w0")
        report(dispatcher, "w1", added=page_keys(SALT, PREFIX, PAGE, "", "alice"))
        dispatcher.add(make_request([*PREFIX, 1], cache_scope=scope))
        assert [worker for _, worker in assigned(dispatcher, 0, 1)] == [holder]


def test_requests_of_different_scopes_that_arrive_together_do_not_follow_each_other() -> None:
    dispatcher = queued(*(make_request([*PREFIX, n], cache_scope=f"key {n}") for n in range(3)))
    assert len({worker for _, worker in assigned(dispatcher, 0, 0, 0)}) == 3


def test_a_system_prompt_that_scopes_share_is_found_where_another_scope_computed_it() -> None:
    dispatcher = holding("w1", [], "w0")
    report(dispatcher, "w1", added=page_keys(SALT, PREFIX, PAGE, "", "alice", len(PREFIX)))
    dispatcher.add(make_request([*PREFIX, 1], cache_scope="bob", shared_tokens=len(PREFIX)))
    assert [worker for _, worker in assigned(dispatcher, 0, 1)] == ["w1"]


def test_a_forgotten_worker_holds_no_prefix() -> None:
    dispatcher = holding("w1", PREFIX, "w0")
    dispatcher.router.forget("w1")
    dispatcher.add(make_request([*PREFIX, 1]))
    assert [worker for _, worker in assigned(dispatcher, 0, 1)] == ["w0"]


def test_a_late_report_of_a_forgotten_worker_is_ignored() -> None:
    dispatcher = holding("w1", PREFIX, "w0")
    dispatcher.router.forget("w1")
    report(dispatcher, "w1", added=page_keys(SALT, PREFIX, PAGE))
    dispatcher.add(make_request([*PREFIX, 1]))
    assert [worker for _, worker in assigned(dispatcher, 0, 1)] == ["w0"]


def test_one_hot_prefix_spreads_over_all_workers_when_the_queue_builds() -> None:
    dispatcher = holding("w1", PREFIX, "w0", "w2", "w3")
    for n in range(64):
        dispatcher.add(make_request([*PREFIX, n]))
    places = slots(0, 0, 0, 0, max_prompts=16)
    order = [worker for _, worker in dispatcher.assign(places, 0.0)]
    assert [slot.free for slot in places] == [0, 0, 0, 0]
    assert set(islice(order, 48)) == {"w0", "w1", "w2", "w3"}


def full_holder(*requests: Request) -> Dispatcher:
    """A dispatcher that knows that w1 holds PREFIX, with these requests waiting."""
    dispatcher = holding("w1", PREFIX, "w0")
    for each in requests:
        dispatcher.add(each)
    return dispatcher


def test_while_the_holder_of_its_prefix_is_full_a_request_lets_one_that_fits_better_go_first() -> None:
    follower, other = make_request([*PREFIX, 1]), make_request()
    dispatcher = full_holder(follower, other)
    assert dispatcher.assign(slots(3, 4), 0.0) == [(other, "w0")]
    assert dispatcher.assign(slots(4, 3), 0.0) == [(follower, "w1")]


def test_no_place_stays_empty_for_the_sake_of_a_prefix() -> None:
    followers = [make_request([*PREFIX, n]) for n in range(3)]
    assert full_holder(*followers).assign(slots(3, 4), 0.0) == [(followers[0], "w0")]


def test_a_prefix_that_costs_less_than_a_step_lets_nobody_go_first() -> None:
    dispatcher = holding("w1", PREFIX[:PAGE], "w0")
    follower, other = make_request(PREFIX[: PAGE + 1]), make_request()
    dispatcher.add(follower)
    dispatcher.add(other)
    assert dispatcher.assign(slots(15, 16, max_prompts=16), 0.0) == [(follower, "w0")]


def test_a_request_lets_so_many_go_first_and_no_more() -> None:
    follower = make_request([*PREFIX, 1])
    others = [make_request() for _ in range(MAX_OVERTAKERS + 1)]
    dispatcher = full_holder(follower, *others)
    order = [request for _ in range(MAX_OVERTAKERS + 1) for request, _ in dispatcher.assign(slots(3, 4), 0.0)]
    assert order == [*others[:MAX_OVERTAKERS], follower]


@pytest.mark.parametrize(
    "other",
    [{"priority": -1}, {"client": "busy"}],
    ids=["of_lower_priority", "of_a_client_with_more_work"],
)
def test_no_request_overtakes_one_of_higher_rank(other: dict[str, Any]) -> None:
    first, follower = make_request([7] * 2000, client="busy"), make_request([*PREFIX, 1])
    dispatcher = full_holder(first)
    dispatcher.assign(slots(3, 4), 0.0)
    dispatcher.add(follower)
    dispatcher.add(make_request(**other))
    assert dispatcher.assign(slots(3, 4), 0.0) == [(follower, "w0")]


def test_short_answers_are_expected_after_short_answers() -> None:
    """The longer answers are, the less a prefix is worth beside a crowd."""
    dispatcher = holding("w1", PREFIX, "w0")
    for n in range(300):
        short = make_request([n])
        dispatcher.add(short)
        [(_, worker)] = assigned(dispatcher, 0)
        output = RequestOutput(request_id=short.wire_id, token_ids=[1], finish="stop", cached_tokens=0)
        dispatcher.router.stepped(worker, StepBatch(outputs=[output], stats=BackendStats()))
        dispatcher.remove(short)
    dispatcher.add(make_request([*PREFIX, 1]))
    assert [worker for _, worker in assigned(dispatcher, 0, 30, max_prompts=40)] == ["w1"]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60), st.lists(st.integers(0, 5), max_size=4))
def test_every_request_is_assigned_exactly_once_or_still_waits(
    arrivals: list[tuple[int, bool]], active: list[int]
) -> None:
    dispatcher = queued()
    waiting: set[int] = set()
    for priority, removed in arrivals:
        each = make_request(priority=priority, client=str(priority % 2))
        dispatcher.add(each)
        if removed:
            dispatcher.remove(each)
        else:
            waiting.add(each.order)
    places = slots(*active)
    free = sum(slot.free for slot in places)
    sent = [each.order for each, _ in dispatcher.assign(places, 0.0)]
    assert len(sent) == len(set(sent)) == min(free, len(waiting))
    assert set(sent) <= waiting
    assert len(dispatcher) == len(waiting) - len(sent)
