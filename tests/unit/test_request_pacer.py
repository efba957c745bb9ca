"""Requests that come at once begin a few at a time; those of load balancers wait for nobody."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from console.api.http.limits import RequestPacer, pacing_middleware


async def begun_by_round(turns: RequestPacer, count: int) -> list[list[int]]:
    """Which of so many requests that came at once began in each round of the loop, until all had."""
    begun: list[int] = []

    async def request(number: int) -> None:
        await turns.take()
        begun.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(count)]
    rounds: list[list[int]] = []
    while len(begun) < count:
        before = len(begun)
        await asyncio.sleep(0)
        rounds.append(begun[before:])
    await asyncio.gather(*tasks)
    return [each for each in rounds if each]


async def test_no_more_than_so_many_begin_in_a_round_and_in_the_order_they_came() -> None:
    rounds = await begun_by_round(RequestPacer(3), 10)
    assert max(map(len, rounds)) <= 3
    assert [number for each in rounds for number in each] == list(range(10))


async def test_one_begins_in_a_round_where_nothing_else_is_said() -> None:
    assert await begun_by_round(RequestPacer(), 5) == [[0], [1], [2], [3], [4]]


async def test_a_request_that_comes_alone_begins_at_once() -> None:
    turns = RequestPacer(2)
    for _ in range(5):
        taking = asyncio.ensure_future(turns.take())
        await asyncio.sleep(0)
        assert taking.done()
        await asyncio.sleep(0)


async def test_a_client_that_left_while_it_waited_takes_no_turn() -> None:
    turns = RequestPacer(1)
    first, second, third = (asyncio.create_task(turns.take()) for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, third)
    assert second.cancelled()


async def test_health_is_answered_while_others_wait_for_their_turn() -> None:
    take_turn = pacing_middleware(RequestPacer(1))
    answered: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        answered.append(request.path)
        return web.Response()

    paths = ["/v1/completions"] * 4 + ["/health", "/ready"]
    asking = [asyncio.ensure_future(take_turn(make_mocked_request("GET", path), answer)) for path in paths]
    await asyncio.sleep(0)
    assert answered == ["/v1/completions", "/health", "/ready"]
    await asyncio.gather(*asking)
    assert answered[3:] == ["/v1/completions"] * 3
