"""Every bench on a target that is foretold: its rows, its progress, and how it ends early."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from console.bench import measure
from console.bench.kinds import PLANS
from console.bench.kinds.base import MAX_SEED, Plan, plan_fits
from console.bench.kinds.grid import Grid
from console.bench.kinds.latency import Latency
from console.bench.kinds.long import gaps
from console.bench.kinds.prefix import Prefix
from console.bench.kinds.serve import Serve
from console.bench.kinds.users import Users
from console.bench.measure import BenchContext, Record
from console.bench.plan_fields import add_flags, plan_of
from console.bench.result import BenchProgress, Column
from console.bench.run import failures_text, run_bench
from console.bench.target import TargetFailed
from console.bench.text import figure, progress_text, result_text, row_text, span
from engine.errors import InvalidRequest
from engine.simulation.lengths import TRACE, Length, fixed
from tests.fakes.bench_target import FakeTarget, TurnedTarget
from tests.unit.test_bench_measure import item

SMALL = fixed(4)


def users(**changes: object) -> Users:
    defaults = {"users": (1, 3), "requests": 2, "prompt_tokens": SMALL, "output_tokens": SMALL}
    return Users(**defaults | changes)  # type: ignore[arg-type]


async def test_rows_are_parts_and_repeats_are_by_turns() -> None:
    target, news = FakeTarget(), list[BenchProgress]()
    result = await run_bench(users(repeats=3, seed=7), target, news.append, samples=True)
    assert [row.keys for row in result.rows] == [{"users": 1}, {"users": 3}]
    assert all(len(values) == 3 for row in result.rows for values in row.values.values())
    assert (result.name, result.complete, result.seeds, result.repeats) == ("users", True, [7], 3)
    assert (result.settings["num_workers"], result.settings["users"]) == (1, [1, 3]) and result.settings[
        "prompt_tokens"
    ] == "4"
    assert result.rows[0].values["to_one_user"] == [1.0, 1.0, 1.0]
    assert len(target.asked) == 1 + 3 * (2 + 6)
    assert len({each.prompt.ids for each in target.asked}) == len(target.asked)
    assert [sum(sample.row == row for sample in result.samples) for row in (0, 1)] == [6, 18]
    assert news[0].doing == "warming up"
    assert (news[-1].done, news[-1].total, news[-1].left_s) == (24, 24, 0.0)
    order = dict.fromkeys((each.repeat, each.doing) for each in news if each.doing != "warming up")
    assert list(order) == [(repeat, part) for repeat in range(3) for part in ("users 1", "users 3")]


async def test_latency_tells_the_mean_and_what_others_got_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    target, now_s = FakeTarget(), 0.0

    def clock() -> float:
        """Each time it is read, as many seconds later as requests were sent: a token of the nth takes n seconds."""
        nonlocal now_s
        now_s += len(target.asked)
        return now_s

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=clock))
    result = await run_bench(Latency(prompts=3, output_tokens=SMALL), target)
    [row] = result.rows
    assert (row.median("answer_tokens"), row.median("completed")) == (4, 3)
    assert row.median("answer_s") == 4 * (2 + 3 + 4) / 3, "the first request warms up"
    assert row.median("tokens_per_s") == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    text = result_text(result)
    for part in ("ExLlama", "A6000", "77.0", "on other hardware", "fake", "mean (tok/s)"):
        assert part in text


async def test_serve_sends_by_rates_and_counts_goodput() -> None:
    plan = Serve(rates=(200.0, float("inf")), requests=6, prompt_tokens=SMALL, output_tokens=SMALL, slo_ttft=60.0)
    result = await run_bench(plan, FakeTarget())
    assert [row.keys for row in result.rows] == [{"request_rate": 200.0}, {"request_rate": "inf"}]
    for row in result.rows:
        assert row.median("request_goodput") == row.median("request_throughput")
        assert row.median("slo_attainment") == 100


async def test_prefix_sends_the_same_lengths_with_and_without_sharing() -> None:
    target = FakeTarget()
    plan = Prefix(requests=12, concurrent=3, prefix_tokens=8, prefix_groups=2, prompt_tokens=Length.parse("2-5"))
    result = await run_bench(plan, target)
    own, shared = target.asked[1:13], target.asked[13:]
    assert sorted(each.prompt.tokens for each in own) == sorted(each.prompt.tokens for each in shared)
    assert len({each.prompt.ids[:8] for each in own}) == 12
    assert len({each.prompt.ids[:8] for each in shared}) == 2
    tokens = sum(each.prompt.tokens for each in shared)
    assert result.rows[1].median("ideal_hit_rate") == pytest.approx(100 * 10 * 8 / tokens)


async def test_a_cancelled_bench_gives_what_it_has_by_then() -> None:
    rows: list[int] = []
    result = await run_bench(
        users(users=(1, 2, 3)), FakeTarget(), lambda news: rows.append(len(news.rows)), lambda: rows[-1:] == [1]
    )
    assert (result.complete, len(result.rows)) == (False, 1)
    assert "Ended early" in result_text(result)


async def test_a_bench_cancelled_before_anything_is_measured_has_no_rows() -> None:
    result = await run_bench(users(), FakeTarget(forever=True), cancelled=lambda: True)
    assert (result.complete, result.rows) == (False, ())
    text = result_text(result)
    assert text.endswith("Ended early: nothing was measured.")
    assert "these are the numbers" not in text and "0 repeats" not in text


GRID = Grid(workers=(1, 2), max_prompts=(4,), concurrent=2, requests=2, prompt_tokens=SMALL, output_tokens=SMALL)


async def test_a_bench_that_waits_for_workers_is_cancelled_and_its_knobs_are_turned_back() -> None:
    target = TurnedTarget()

    def stop_at_the_second() -> bool:
        target.stuck = True if len(target.turned) == 1 else target.stuck
        return len(target.turned) > 1

    result = await run_bench(GRID, target, cancelled=stop_at_the_second)
    assert (result.complete, len(result.rows)) == (False, 1)
    assert target.turned == [(1, 4), (2, 4), (1, 16)]


async def test_a_result_is_not_lost_where_the_knobs_cannot_be_turned_back() -> None:
    target = TurnedTarget()

    def told(news: BenchProgress) -> None:
        target.stuck = TargetFailed("worker w2 did not become ready") if len(news.rows) == 2 else None

    result = await run_bench(GRID, target, told)
    assert (result.complete, len(result.rows)) == (True, 2)
    assert result.notes == ("The settings were not restored: worker w2 did not become ready",)


async def test_a_target_that_fails_later_leaves_what_was_measured() -> None:
    result = await run_bench(users(users=(1, 2)), FakeTarget(fails=range(3, 99)))
    assert (result.complete, len(result.rows)) == (False, 1)
    assert result.notes == ("Ended early: told to fail", "4 of 6 requests failed: told to fail.")


async def test_a_target_that_fails_at_once_is_an_error() -> None:
    with pytest.raises(TargetFailed, match="told to fail"):
        await run_bench(users(), FakeTarget(fails=range(99)))


async def test_answers_that_are_shorter_than_asked_are_told() -> None:
    result = await run_bench(users(), FakeTarget(short=1))
    assert not result.target.forces_length
    assert result.notes[0].startswith("8 of 8 answers had other lengths")


async def test_requests_that_failed_are_said_with_the_reason_once_they_count() -> None:
    result = await run_bench(users(), FakeTarget(fails=(2, 5)))
    assert result.complete
    assert result.notes == ("2 of 8 requests failed: told to fail.",)
    assert result.notes[0] in result_text(result)


async def test_a_failure_while_warming_up_is_not_counted_among_the_rest() -> None:
    class Slow(Users):
        async def warm(self, context: BenchContext) -> None:
            """Plan: two, of which one fails."""
            await context.closed_loop([iter(context.items(self.mix(context), 2))])

    plan = Slow(users=(1,), requests=2, prompt_tokens=SMALL, output_tokens=SMALL)
    assert (await run_bench(plan, FakeTarget(fails=(0,)))).notes == ()


def test_the_most_frequent_reasons_of_failures_are_told() -> None:
    said = failures_text(Counter({"a": 1, "b.": 4, "c": 2, "d": 1}), answered=2)
    assert said == "8 of 10 requests failed: b (4); c (2); a (1); other reasons (1)."


@pytest.mark.parametrize(
    ("name", "said"),
    [("grid", "changes engine settings"), ("load", "loads a model, which a server does not allow")],
)
async def test_benches_of_an_engine_refuse_a_server_and_say_why(name: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{said}.*; leave --url out"):
        await run_bench(PLANS[name](), FakeTarget(kind="http"))


async def test_requests_that_do_not_fit_the_model_are_refused_with_numbers() -> None:
    with pytest.raises(
        InvalidRequest, match="prompts of up to 4 tokens and answers of up to 4 do not fit the model's 7"
    ):
        await run_bench(users(), FakeTarget(max_model_len=7))


async def test_the_lengths_of_a_trace_need_one() -> None:
    with pytest.raises(InvalidRequest, match="lengths from a trace need --trace"):
        await run_bench(Serve(prompt_tokens=TRACE), FakeTarget())
    with pytest.raises(InvalidRequest, match="no length is 'trace'"):
        await run_bench(Serve(trace="file.json"), FakeTarget())


def test_a_trace_gives_the_lengths_that_were_not_given() -> None:
    plan = plan_of(Serve, {"trace": "file.json", "output_tokens": SMALL}, quick=True)
    assert isinstance(plan, Serve)
    assert (plan.prompt_tokens, plan.output_tokens) == (TRACE, SMALL)


@pytest.mark.parametrize(("name", "field"), [("threads", "clients"), ("prefix", "concurrent")])
async def test_clients_without_a_request_are_refused(name: str, field: str) -> None:
    plan = PLANS[name](requests=4, **{field: (8,) if field == "clients" else 8})  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="8 concurrent clients need at least 8 requests, not 4"):
        await run_bench(plan, FakeTarget())


async def test_a_server_is_measured_without_guessing_since_it_cannot_be_told() -> None:
    plan = PLANS["threads"](clients=(2,), requests=4, output_tokens=SMALL)  # type: ignore[call-arg]
    result = await run_bench(plan, FakeTarget(kind="http"))
    assert [row.keys for row in result.rows] == [{"guessed": 0, "clients": 2}]
    assert "speculation of a server cannot be changed" in result.notes[0]


def test_gaps_are_those_that_the_long_prompt_falls_into() -> None:
    stream = Record(item(), sent_s=0.0, chunks=[(0.1, 1), (0.2, 1), (0.7, 1), (0.8, 1), (0.9, 1)])
    long = Record(item(), sent_s=0.3, chunks=[(0.45, 1)])
    found = gaps([stream], long)
    assert found["longest_gap_ms"] == pytest.approx(500)
    assert found["median_gap_ms"] == pytest.approx(300)
    assert found["alone_longest_gap_ms"] == pytest.approx(100)
    assert found["long_ttft_ms"] == pytest.approx(450)


def parsed(name: str, *argv: str) -> Mapping[str, object]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser.add_argument_group(), PLANS[name])
    return vars(parser.parse_args(argv))


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_has_flags_with_help_and_a_shorter_form(name: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser.add_argument_group(), PLANS[name])
    help_text = parser.format_help()
    assert "--repeats" in help_text and "--seed" in help_text
    assert plan_of(PLANS[name], {}, quick=False) == PLANS[name]()
    assert plan_of(PLANS[name], {"seed": 3}, quick=True).seed == 3


def test_flags_are_read_as_what_they_are() -> None:
    given = parsed("serve", "--rates", "0.5,inf", "--slo-ttft", "500ms", "--prompt-tokens", "64-256", "--repeats", "3")
    assert given == {
        "rates": (0.5, float("inf")),
        "slo_ttft": 0.5,
        "prompt_tokens": Length("uniform", 64, 256),
        "repeats": 3,
    }
    plan = plan_of(Serve, dict(given), quick=True)
    assert isinstance(plan, Serve)
    assert (plan.rates, plan.requests) == ((0.5, float("inf")), 16)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--repeats", "0"], "0 is not between 1 and 1000"),
        (["--repeats", "two"], "two is not a whole number"),
        (["--rates", "1,"], "an empty value is not a number"),
        (["--burstiness", "0"], "0 is not more than 0"),
        (["--slo-ttft", "soon"], "soon is not a duration such as 500ms or 0.5s"),
        (["--seed", "-1"], f"-1 is not between 0 and {MAX_SEED}"),
        (["--slo-ttft", "0s"], "not a duration"),
        (["--prefix-share", "2"], "2 is not between 0 and 1"),
        (["--output-tokens", "none"], "none is not a length"),
    ],
)
def test_a_flag_with_a_bad_value_is_one_sentence(argv: list[str], said: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=said):
        parsed("serve", *argv)


def test_a_limit_of_the_time_between_tokens_has_two_names() -> None:
    assert parsed("serve", "--slo-itl", "50ms") == parsed("serve", "--slo-tpot", "50ms") == {"slo_tpot": 0.05}


def test_a_number_below_the_least_is_told_between_what_it_lies() -> None:
    with pytest.raises(argparse.ArgumentError, match="-1 is not between 0 and 100"):
        parsed("threads", "--guessed=-1")


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Users(users=(0,)), "users must be 1 or more"),
        (Grid(workers=(1, 0)), "workers must be 1 or more"),
        (Grid(max_prompts=(0,)), "max_prompts must be 1 or more"),
        (Serve(rates=(0.0,)), "a rate must be above 0"),
        (Serve(prompt_tokens=TRACE), "lengths from a trace need --trace"),
        (Prefix(requests=1, concurrent=2), "2 concurrent clients need at least 2 requests"),
    ],
)
def test_what_no_target_could_take_is_refused_without_one(plan: Plan, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        plan.check()


def test_requests_that_do_not_fit_are_refused_where_only_the_context_is_known() -> None:
    plan_fits(Prefix(prefix_tokens=100, prompt_tokens=SMALL, output_tokens=SMALL), 108)
    plan_fits(Serve(prompt_tokens=TRACE, output_tokens=TRACE), 1)
    plan_fits(users(), None)
    with pytest.raises(InvalidRequest, match="up to 4 tokens behind a prefix of 100 and answers of up to 4 do not fit"):
        plan_fits(Prefix(prefix_tokens=100, prompt_tokens=SMALL, output_tokens=SMALL), 107)


async def test_small_numbers_are_told_with_digits_that_say_something() -> None:
    column = Column(name="gib_per_s", title="loading", unit="GiB/s", digits=2)
    told = [figure(value, column) for value in (0.0, 0.00346, 0.05, 0.1, 1234.5)]
    assert told == ["0.00", "0.0035", "0.050", "0.10", "1,234.50"]
    assert figure(0.02, Column(name="n", title="n", digits=0)) == "0"


async def test_progress_is_a_line_with_the_time_that_is_left() -> None:
    news: list[BenchProgress] = []
    await run_bench(users(repeats=2), FakeTarget(), news.append)
    text = progress_text(next(each for each in news if each.left_s is not None))
    assert text.startswith("users: repeat 1 of 2, users 1, 1 of 16, about ") and text.endswith(" left")
    assert row_text(news[-1]).startswith("users 3: mean response ")
    assert [span(seconds) for seconds in (4.2, 70, 3700)] == ["4 s", "1 min 10 s", "1 h 1 min"]
