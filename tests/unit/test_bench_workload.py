"""What a bench sends, and when: the same in every run, and as long and as often as was asked for."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.bench.workload import (
    MARK_TOKENS,
    Exchange,
    Fresh,
    Item,
    Mix,
    PrefixMix,
    TokenIds,
    Words,
    items,
    read_trace,
    sampled,
    usable,
    with_arrivals,
)
from engine.errors import InvalidRequest
from engine.simulation.lengths import TRACE, Length, fixed
from engine.text.tokenizer import Tokenizer
from tests.fakes.bench_target import PlainIds
from tests.fakes.model import EOS_ID, write_fake_model

MIX = Mix(prompt=Length.parse("4-9"), output=Length.parse("normal:20:5"))


def drawn(mix: Mix = MIX, **options: object) -> list[Item]:
    return items(mix, PlainIds(), **{"seed": 1, "salt": "a", "count": 20, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["128", "64-256", "normal:128:32", "128~0.8", "trace"])
def test_a_length_is_written_as_it_is_read(text: str) -> None:
    assert str(Length.parse(text, traced=True)) == text


@pytest.mark.parametrize("text", ["", "-1", "0", "9-3", "0-3", "normal:3", "normal:0:1", "many", "12345678"])
def test_a_length_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Length.parse(text)


@given(st.integers(1, 500), st.integers(0, 500), st.integers())
def test_lengths_stay_where_they_were_said_to(first: int, second: int, seed: int) -> None:
    rng = random.Random(seed)
    assert fixed(first).draw(rng) == fixed(first).most == first
    uniform = Length("uniform", first, first + second)
    assert first <= uniform.draw(rng) <= first + second == uniform.most
    normal = Length("normal", first, second)
    assert 1 <= normal.draw(rng) <= first + 3 * second == normal.most
    log_normal = Length("log-normal", first, cv=1 + second / 100)
    assert 1 <= log_normal.draw(rng) <= 20 * first == log_normal.most


def test_a_normal_length_has_its_mean_and_deviation() -> None:
    rng = random.Random(0)
    found = [Length("normal", 100, 10).draw(rng) for _ in range(5000)]
    assert statistics.fmean(found) == pytest.approx(100, abs=1)
    assert statistics.stdev(found) == pytest.approx(10, abs=1)


def test_a_log_normal_length_has_its_mean_and_variation() -> None:
    rng, length = random.Random(0), Length.parse("100~0.5")
    found = [length.draw(rng) for _ in range(20_000)]
    assert statistics.fmean(found) == pytest.approx(length.expected, abs=1)
    assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(0.5, abs=0.02)


def test_the_same_seed_draws_the_same_and_another_seed_does_not() -> None:
    assert drawn() == drawn()
    assert drawn(seed=2) != drawn()


def test_rows_and_repeats_have_lengths_in_common_and_no_contents() -> None:
    one, other = drawn(salt="0/0"), drawn(salt="1/0")
    assert [(len(item.prompt.ids), item.output_tokens) for item in one] == [
        (len(item.prompt.ids), item.output_tokens) for item in other
    ]
    assert all(a.prompt != b.prompt for a, b in zip(one, other, strict=True))


def test_requests_with_a_lead_of_their_own_are_alike_from_there_on() -> None:
    one, other = drawn(lead="0/1"), drawn(lead="0/2")
    assert [each.prompt.tokens for each in one] == [each.prompt.tokens for each in drawn()]
    assert [len(each.prompt.ids) for each in one] == [each.prompt.tokens for each in one]
    assert [each.prompt.ids[4:] for each in one] == [each.prompt.ids[4:] for each in other]
    assert all(a.prompt.ids[:4] != b.prompt.ids[:4] for a, b in zip(one, other, strict=True))
    assert [each.prompt.ids[4:] for each in one] != [each.prompt.ids[4:] for each in drawn(salt="b", lead="0/1")]


def test_a_prompt_shorter_than_a_lead_is_as_long_as_was_asked() -> None:
    mix = Mix(prompt=fixed(2), output=fixed(1))
    assert {len(each.prompt.ids) for each in drawn(mix, lead="x")} == {2}


def test_texts_of_a_trace_stand_behind_a_mark_that_no_other_request_has() -> None:
    mix = Mix(prompt=TRACE, output=TRACE, trace=(Exchange("what is it?", "a thing"),))
    again = items(mix, Fresh(PlainIds()), seed=1, salt="a", count=20)
    sent = [*drawn(mix), *drawn(mix, salt="b"), *drawn(mix, lead="c"), *again]
    found = {text_of(item) for item in sent}
    assert len(found) == len(sent)
    assert all(re.fullmatch(r"\[[0-9a-f]{8}\] what is it\?", text) for text in found)
    assert max(item.prompt.tokens for item in sent) <= len("what is it?") + MARK_TOKENS
    assert drawn(mix) == drawn(mix)


def test_a_request_does_not_depend_on_how_many_there_are() -> None:
    assert drawn(count=5) == drawn(count=20)[:5]
    assert drawn(count=5, first=10) == drawn(count=20)[10:15]


def test_shared_beginnings_are_shared_by_their_group_alone() -> None:
    mix = Mix(prompt=fixed(3), output=fixed(2), prefix=PrefixMix(tokens=8, groups=2, share=0.5))
    sent = drawn(mix, count=200)
    with_prefix = [item for item in sent if item.group is not None]
    assert 60 < len(with_prefix) < 140
    assert {len(item.prompt.ids) for item in with_prefix} == {11}
    beginnings = {item.group: item.prompt.ids[:8] for item in with_prefix}
    assert len(set(beginnings.values())) == 2
    assert all(item.prompt.ids[:8] == beginnings[item.group] for item in with_prefix)
    assert {len(item.prompt.ids) for item in sent if item.group is None} == {3}
    assert len({item.prompt.ids[-3:] for item in sent}) == len(sent)


@pytest.mark.parametrize(("burstiness", "deviation"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_arrivals_have_their_rate_and_burstiness(burstiness: float, deviation: float) -> None:
    sent = [Item(number=number, prompt=PlainIds().of_text(""), output_tokens=1) for number in range(20_000)]
    timed = with_arrivals(sent, rate=5.0, burstiness=burstiness, seed=3)
    between = [after.at_s - before.at_s for before, after in pairwise(timed)]
    assert timed[0].at_s == 0
    assert statistics.fmean(between) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(between) / statistics.fmean(between) == pytest.approx(deviation, rel=0.1)
    assert timed == with_arrivals(sent, rate=5.0, burstiness=burstiness, seed=3)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert {item.at_s for item in with_arrivals(drawn(), rate=math.inf, burstiness=1, seed=0)} == {0.0}


def trace_file(folder: Path, content: object) -> Path:
    file = folder / "trace.json"
    file.write_text(json.dumps(content))
    return file


def text_of(item: Item) -> str:
    """What a prompt of PlainIds says."""
    return "".join(map(chr, item.prompt.ids))


def talk(*turns: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": value} for who, value in turns]}


def test_a_trace_gives_first_questions_and_the_lengths_of_their_answers(tmp_path: Path) -> None:
    file = trace_file(
        tmp_path,
        [
            talk(("human", "what is it?"), ("gpt", "a thing"), ("human", "more"), ("gpt", "no")),
            talk(("gpt", "I begin"), ("human", "odd")),
            talk(("human", "alone")),
            talk(("user", "and you?"), ("assistant", "a machine")),
        ],
    )
    found = read_trace(file)
    assert found == (Exchange("what is it?", "a thing"), Exchange("and you?", "a machine"))
    sent = drawn(Mix(prompt=TRACE, output=TRACE, trace=found), count=4)
    told = [text_of(item).partition("] ")[2] for item in sent]
    assert sorted(told) == sorted(["what is it?", "and you?"] * 2)
    assert dict(zip(told, (item.output_tokens for item in sent), strict=True)) == {"what is it?": 7, "and you?": 9}


@pytest.mark.parametrize("content", [{}, [], [talk(("human", "alone"))], [{"conversations": 3}], "text"])
def test_a_trace_that_holds_nothing_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(InvalidRequest, match=r"trace\.json"):
        read_trace(trace_file(tmp_path, content))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_trace(tmp_path / "none.json")


def test_exchanges_that_do_not_fit_are_left_out() -> None:
    talks = [Exchange("abcd", "abcd"), Exchange("abc", "long enough"), Exchange("x" * 50, "abcd")]
    assert usable(talks, PlainIds(), 20) == talks[:1]
    assert usable(talks, PlainIds(), 60, 10) == [talks[0]]
    assert usable(talks, PlainIds(), None) == [talks[0], talks[2]]
    with pytest.raises(InvalidRequest, match="no exchange"):
        usable(talks[1:], PlainIds(), 20)


def test_a_short_trace_begins_again() -> None:
    talks = [Exchange(str(number), "") for number in range(3)]
    assert sorted(each.asked for each in sampled(talks, 6, seed=0)) == ["0", "0", "1", "1", "2", "2"]
    assert sampled(talks, 6, seed=0) == sampled(talks, 6, seed=0)


def test_ids_are_none_of_the_control_tokens_and_as_many_as_asked(tmp_path: Path) -> None:
    material = TokenIds.of(Tokenizer.from_folder(write_fake_model(tmp_path / "fake")))
    prompt = material.prompt(5000, random.Random(0))
    assert len(prompt.ids) == prompt.tokens == 5000
    assert EOS_ID not in prompt.ids
    assert material.of_text("abc").ids == (97, 98, 99)
    assert TokenIds.of(Tokenizer.from_folder(tmp_path / "fake"), 10).prompt(99, random.Random(0)).ids < (10,) * 99


def test_words_are_as_many_as_tokens_are_wanted() -> None:
    prompt = Words().prompt(50, random.Random(0))
    assert (len(prompt.text.split()), prompt.tokens, prompt.ids) == (50, 50, ())
    assert (prompt + prompt).text == f"{prompt.text} {prompt.text}"
    assert Words().count("x" * 40) == 10


def test_words_of_a_tokenizer_are_one_token_each() -> None:
    from engine.models.discover import demo_path

    folder = demo_path()
    assert folder is not None
    tokenizer = Tokenizer.from_folder(folder)
    prompt = Words(tokenizer).prompt(200, random.Random(0))
    assert len(tokenizer.encode(prompt.text, add_special_tokens=False)) == pytest.approx(200, abs=5)
