"""Outputs of short steps are told together, but nobody waits for what matters."""

from __future__ import annotations

import pytest

from engine.worker_process.outbox import MAX_INTERVAL_S, MESSAGES_PER_S, MIN_BATCHED_REQUESTS, Outbox

SHORT_S = MIN_BATCHED_REQUESTS / MESSAGES_PER_S / 4
"""A step so short that four of them go together."""


def fill(outbox: Outbox, requests: int = MIN_BATCHED_REQUESTS, token: int = 7) -> None:
    """A step's token for each of so many requests."""
    for number in range(requests):
        outbox.output_of(f"r{number}").token_ids.append(token)


def test_short_steps_of_many_requests_are_told_together_within_the_limit() -> None:
    outbox = Outbox()
    ended_s, told = 0.0, []
    for step in range(1, 9):
        fill(outbox, token=step)
        ended_s += SHORT_S
        told.append(outbox.stepped(ended_s - SHORT_S, ended_s, MIN_BATCHED_REQUESTS))
        if told[-1]:
            break
    assert told == [False, False, False, True]
    assert (outbox.done.steps, round(outbox.done.seconds / SHORT_S), outbox.done.answers) == (
        4,
        4,
        4 * MIN_BATCHED_REQUESTS,
    )
    assert [output.token_ids for output in outbox.take()] == [[1, 2, 3, 4]] * MIN_BATCHED_REQUESTS
    assert not outbox.has_delayed


@pytest.mark.parametrize(
    ("requests", "interval_s"),
    [
        (MIN_BATCHED_REQUESTS, MIN_BATCHED_REQUESTS / MESSAGES_PER_S),
        (12, 12 / MESSAGES_PER_S),
        (16, MAX_INTERVAL_S),
        (500, MAX_INTERVAL_S),
    ],
)
def test_the_more_answers_the_more_time_goes_together_up_to_the_limit(requests: int, interval_s: float) -> None:
    step_s = interval_s / 100
    outbox, ended_s = Outbox(), 0.0
    while True:
        fill(outbox, requests)
        ended_s += step_s
        if outbox.stepped(ended_s - step_s, ended_s, requests):
            break
    assert interval_s - 2 * step_s <= ended_s <= interval_s + 1e-9


def test_few_requests_are_told_at_every_step() -> None:
    outbox = Outbox()
    fill(outbox, MIN_BATCHED_REQUESTS - 1)
    assert outbox.stepped(0.0, SHORT_S, MIN_BATCHED_REQUESTS)


def test_steps_of_which_no_two_fit_into_the_limit_are_told_one_by_one() -> None:
    outbox = Outbox()
    fill(outbox)
    assert outbox.stepped(0.0, MIN_BATCHED_REQUESTS / MESSAGES_PER_S * 0.51, MIN_BATCHED_REQUESTS)
    assert not outbox.has_delayed


def test_a_shorter_step_among_long_ones_is_told_by_itself_and_a_long_one_among_short_ones_changes_nothing() -> None:
    outbox, now = Outbox(), 0.0

    def told(step_s: float) -> bool:
        nonlocal now
        now += step_s
        fill(outbox, 2 * MIN_BATCHED_REQUESTS)
        if told := outbox.stepped(now - step_s, now, 2 * MIN_BATCHED_REQUESTS):
            outbox.take()
        return told

    assert not told(SHORT_S)
    shorter = [told(step_s * MAX_INTERVAL_S) for _ in range(60) for step_s in (0.4, 1.4)][::2]
    assert all(shorter[-20:])
    while told(SHORT_S):
        pass
    assert told(20 * MAX_INTERVAL_S)
    assert not told(SHORT_S)


def test_steps_that_are_alike_may_be_counted_at_once() -> None:
    outbox = Outbox()
    fill(outbox)
    outbox.stepped(0.0, 1.0, 0)
    outbox.take()
    for _ in range(4):
        fill(outbox)
    outbox.stepped(1.0, 1.0 + 4 * SHORT_S, 4 * MIN_BATCHED_REQUESTS, 4)
    assert (outbox.done.steps, outbox.done.answers) == (4, 4 * MIN_BATCHED_REQUESTS)
    assert outbox.take()[0].gaps == pytest.approx([SHORT_S] * 4)


def test_a_first_token_and_an_end_go_at_once_and_the_others_when_they_are_due() -> None:
    for urgent in ("first", "end"):
        outbox = Outbox()
        fill(outbox)
        assert not outbox.stepped(0.0, SHORT_S, MIN_BATCHED_REQUESTS)
        fill(outbox)
        if urgent == "first":
            outbox.output_of("new").cached_tokens = 0
            outbox.output_of("new").token_ids.append(9)
        else:
            outbox.output_of("r0").finish = "stop"
        assert outbox.stepped(SHORT_S, 2 * SHORT_S, MIN_BATCHED_REQUESTS)
        told = outbox.take(everything=False)
        assert [output.request_id for output in told] == ["new" if urgent == "first" else "r0"]
        assert outbox.has_delayed
        left = {output.request_id for output in outbox.take()}
        assert left == {f"r{number}" for number in range(urgent == "end", MIN_BATCHED_REQUESTS)}
        assert not outbox.has_delayed


def test_what_is_dropped_is_not_told() -> None:
    outbox = Outbox()
    fill(outbox, 2)
    outbox.drop("r0")
    assert [output.request_id for output in outbox.take()] == ["r1"]


def test_each_token_has_the_time_of_its_own_step_however_long_it_is_held() -> None:
    outbox, ended_s = Outbox(), 0.0
    for step_s in (SHORT_S, SHORT_S / 2, SHORT_S / 4):
        fill(outbox)
        ended_s += step_s
        assert not outbox.stepped(ended_s - step_s, ended_s, MIN_BATCHED_REQUESTS)
    assert [output.gaps for output in outbox.take()] == [
        pytest.approx([SHORT_S / 2, SHORT_S / 4])
    ] * MIN_BATCHED_REQUESTS
    fill(outbox)
    outbox.stepped(ended_s + 0.1, ended_s + 0.2, MIN_BATCHED_REQUESTS)
    assert [output.gaps for output in outbox.take()] == [pytest.approx([0.2])] * MIN_BATCHED_REQUESTS


def test_tokens_of_one_step_share_the_time_since_those_before() -> None:
    outbox = Outbox()
    for ended_s, tokens in ((1.0, 2), (1.3, 3)):
        outbox.output_of("r").token_ids += [7] * tokens
        outbox.stepped(ended_s - 0.1, ended_s, 1)
    [output] = outbox.take()
    assert (len(output.token_ids), output.gaps) == (5, pytest.approx([0.1] * 3))


def test_a_step_without_a_token_counts_for_the_next_one() -> None:
    outbox = Outbox()
    fill(outbox, 1)
    outbox.stepped(0.0, 1.0, 1)
    outbox.stepped(1.0, 1.4, 0)
    fill(outbox, 1)
    outbox.stepped(1.4, 1.5, 1)
    assert outbox.take()[0].gaps == pytest.approx([0.5])


def test_a_request_that_comes_back_begins_without_a_time_between_tokens() -> None:
    outbox = Outbox()
    for leave in (lambda: outbox.drop("r0"), lambda: setattr(outbox.output_of("r0"), "finish", "length")):
        fill(outbox, 1)
        outbox.stepped(0.0, 1.0, 1)
        leave()
        outbox.take()
        fill(outbox, 1)
        outbox.stepped(8.0, 9.0, 1)
        assert [output.gaps for output in outbox.take()] == [[]]
        outbox.drop("r0")
