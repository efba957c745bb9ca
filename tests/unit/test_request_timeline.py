"""A request's time as phases without a gap, and its tokens as a curve that loses none."""

from __future__ import annotations

import itertools
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import text
from console.tui.screens.requests.detail import (
    NO_TIMELINE,
    NOT_ALLOWED,
    NOT_KEPT,
    Phase,
    pauses,
    phase_list,
    phases,
    prompt_and_answer,
    rates,
    request_card,
    timeline_chart,
)
from console.tui.screens.requests.table import progress_bar, prompt_percent
from console.tui.widgets.latency import cause_lines
from engine.requests.causes import Cause, describe
from engine.requests.history import RequestDetail, TokenBatch, WorkerSpan
from engine.snapshot import RequestRow
from tests.fakes import request_scenes


def _detail(
    age_s: float, stays: tuple[WorkerSpan, ...] = (), bursts: tuple[TokenBatch, ...] = (), **row: object
) -> RequestDetail:
    values = {"id": "r", "source": "api", "state": "decode", "age_s": age_s, **row}
    return RequestDetail(row=RequestRow(**values), stays=stays, bursts=bursts)  # type: ignore[arg-type]


def _burst(at: float, tokens: int = 1) -> TokenBatch:
    return TokenBatch(since_s=at, until_s=at, tokens=tokens)


def test_a_request_waits_computes_its_prompt_and_decodes() -> None:
    detail = _detail(3.0, (WorkerSpan(worker="w0", since_s=0.5),), (_burst(1.0), _burst(2.0)))
    assert phases(detail) == [
        Phase("queued", 0.0, 0.5),
        Phase("prefill", 0.5, 1.0, "w0"),
        Phase("decode", 1.0, 3.0, "w0"),
    ]


def test_a_request_that_waits_has_one_phase_so_far() -> None:
    assert phases(_detail(2.0, state="queued")) == [Phase("queued", 0.0, 2.0)]


def test_a_request_that_ended_before_its_first_token_never_decoded() -> None:
    detail = _detail(2.0, (WorkerSpan(worker="w0", since_s=0.5, until_s=2.0),), state="finished")
    assert [phase.kind for phase in phases(detail)] == ["queued", "prefill"]


def test_a_move_after_a_death_is_told() -> None:
    found = phases(request_scenes.moved())
    assert [(phase.kind, phase.worker, phase.lost) for phase in found] == [
        ("queued", "", False),
        ("prefill", "w0", False),
        ("decode", "w0", True),
        ("queued", "", False),
        ("prefill", "w1", False),
        ("decode", "w1", False),
    ]
    said = "\n".join(line.plain for line in phase_list(request_scenes.moved()))
    assert "✖ w0 crashed; request requeued" in said
    assert "812 tokens, 256 of them cached" in said


def test_the_phases_of_any_life_cover_it_without_a_gap() -> None:
    for detail in (request_scenes.moved(), request_scenes.failed()):
        found = phases(detail)
        assert found[0].since_s == 0.0 and found[-1].until_s == detail.row.age_s
        assert all(before.until_s == after.since_s for before, after in itertools.pairwise(found))


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(1, 50)), max_size=40),
    st.floats(0.01, 900),
    st.integers(10, 200),
)
def test_the_curve_holds_every_token(parts: list[tuple[float, float, int]], end: float, width: int) -> None:
    bursts = [
        TokenBatch(since_s=min(one, other) * end, until_s=max(one, other) * end, tokens=tokens)
        for one, other, tokens in parts
    ]
    values = rates(bursts, end, width)
    counted = sum(value for value in values if value is not None) * end / width
    assert counted == pytest.approx(sum(burst.tokens for burst in bursts))


@pytest.mark.parametrize("width", [40, 74, 200])
def test_the_chart_fits_and_says_its_times(width: int) -> None:
    lines = timeline_chart(request_scenes.moved(), width)
    assert all(line.cell_length <= width for line in lines)
    assert lines[-1].plain.startswith("0") and lines[-1].plain.endswith("6.40 s")
    assert "first token 960 ms" in lines[-1].plain
    assert {".", "─", "━"} <= set(lines[-2].plain)


