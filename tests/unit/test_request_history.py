"""What is kept of requests: bursts in few words that lose no token, stays, and a memory that forgets its oldest."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SamplingParams
from engine.requests import history
from engine.requests.history import (
    MAX_TOKEN_BATCHES,
    RequestHistory,
    RequestText,
    Timeline,
    TokenBatch,
    non_default_params,
    text_of,
)
from engine.snapshot import RequestRow

GREEDY = SamplingParams(temperature=0.0)


def _row(order: int, **fields: object) -> RequestRow:
    values = {"id": f"r{order}", "source": "api", "state": "finished", "order": order, **fields}
    return RequestRow(**values)  # type: ignore[arg-type]


def _ended(kept: RequestHistory, order: int, text: RequestText | None = None, **fields: object) -> None:
    timeline = Timeline()
    timeline.dispatched("w0", 100.0 + order)
    timeline.add_tokens(101.0 + order, 1)
    timeline.leave(102.0 + order)
    kept.add(_row(order, **fields), timeline, 100.0 + order, params=GREEDY, adapter="poet", text=text)


# -- a timeline -------------------------------------------------------------------------------------------------------


def test_a_short_answer_keeps_every_burst() -> None:
    timeline = Timeline()
    for at, tokens in ((10.0, 1), (10.5, 4), (11.0, 2)):
        timeline.add_tokens(at, tokens)
    assert timeline.bursts(10.0) == (
        TokenBatch(since_s=0.0, until_s=0.0, tokens=1),
        TokenBatch(since_s=0.5, until_s=0.5, tokens=4),
        TokenBatch(since_s=1.0, until_s=1.0, tokens=2),
    )


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 9)), max_size=2500))
def test_bursts_are_few_in_order_and_lose_no_token(came: list[tuple[int, int]]) -> None:
    timeline, now = Timeline(), 50.0
    for gap_ms, tokens in came:
        now += gap_ms / 1000
        timeline.add_tokens(now, tokens)
    bursts = timeline.bursts(50.0)
    assert len(bursts) == min(len(came), len(bursts)) <= MAX_TOKEN_BATCHES
    assert sum(burst.tokens for burst in bursts) == sum(tokens for _, tokens in came)
    assert all(burst.since_s <= burst.until_s for burst in bursts)
    assert all(before.until_s < after.since_s for before, after in itertools.pairwise(bursts))


def test_the_longest_pauses_outlive_the_joining() -> None:
    timeline, now = Timeline(), 0.0
    for index in range(3000):
        now += 4.0 if index in (700, 2100) else 0.01
        timeline.add_tokens(now, 1)
    bursts = timeline.bursts(0.0)
    gaps = sorted(after.since_s - before.until_s for before, after in itertools.pairwise(bursts))
    assert gaps[-2:] == [pytest.approx(4.0)] * 2


def test_a_stay_says_when_and_whether_its_worker_was_lost() -> None:
    timeline = Timeline()
    timeline.leave(4.5)
    timeline.dispatched("w0", 5.0)
    timeline.leave(6.0, lost=True)
    timeline.leave(6.5)
    timeline.dispatched("w1", 7.0)
    first, second = timeline.stays(5.0)
    assert (first.worker, first.since_s, first.until_s, first.lost) == ("w0", 0.0, 1.0, True)
    assert (second.worker, second.since_s, second.until_s, second.lost) == ("w1", 2.0, None, False)


def test_only_what_is_not_neutral_is_told_and_texts_by_their_number() -> None:
    params = SamplingParams(temperature=0.7, seed=3, stop=("secret",), logit_bias={1: 2.0, 2: 1.0}, ignore_eos=True)
    assert non_default_params(params) == {
        "temperature": 0.7,
        "logit_bias": "2 tokens",
        "seed": 3,
        "stop": "1 string",
        "ignore_eos": True,
    }
    assert non_default_params(SamplingParams()) == {}


# -- the memory -------------------------------------------------------------------------------------------------------


def test_rows_come_by_increments_oldest_first() -> None:
    kept = RequestHistory()
    for order in range(1, 4):
        _ended(kept, order)
    total, rows = kept.finished()
    assert (total, [row.id for row in rows]) == (3, ["r1", "r2", "r3"])
    _ended(kept, 4)
    total, rows = kept.finished(total)
    assert (total, [row.id for row in rows]) == (4, ["r4"])
    assert kept.finished(total) == (4, [])


def test_many_rows_come_in_parts_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_ROWS", 10)
    monkeypatch.setattr(history, "ROWS_AT_ONCE", 4)
    kept = RequestHistory()
    for order in range(1, 26):
        _ended(kept, order)
    after, seen = 0, list[int]()
    while True:
        after, rows = kept.finished(after)
        if not rows:
            break
        assert len(rows) <= 4
        seen += [row.order for row in rows]
    assert (after, seen) == (25, list(range(16, 26)))


def test_a_row_comes_back_whole() -> None:
    kept = RequestHistory()
    _ended(kept, 1, finish="length", ttft_s=0.25, model="demo", client="bob", worker="w0")
    assert kept.finished()[1] == [_row(1, finish="length", ttft_s=0.25, model="demo", client="bob", worker="w0")]


def test_a_detail_is_the_newest_of_its_id_or_the_one_of_its_number() -> None:
    kept = RequestHistory()
    _ended(kept, 1, id="same", prompt_tokens=1)
    _ended(kept, 2, id="same", prompt_tokens=2)
    newest, first = kept.detail("same"), kept.detail("same", 1)
    assert newest is not None and newest.row.prompt_tokens == 2
    assert first is not None and first.row.prompt_tokens == 1
    assert first.stays[0].worker == "w0" and first.bursts[0].since_s == 1.0
    assert first.adapter == "poet" and first.sampling == {"temperature": 0.0}
    assert kept.detail("other") is None


def test_an_old_row_has_no_timeline_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_DETAILS", 2)
    kept = RequestHistory()
    for order in range(1, 4):
        _ended(kept, order)
    old = kept.detail("r1")
    assert old is not None and not old.timeline and old.bursts == ()
    assert (new := kept.detail("r3")) is not None and new.timeline


def test_texts_are_kept_of_the_last_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_TEXTS", 2)
    kept = RequestHistory()
    for order in range(1, 4):
        _ended(kept, order, RequestText(prompt=f"p{order}", answer="a"))
    found = [kept.detail(f"r{order}", texts=True) for order in (1, 3)]
    assert [detail.text and detail.text.prompt for detail in found if detail] == [None, "p3"]


class _Bytes:
    """A tokenizer whose ids are characters."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


def test_of_a_long_text_both_ends_are_kept_and_what_lies_between_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "TEXT_TOKENS", 4)
    text = text_of(_Bytes(), [97, 98, 99, 100, 101, 102, 103], [120])  # type: ignore[arg-type]
    assert text.prompt.startswith("ab") and text.prompt.endswith("fg") and "3 tokens left out" in text.prompt
    assert (text.answer, text.cut) == ("x", True)
