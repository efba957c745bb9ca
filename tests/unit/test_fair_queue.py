"""Nothing starves: not a low priority under higher ones, not a client beside a greedy one or beside ever new ones."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.requests.request import Request
from engine.scheduling.queue import FairQueue, MutableHeap, PriorityQueue
from tests.fakes.requests import make_request

AGEING_S = 30.0


def take(queue: FairQueue) -> Request | None:
    request = queue.first()
    assert (request is None) == (len(queue) == 0)
    assert request is None or queue.remove(request)
    return request


arrivals = st.lists(st.tuples(st.floats(0, 1000), st.integers(-5, 5)), max_size=40)


@given(arrivals)
def test_a_later_request_overtakes_only_by_priorities_worth_the_time_between_them(
    asked: list[tuple[float, int]],
) -> None:
    line = PriorityQueue(AGEING_S)
    for created, priority in asked:
        line.add(make_request(created=created, priority=priority))
    order = line.take_all()
    assert len(order) == len(asked)
    for ahead, behind in pairwise(order):
        gained_s = (ahead.priority - behind.priority) * AGEING_S
        assert ahead.created - gained_s <= behind.created + 1e-6


@given(st.integers(1, 5), st.integers(0, 20))
def test_a_stream_of_higher_priorities_delays_a_request_by_ageing_and_no_longer(priority: int, before: int) -> None:
    """One request of `priority` comes each second and one is served each second."""
    queue = FairQueue(AGEING_S)
    for second in range(-before, 0):
        queue.add(make_request(created=float(second), priority=priority))
    low = make_request(created=0.0)
    queue.add(low)
    second = 0
    while (served := take(queue)) is not low:
        assert served is not None
        second += 1
        queue.add(make_request(created=float(second), priority=priority))
    assert second <= priority * AGEING_S + before


@given(st.integers(1, 4), st.integers(1, 8), st.randoms(use_true_random=False))
def test_places_are_shared_evenly_among_clients_that_all_wait(clients: int, places: int, random: object) -> None:
    """However long requests run: when a place is given away, nobody who waits has fewer than the one who gets it."""
    queue = FairQueue(AGEING_S)
    for number in range(200):
        queue.add(make_request(client=f"c{number % clients}"))
    running: list[str] = []
    while len(queue):
        if len(running) == places:
            queue.finish(running.pop(random.randrange(places)))  # type: ignore[attr-defined]
        held, waiting = Counter(running), queue.by_client()
        request = take(queue)
        assert request is not None
        assert held[request.client] == min(held[name] for name in waiting)
        queue.start(request.client)
        running.append(request.client)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 200))
def test_clients_that_all_wait_are_served_equally_often_whoever_came_first(
    clients: int, places: int, first: int
) -> None:
    """Where requests are equally long, counts differ by no more than the places there are, from when all wait."""
    queue = FairQueue(AGEING_S)
    for _ in range(first + 100):
        queue.add(make_request(client="c0"))
    served: Counter[str] = Counter()
    running: list[str] = []
    for turn in range(first + 100):
        if turn == first:
            for number in range(100 * (clients - 1)):
                queue.add(make_request(client=f"c{1 + number % (clients - 1)}"))
            served.clear()
        if len(running) == places:
            queue.finish(running.pop(0))
        request = take(queue)
        assert request is not None
        queue.start(request.client)
        running.append(request.client)
        served[request.client] += 1
        if turn >= first:
            counts = [served[f"c{number}"] for number in range(clients)]
            assert max(counts) - min(counts) <= places + 1


@given(st.integers(1, 5))
def test_ever_new_clients_do_not_lock_out_one_that_was_served(places: int) -> None:
    queue = FairQueue(AGEING_S)
    old = [make_request(client="old") for _ in range(2)]
    for request in old:
        queue.add(request)
    running: list[Request] = []
    for number in range(50):
        queue.add(make_request(client=f"new {number}"))
        if len(running) == places:
            queue.finish(running.pop(0).client)
        served = take(queue)
        assert served is not None
        queue.start(served.client)
        running.append(served)
        if served is old[1]:
            return
    raise AssertionError("the second request of the old client never got a place")


def test_a_new_client_is_next_where_the_only_place_is_another_ones() -> None:
    queue = FairQueue(AGEING_S)
    for _ in range(10):
        queue.add(make_request(client="greedy"))
    take(queue)
    queue.start("greedy")
    queue.add(make_request(client="new"))
    queue.finish("greedy")
    request = take(queue)
    assert request is not None
    assert request.client == "new"


def test_those_who_may_overtake_are_of_clients_with_as_few_at_work() -> None:
    queue = FairQueue(AGEING_S)
    queue.start("busy")
    first, second, busy, other = (make_request(client=name) for name in ("a", "a", "busy", "b"))
    for request in (busy, first, other, second):
        queue.add(request)
    assert queue.leading(9) == [first, second, other]
    assert queue.leading(2) == [first, second]


def test_an_idle_client_is_forgotten() -> None:
    queue = FairQueue(AGEING_S)
    for number in range(100):
        request = make_request(client=f"c{number}")
        queue.add(request)
        if number % 2:
            queue.remove(request)
        else:
            take(queue)
            queue.start(request.client)
            queue.finish(request.client)
    assert not queue._clients
    assert not len(queue._next)


class FairQueueWalk(RuleBasedStateMachine):
    """Random arrivals, removals and services against the plain definition of who is next."""

    waiting: Bundle[Request] = Bundle("waiting")

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(AGEING_S)
        self.requests: dict[int, Request] = {}
        self.running: list[str] = []

    @rule(target=waiting, client=st.sampled_from("abc"), priority=st.integers(0, 2), created=st.floats(0, 100))
    def arrive(self, client: str, priority: int, created: float) -> Request:
        request = make_request(client=client, priority=priority, created=created)
        self.queue.add(request)
        self.requests[request.order] = request
        return request

    @rule(request=consumes(waiting))
    def leave(self, request: Request) -> None:
        assert self.queue.remove(request) == (self.requests.pop(request.order, None) is not None)

    @rule()
    def serve(self) -> None:
        request = take(self.queue)
        if request is None:
            assert not self.requests
            return
        del self.requests[request.order]
        rivals = [each for each in self.requests.values() if each.client == request.client]
        mine = request.created - request.priority * AGEING_S
        assert all(mine <= each.created - each.priority * AGEING_S for each in rivals)
        fewest = min(self.running.count(each.client) for each in [*self.requests.values(), request])
        assert self.running.count(request.client) == fewest
        self.queue.start(request.client)
        self.running.append(request.client)

    @rule(index=st.integers(0, 20))
    def end(self, index: int) -> None:
        if self.running:
            self.queue.finish(self.running.pop(index % len(self.running)))

    @invariant()
    def counts_add_up(self) -> None:
        assert len(self.queue) == len(self.requests)
        assert self.queue.by_client() == Counter(each.client for each in self.requests.values())


TestFairQueueWalk = FairQueueWalk.TestCase
TestFairQueueWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 9)), max_size=200))
def test_the_heap_gives_the_item_with_the_smallest_key_whatever_changed(
    changes: list[tuple[int, int | None]],
) -> None:
    heap: MutableHeap[float, int] = MutableHeap()
    keys: dict[int, int] = {}
    for item, key in changes:
        if key is None:
            heap.discard(item)
            keys.pop(item, None)
        else:
            heap.put(item, float(key))
            keys[item] = key
        assert len(heap) == len(keys)
        order = sorted(keys, key=lambda each: (keys[each], each))
        assert heap.leading(3) == order[:3]
        assert heap.first() == (order[0] if order else None)


def test_the_heap_keeps_no_more_than_twice_what_is_in_it() -> None:
    heap: MutableHeap[float, int] = MutableHeap()
    for number in range(10_000):
        heap.put(number % 10, float(-number))
        if number % 3 == 0:
            heap.discard((number + 5) % 10)
    assert len(heap._heap) <= 2 * 10 + 16