@pytest.mark.parametrize("width", [40, 74, 200])
def test_a_cursor_on_the_chart_has_its_time_on_the_axis(width: int) -> None:
    detail = request_scenes.moved()
    for cursor in (0.0, 0.05, 3.2, 6.0, 6.39):
        axis = timeline_chart(detail, width, cursor=cursor)[-1].plain
        assert len(axis.rstrip()) <= width
        assert text.seconds(cursor) in axis
        assert axis.index("▲") == int(cursor / 6.4 * width)


def test_only_pauses_that_stand_out_are_told_the_longest_first() -> None:
    even = [_burst(at / 10) for at in range(20)]
    assert pauses(even) == []
    assert pauses([*even, _burst(5.0), _burst(5.1), _burst(8.0)]) == [
        (1.9, pytest.approx(3.1)),
        (5.1, pytest.approx(2.9)),
    ]


def test_the_card_says_all_that_is_known() -> None:
    said = request_card(request_scenes.moved(), 100).plain
    for words in (
        "● decode on w1",
        "NeuralHermes-7B with poet",
        "api, client alice",
        "204 of max 512 tokens",
        "temperature 0.7",
        "stop 1 string",
        "longest pauses: 1.19 s at 2.21 s",
    ):
        assert words in said, words


def test_the_card_of_one_that_failed_says_why() -> None:
    assert "the request failed: 3 workers crashed" in request_card(request_scenes.failed(), 100).plain


def test_the_card_says_when_the_timeline_is_gone() -> None:
    old = RequestDetail(row=request_scenes.moved().row, timeline=False)
    said = request_card(old, 100).plain
    assert NO_TIMELINE in said and "Sampling" not in said


def test_text_is_shown_as_it_is_or_it_is_said_why_not() -> None:
    assert "What is [b]max_prompts[/b]?" in prompt_and_answer(request_scenes.with_text()).plain
    assert NOT_ALLOWED in prompt_and_answer(request_scenes.moved()).plain
    assert NOT_KEPT in prompt_and_answer(msgspec.structs.replace(request_scenes.moved(), texts=True)).plain


def test_the_causes_of_its_time_fill_one_bar_and_are_listed_with_their_shares() -> None:
    why = describe({"slot": 6.0, "decode": 3.0, "prefill": 1.0, "grammar": 0.001}, knobs={"max_prompts": 4})
    lines = [line.plain for line in cause_lines(why, 50)]
    assert lines[0] == "." * 30 + "━" * 15 + "─" * 5
    assert [line.split() for line in lines[1:4]] == [
        [".", "waiting", "for", "a", "slot", "6.00", "s", "60%"],
        ["━", "own", "decode", "3.00", "s", "30%"],
        ["─", "own", "prefill", "1.00", "s", "10%"],
    ]
    assert " ".join(lines[4:]) == "Waited 6.00 s (60%) for a slot: raise max prompts (now 4)."


def test_every_cause_has_words_of_its_own() -> None:
    for cause in get_args(Cause):
        assert list(cause_lines(describe({cause: 1.0}), 60))[1].plain.split()[-1] == "100%"


def test_no_time_has_no_causes() -> None:
    assert not list(cause_lines(describe({}), 60))
    assert "Why" not in request_card(_detail(2.0), 80).plain


def test_a_request_that_waits_says_its_place_and_the_expected_wait() -> None:
    detail = _detail(2.0, state="queued", queued_s=2.0, queue_position=3, expected_wait_s=12.4)
    assert "waited      2.00 s, position 3, about 12 s left" in request_card(detail, 100).plain
    assert _progress(detail.row) == "#3 ~12 s"
    assert _progress(_detail(2.0, state="queued", queue_position=3).row) == "#3"
    assert _progress(_detail(2.0, state="queued").row) == ""


@pytest.mark.parametrize(("computed", "percent"), [(0, "0%"), (60_000, "60%"), (99_999, "99%"), (100_000, "100%")])
def test_a_prompt_shows_the_share_that_is_computed_which_is_all_only_at_its_end(computed: int, percent: str) -> None:
    detail = _detail(2.0, state="prefill", prompt_tokens=100_000, computed_tokens=computed)
    assert prompt_percent(detail.row) == percent
    assert f"100,000 tokens, {percent} computed" in request_card(detail, 100).plain
    assert _progress(detail.row).count("━") == 10
    assert progress_bar(detail.row)[0][0] == "━" * round(computed / 10_000)


def _progress(row: RequestRow) -> str:
    return "".join(part for part, _ in progress_bar(row))
