"""When a dead worker is started again."""

from __future__ import annotations

from engine.workers.health import Backoff, CrashCounter


def test_the_first_restart_is_at_once_and_later_waits_double_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 30.0)
    assert [backoff.delay_s(deaths) for deaths in (1, 2, 3, 4, 8, 10**6)] == [0.0, 0.5, 1.0, 2.0, 30.0, 30.0]


def test_the_last_of_five_deaths_in_a_row_is_for_good() -> None:
    deaths = CrashCounter(Backoff(0.5, 30.0), limit=5)
    assert [deaths.add(worked_s=1.0) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, None]


def test_deaths_are_forgotten_after_it_has_worked_for_a_while() -> None:
    deaths = CrashCounter(Backoff(0.5, 30.0), limit=3)
    assert [deaths.add(worked_s=0.0), deaths.add(worked_s=30.1), deaths.add(worked_s=30.0)] == [0.0, 0.0, 0.5]
    assert deaths.in_a_row == 2


def test_deaths_that_a_request_is_blamed_for_do_not_count_and_still_lengthen_the_wait() -> None:
    deaths = CrashCounter(Backoff(0.5, 30.0), limit=5)
    waits = [deaths.add(1.0, given_up=number % 3 == 2) for number in range(12)]
    assert (deaths.in_a_row, None in waits, waits[-1]) == (0, False, 30.0)


def test_starts_without_a_machine_do_not_count_and_still_lengthen_the_wait() -> None:
    deaths = CrashCounter(Backoff(0.5, 30.0), limit=2)
    deaths.add(1.0)
    waits = [deaths.add(0.0, is_away=True) for _ in range(8)]
    assert (deaths.in_a_row, waits) == (1, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0])


def test_an_operator_who_tries_again_begins_a_new_row() -> None:
    deaths = CrashCounter(Backoff(0.5, 30.0), limit=2)
    deaths.add(0.0)
    assert deaths.add(0.0) is None
    deaths.forget()
    assert deaths.add(0.0) == 0.0
