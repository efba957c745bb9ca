"""Traffic: counts over a minute, clients that come and go, and bounds on all that is kept."""

from __future__ import annotations

import pytest

from console.api.http.traffic import LAST_FAILURES, LINGER_S, MAX_CLIENTS, CallFailure, Rate, Traffic


class Clock:
    """Unix time, as a test wants it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def asked(traffic: Traffic, address: str = "10.0.0.1", failure: CallFailure | None = None) -> None:
    """One request, from beginning to end."""
    call = traffic.enter(address, "test", "GET", "/x")
    traffic.admit(call, "")
    call.failure = failure
    traffic.leave(call)


async def test_a_minute_is_counted_second_by_second() -> None:
    clock = Clock()
    traffic = Traffic(clock)
    for _ in range(3):
        asked(traffic)
        clock.now += 1
    assert traffic.per_second()[-4:] == (1, 1, 1, 0)
    clock.now += 57
    assert sum(traffic.per_second()) == 2
    clock.now += 1000
    assert sum(traffic.per_second()) == 0
    assert len(traffic.per_second()) == 60


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    rate = Rate()
    rate.add(100.0)
    rate.add(40.0)
    assert sum(rate.seconds(100.0)) == 2


async def test_a_client_is_shown_while_it_asks_and_a_minute_longer() -> None:
    clock = Clock()
    traffic = Traffic(clock)
    call = traffic.enter("10.0.0.1", "test", "GET", "/x")
    traffic.admit(call, "app")
    clock.now += 10 * LINGER_S
    (client,) = traffic.clients()
    assert (client.under_way, client.key, client.since) == (1, "app", 1_000_000.0)
    traffic.leave(call)
    clock.now += LINGER_S
    assert len(traffic.clients()) == 1
    clock.now += 1
    assert traffic.clients() == ()
    asked(traffic)
    assert [client.since for client in traffic.clients()] == [clock.now]


async def test_the_busiest_client_comes_first() -> None:
    traffic = Traffic(Clock())
    asked(traffic, "10.0.0.1")
    traffic.admit(traffic.enter("10.0.0.2", "test", "GET", "/x"), "")
    assert [client.address for client in traffic.clients()] == ["10.0.0.2", "10.0.0.1"]


async def test_what_is_kept_is_bounded_however_many_come() -> None:
    traffic = Traffic(Clock())
    for at in range(MAX_CLIENTS + 20):
        call = traffic.enter(f"10.0.{at // 256}.{at % 256}", "agent" * 1000, "GET", "/" + "x" * 10_000)
        traffic.admit(call, "")
        call.failure = CallFailure(400, "invalid_request", "no " * 1000)
        traffic.leave(call)
    clients = traffic.clients()
    assert len(clients) == MAX_CLIENTS
    assert clients[-1].address == f"10.0.{(MAX_CLIENTS + 19) // 256}.{(MAX_CLIENTS + 19) % 256}"
    assert max(len(client.program) for client in clients) <= 200
    failures = traffic.failures()
    assert len(failures) == LAST_FAILURES
    assert max(len(failure.message) + len(failure.path) for failure in failures) <= 400
    assert [count.count for count in traffic.failure_counts()] == [MAX_CLIENTS + 20]


@pytest.mark.parametrize("admitted", [True, False])
async def test_requests_are_counted_until_they_end_admitted_or_not(admitted: bool) -> None:
    traffic = Traffic(Clock())
    call = traffic.enter("10.0.0.1", "test", "GET", "/x")
    if admitted:
        traffic.admit(call, "")
    assert (traffic.under_way, len(traffic.clients())) == (1, int(admitted))
    traffic.leave(call)
    assert (traffic.under_way, traffic.total) == (0, 1)
    await traffic.wait_idle(0.0)
