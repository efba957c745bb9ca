"""Nothing starves: not a low priority under higher ones, not a client beside a greedy one or beside ever new ones."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

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


class Workers:
    """Places, and the requests that hold them until they end at random. served: work of each client since `watch`."""

    def __init__(self, queue: FairQueue, places: int, random: Random) -> None:
        self.queue = queue
        self.served: Counter[str] = Counter()
        self._places = places
        self._random = random
        self._running: list[Request] = []

    def serve(self) -> Request | None:
        """Give a place to the next request, once one is free; its prompt is its work."""
        if len(self._running) == self._places:
            self.end(self._random.randrange(self._places))
        request = take(self.queue)
        if request is not None:
            self.queue.start(request.client, len(request.prompt_ids))
            self.served[request.client] += len(request.prompt_ids)
            self._running.append(request)
        return request

    def end(self, index: int = 0) -> None:
        """One request ends."""
        self.queue.finish(self._running.pop(index).client)


sizes = st.lists(st.integers(1, 50), min_size=2, max_size=4)
"""Work of the requests of each client: the client with the long ones and the client with the short ones."""


@given(sizes, st.integers(1, 8), st.integers(0, 60), st.integers(0, 99))
def test_the_work_of_clients_that_all_wait_differs_by_no_more_than_a_request(
    sizes: list[int], places: int, alone: int, seed: int
) -> None:
    """Of the largest size, from when all wait; before that the first client had all the places."""
    queue = FairQueue(AGEING_S)
    workers = Workers(queue, places, Random(seed))
    for _ in range(alone + 500 // sizes[0]):
        queue.add(make_request([0] * sizes[0], client="c0"))
    for _ in range(alone):
        workers.serve()
    workers.served.clear()
    for number, size in enumerate(sizes[1:], start=1):
        for _ in range(500 // size):
            queue.add(make_request([0] * size, client=f"c{number}"))
    while len(queue.by_client()) == len(sizes):
        workers.serve()
        work = [workers.served[f"c{number}"] for number in range(len(sizes))]
        assert max(work) - min(work) <= 2 * max(sizes)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), max_size=300), st.integers(1, 6), st.integers(0, 99))
def test_two_clients_that_always_wait_get_equal_work_whatever_others_come_and_go(
    others: list[tuple[int, int]], places: int, seed: int
) -> None:
    queue = FairQueue(AGEING_S)
    workers = Workers(queue, places, Random(seed))
    for _ in range(301):
        queue.add(make_request([0] * 50, client="long"))
        queue.add(make_request([0] * 3, client="short"))
    for number, size in others:
        if number < 5:
            queue.add(make_request([0] * size, client=f"other {number}"))
        workers.serve()
        assert abs(workers.served["long"] - workers.served["short"]) <= 2 * 50


@given(st.integers(2, 5), st.integers(1, 16))
def test_clients_with_equal_requests_get_equally_many_of_the_places(clients: int, places: int) -> None:
    queue = FairQueue(AGEING_S)
    workers = Workers(queue, places, Random(1))
    for number in range(clients * places):
        queue.add(make_request(client=f"c{number // places}"))
    for _ in range(places):
        workers.serve()
    held = [queue._clients[f"c{number}"].running for number in range(clients)]
    assert max(held) - min(held) <= 1


def test_one_long_request_after_the_other_gets_no_more_work_than_short_ones_that_wait() -> None:
    """The client of the long ones has nothing here in between; there is one place."""
    queue = FairQueue(AGEING_S)
    workers = Workers(queue, 1, Random(1))
    for _ in range(3000):
        queue.add(make_request([0] * 5, client="short"))
    while queue.by_client().get("short"):
        if "long" not in queue._clients:
            queue.add(make_request([0] * 1000, client="long"))
        workers.serve()
        workers.end()
        assert workers.served["long"] <= workers.served["short"] + 1000
    assert workers.served["long"] >= 14_000


@given(st.integers(1, 5), st.integers(1, 20))
def test_ever_new_clients_do_not_lock_out_one_that_was_served(places: int, size: int) -> None:
    queue = FairQueue(AGEING_S)
    workers = Workers(queue, places, Random(1))
    old = [make_request([0] * size, client="old") for _ in range(2)]
    for request in old:
        queue.add(request)
    for number in range(40 * size):
        queue.add(make_request(client=f"new {number}"))
        if workers.serve() is old[1]:
            return
    raise AssertionError("the second request of the old client never got a place")


def test_a_new_client_is_next_where_the_only_place_is_another_ones() -> None:
    queue = FairQueue(AGEING_S)
    workers = Workers(queue, 1, Random(1))
    for _ in range(10):
        queue.add(make_request(client="greedy"))
    workers.serve()
    queue.add(make_request(client="new"))
    request = workers.serve()
    assert request is not None
    assert request.client == "new"


def test_answers_that_get_longer_than_expected_count_before_they_end() -> None:
    queue = FairQueue(AGEING_S)
    for name in ("a", "b"):
        queue.add(make_request(client=name))
        take(queue)
        queue.start(name, 10.0)
        queue.add(make_request(client=name))
    queue.charge("a", 5.0)
    assert [request.client for request in queue.in_order(lambda _: 1.0)] == ["b", "a"]


def test_work_that_a_request_did_not_take_does_not_count() -> None:
    queue = FairQueue(AGEING_S)
    for name, expected in (("a", 30.0), ("b", 20.0)):
        queue.add(make_request(client=name))
        take(queue)
        queue.start(name, expected)
        queue.add(make_request(client=name))
    assert queue.in_order(lambda _: 1.0)[0].client == "b"
    queue.finish("a", 15.0)
    assert queue.in_order(lambda _: 1.0)[0].client == "a"


def test_those_who_may_overtake_are_of_clients_with_hardly_more_work() -> None:
    queue = FairQueue(AGEING_S)
    queue.start("busy", 5.0)
    queue.start("idle", 2.0)
    first, second, busy, idle = (make_request([0] * 3, client=name) for name in ("a", "a", "busy", "idle"))
    for request in (busy, first, idle, second):
        queue.add(request)
    assert queue.leading(9) == [first, second, idle]
    assert queue.leading(2) == [first, second]


def test_the_order_in_which_requests_would_get_places_is_that_in_which_they_do() -> None:
    queue = FairQueue(AGEING_S)
    random = Random(3)
    for _ in range(60):
        queue.add(make_request([0] * random.randint(1, 9), client=random.choice("abc"), priority=random.randint(0, 2)))
    expected = queue.in_order(lambda request: len(request.prompt_ids))
    workers = Workers(queue, 60, random)
    assert [workers.serve() for _ in range(60)] == expected


def test_idle_clients_are_forgotten() -> None:
    queue = FairQueue(AGEING_S)
    for number in range(100):
        request = make_request(client=f"c{number}")
        queue.add(request)
        if number % 2:
            queue.remove(request)
        else:
            take(queue)
            queue.start(request.client, 1.0)
            queue.finish(request.client)
    assert not queue._clients
    assert not len(queue._next)
    assert not len(queue._absent)


def test_of_clients_that_are_gone_few_are_remembered() -> None:
    queue = FairQueue(AGEING_S)
    queue.add(make_request(client="stays"))
    for number in range(1000):
        queue.start(f"c{number}", 1.0 + number)
        queue.finish(f"c{number}")
    assert len(queue._absent) == 8


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

    @rule(expected=st.integers(0, 9))
    def serve(self, expected: int) -> None:
        work = {name: client.work for name, client in self.queue._clients.items() if len(client.waiting)}
        request = take(self.queue)
        if request is None:
            assert not self.requests
            return
        del self.requests[request.order]
        rivals = [each for each in self.requests.values() if each.client == request.client]
        mine = request.created - request.priority * AGEING_S
        assert all(mine <= each.created - each.priority * AGEING_S for each in rivals)
        assert work[request.client] == min(work.values())
        self.queue.start(request.client, expected)
        self.running.append(request.client)

    @rule(index=st.integers(0, 20), unused=st.integers(0, 5))
    def end(self, index: int, unused: int) -> None:
        if self.running:
            self.queue.finish(self.running.pop(index % len(self.running)), unused)

    @invariant()
    def counts_add_up(self) -> None:
        self.queue.check(Counter(self.running))
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
