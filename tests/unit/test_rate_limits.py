"""Limits on how often and how much one may ask, with a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.api.http.limits import MAX_ADDRESSES, AddressLimiter, KeyLimiter, RateLimited, TokenBucket
from console.link.api import KeyLimits


class Clock:
    """Stands still unless it is moved on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def passes(limiter: KeyLimiter, times: int) -> int:
    """How many requests in a row get through, each of which ends at once."""
    for at in range(times):
        try:
            with limiter.admit("k"):
                pass
        except RateLimited:
            return at
    return times


def test_a_minute_s_requests_may_come_at_once_and_then_one_by_one() -> None:
    clock = Clock()
    limiter = KeyLimiter(KeyLimits(requests_per_min=60), clock)
    assert passes(limiter, 100) == 60
    clock.now += 1
    assert passes(limiter, 100) == 1
    clock.now += 3600
    assert passes(limiter, 100) == 60


def test_who_is_refused_can_come_back_when_it_was_told_and_not_before() -> None:
    clock = Clock()
    limiter = KeyLimiter(KeyLimits(requests_per_min=7), clock)
    passes(limiter, 7)
    with pytest.raises(RateLimited) as no, limiter.admit("k"):
        pass
    wait_s = no.value.details["retry_after_s"]
    assert isinstance(wait_s, float)
    clock.now += wait_s - 0.01
    assert passes(limiter, 1) == 0
    clock.now += 0.02
    assert passes(limiter, 1) == 1


def test_tokens_beyond_a_minute_s_are_owed() -> None:
    clock = Clock()
    limiter = KeyLimiter(KeyLimits(tokens_per_min=100), clock)
    limiter.record_tokens(250)
    clock.now += 89
    assert passes(limiter, 1) == 0
    clock.now += 2
    assert passes(limiter, 1) == 1


def test_a_request_that_is_refused_takes_nothing() -> None:
    clock = Clock()
    limiter = KeyLimiter(KeyLimits(requests_per_min=2, concurrent=1), clock)
    with limiter.admit("k"):
        assert passes(limiter, 5) == 0
    assert passes(limiter, 1) == 1


def test_a_key_without_limits_passes_always() -> None:
    assert passes(KeyLimiter(KeyLimits(), Clock()), 10_000) == 10_000


def test_addresses_are_forgotten_rather_than_kept_without_end() -> None:
    addresses = AddressLimiter(1, Clock())
    for number in range(MAX_ADDRESSES + 1):
        addresses.count(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    addresses.count("10.0.0.0")
    with pytest.raises(RateLimited):
        addresses.count("10.0.0.255")


@given(st.integers(1, 10_000), st.lists(st.floats(0, 100), max_size=50))
def test_no_pattern_of_asking_gets_more_than_a_burst_and_the_rate(per_min: int, pauses: list[float]) -> None:
    bucket, now, taken = TokenBucket(per_min), 0.0, 0
    for pause in pauses:
        now += pause
        while not bucket.wait_s(now) and taken < 20_000:
            bucket.take(now)
            taken += 1
    assert taken <= per_min + now * per_min / 60 + 1
