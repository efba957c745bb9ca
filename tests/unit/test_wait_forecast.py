"""Where waiting requests are in their queue, and when they are expected to get a worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SamplingParams
from engine.requests.forecast import FRESH_QUEUE, FRESH_S, SHORT_QUEUE, QueuePlace
from engine.requests.request import Request
from engine.scheduling.queue import Dispatcher, ModelQueue, Slot
from tests.fakes.requests import make_request

TOKEN_S = 0.1
"""Between two tokens of every request here."""


def queue_of(*, max_prompts: int = 1, waiting: int = 0, **fields: object) -> ModelQueue:
    """A queue whose one worker is full, and for which some more requests wait."""
    queue = ModelQueue(Dispatcher(), "fake", 0.0)
    for _ in range(max_prompts + waiting):
        queue.enter(make_request(**fields), 0.0)  # type: ignore[arg-type]
    dispatch(queue, max_prompts)
    return queue


def dispatch(queue: ModelQueue, max_prompts: int, now: float = 0.0) -> None:
    """Give the free places away, as the tracker does."""
    active = sum(each.worker is not None for each in queue)
    queue.forecast.num_places = max_prompts
    for request, worker in queue.dispatcher.assign([Slot(worker="w0", active=active, max_prompts=max_prompts)], now):
        request.worker, request.dispatched = worker, now


def generate(request: Request, tokens: int, now: float) -> None:
    """Tokens of a request, TOKEN_S apart."""
    request.add_tokens([0] * tokens, [TOKEN_S] * (tokens - (request.first_token is None)), now)


def answered(queue: ModelQueue, *lengths: int) -> None:
    """Requests that ended with so many tokens, the prompt of each of ten tokens in a second."""
    for length in lengths:
        request = make_request()
        generate(request, length, 0.0)
        queue.forecast.add_prompt(10, 1.0)
        queue.forecast.add_answer(request)


def waiting(queue: ModelQueue) -> list[Request]:
    return [each for each in queue if each.worker is None]


def running(queue: ModelQueue) -> list[Request]:
    return [each for each in queue if each.worker is not None]


def waits(queue: ModelQueue, now: float = 0.0) -> list[float | None]:
    places = [queue.place(each, now) for each in waiting(queue)]
    return [None if place is None else place.expected_wait_s for place in places]


# -- place in the queue -----------------------------------------------------------------------------------------------


async def test_a_request_that_waits_has_its_place_and_one_that_a_worker_has_has_none() -> None:
    queue = queue_of(waiting=3)
    assert [queue.place(each, 0.0) for each in running(queue)] == [None]
    assert [queue.place(each, 0.0) for each in waiting(queue)] == [QueuePlace(1), QueuePlace(2), QueuePlace(3)]


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-2, 2), st.integers(1, 9)), max_size=40), st.integers(0, 6)
)
def test_places_are_the_order_in_which_requests_get_workers_where_none_ends(
    asked: list[tuple[str, int, int]], started: int
) -> None:
    """Over clients, priorities, lengths, and however many requests are at work already."""
    dispatcher = Dispatcher()
    for created, (client, priority, tokens) in enumerate(asked):
        request = make_request(client=client, priority=priority, created=float(created), max_tokens=tokens)
        dispatcher.add(request)
    if started:
        dispatcher.assign([Slot(worker="w0", active=0, max_prompts=started)], 0.0)
    order = [each.id for each in dispatcher.in_order()]
    assert [each.id for each in dispatcher.in_order()] == order, "nothing was taken out"
    given = dispatcher.assign([Slot(worker="w1", active=0, max_prompts=len(asked) + 1)], 0.0)
    assert [request.id for request, _ in given] == order


async def test_a_request_that_lost_its_worker_is_before_all_that_had_none() -> None:
    queue = queue_of(waiting=2)
    [lost] = running(queue)
    lost.worker = None
    queue.enter(lost, 1.0)
    queue.waits.turn(1.0, "lost_worker")
    assert queue.place(lost, 1.0) == QueuePlace(1)


async def test_one_that_comes_into_a_long_queue_is_its_last_until_the_next_forecast() -> None:
    queue = queue_of(waiting=SHORT_QUEUE)
    queue.place(waiting(queue)[0], 0.0)
    urgent = make_request(priority=9)
    queue.enter(urgent, 0.0)
    assert queue.place(urgent, FRESH_S / 2) == QueuePlace(SHORT_QUEUE + 1)
    assert queue.place(urgent, FRESH_S) == QueuePlace(1)


async def test_a_very_long_queue_has_its_forecast_less_often() -> None:
    """The loop spends the same share of its time on it."""
    queue = queue_of(waiting=2 * FRESH_QUEUE - 1)
    assert queue.forecast.next_wait_s(queue, 0.0) is None
    urgent = make_request(priority=9)
    queue.enter(urgent, 0.1)
    assert queue.place(urgent, FRESH_S * 1.5) == QueuePlace(2 * FRESH_QUEUE)
    assert queue.place(urgent, FRESH_S * 2) == QueuePlace(1)


# -- expected wait ----------------------------------------------------------------------------------------------------


async def test_nothing_is_expected_before_anything_was_measured() -> None:
    assert waits(queue_of(waiting=2, max_tokens=10)) == [None, None]


async def test_the_next_waits_until_the_first_of_those_that_run_ends() -> None:
    queue = queue_of(max_prompts=2, waiting=3, max_tokens=101)
    answered(queue, 101)
    one, other = running(queue)
    generate(one, 81, 0.0)
    generate(other, 31, 0.0)
    assert waits(queue) == pytest.approx([2.0, 7.0, 2.0 + 0.1 + 10.1])


async def test_an_answer_is_expected_to_be_as_long_as_those_that_ended_lately() -> None:
    queue = queue_of(waiting=1, max_tokens=4000)
    answered(queue, 50)
    generate(running(queue)[0], 3, 0.0)
    assert waits(queue) == pytest.approx([50 * TOKEN_S])


async def test_without_an_answer_that_ended_a_limit_of_the_client_is_what_is_expected() -> None:
    chosen, open_ended = queue_of(waiting=1, max_tokens=21), queue_of(waiting=1)
    generate(running(chosen)[0], 11, 0.0)
    assert waits(chosen) == pytest.approx([10 * TOKEN_S])
    [request] = running(open_ended)
    request.params = SamplingParams(max_tokens=4000)
    generate(request, 11, 0.0)
    assert waits(open_ended) == [None]


async def test_a_prompt_that_is_computed_takes_what_is_left_of_its_time() -> None:
    queue = queue_of(waiting=1, prompt=[1] * 30, max_tokens=1)
    answered(queue, 2)
    assert waits(queue, 1.0) == pytest.approx([2.0 + TOKEN_S])


async def test_a_place_that_became_free_is_at_once() -> None:
    queue = queue_of(waiting=1, max_tokens=5)
    answered(queue, 5)
    queue.forecast.num_places = 2
    assert waits(queue) == [0.0]


async def test_fewer_places_than_requests_at_work_are_free_when_enough_have_ended() -> None:
    queue = queue_of(max_prompts=2, waiting=1, max_tokens=101)
    answered(queue, 101)
    for request, tokens in zip(running(queue), (81, 31), strict=True):
        generate(request, tokens, 0.0)
    queue.forecast.num_places = 1
    assert waits(queue) == pytest.approx([7.0])


async def test_nothing_is_expected_while_there_is_no_worker() -> None:
    queue = queue_of(waiting=1, max_tokens=5)
    answered(queue, 5)
    queue.waits.turn(0.0, "lost_worker")
    assert waits(queue) == [None]
    assert [queue.place(each, 0.0) for each in waiting(queue)] == [QueuePlace(1)]


async def test_who_would_come_now_waits_for_all_that_are_there() -> None:
    queue = queue_of(waiting=2, max_tokens=10)
    answered(queue, 10)
    generate(running(queue)[0], 10, 0.0)
    one_s = 0.1 + 10 * TOKEN_S
    assert queue.forecast.next_wait_s(queue, 0.0) == pytest.approx(2 * one_s)


async def test_forecasts_are_made_once_a_second_for_all() -> None:
    queue = queue_of(waiting=2, max_tokens=10)
    first, second = waiting(queue)
    assert queue.place(second, 0.0) == QueuePlace(2)
    queue.leave(first, 0.1)
    assert queue.place(second, 0.1) == QueuePlace(2)
    assert queue.place(second, FRESH_S) == QueuePlace(1)
