"""Clients of a bench: what they send, what they keep, and what is read off it."""

from __future__ import annotations

import statistics
from collections.abc import AsyncGenerator

import pytest

from console.bench.measure import BenchContext, Record, Run, ask, columns, summarize, tpot_s
from console.bench.run import BenchCancelled, unless_cancelled
from console.bench.target import Chunk, TargetFailed
from console.bench.workload import Item, Prompt
from engine.metrics.distributions import percentiles
from engine.metrics.slo import Slo
from tests.fakes.bench_target import FakeTarget


def item(number: int = 0, output_tokens: int = 4, at_s: float = 0.0) -> Item:
    return Item(number=number, prompt=Prompt(3, ids=(1, 2, 3)), output_tokens=output_tokens, at_s=at_s)


def record(*at_s: float, tokens: int | None = None, error: str = "", sent_s: float = 0.0) -> Record:
    chunks = [(when, 1) for when in at_s]
    told = len(at_s) if tokens is None else tokens
    return Record(
        item(), sent_s=sent_s, chunks=chunks, end_s=at_s[-1], prompt_tokens=3, output_tokens=told, error=error
    )


async def test_each_client_asks_again_once_it_is_answered() -> None:
    target, ended = FakeTarget(), list[Record | None]()
    run = await BenchContext(target, done=ended.append).closed_loop(
        [iter([item(user * 10 + turn) for turn in range(3)]) for user in (0, 1)]
    )
    assert sorted(each.number for each in target.asked) == [0, 1, 2, 10, 11, 12]
    assert target.most == 2
    assert (len(run.records), len(ended), len(run.answered)) == (6, 6, 6)
    assert all(record.output_tokens == 4 and len(record.chunks) == 4 for record in run.records)
    assert all(0 < record.e2e_s <= record.end_s <= run.seconds for record in run.records)


async def test_clients_may_share_what_they_send() -> None:
    target = FakeTarget()
    await BenchContext(target).closed_loop([iter([item(number) for number in range(9)])] * 3)
    shared = iter([item(number) for number in range(9)])
    await BenchContext(target).closed_loop([shared] * 3)
    assert sorted(each.number for each in target.asked[9:]) == list(range(9))


async def test_arrivals_come_by_the_clock_and_no_more_at_once_than_allowed() -> None:
    target = FakeTarget()
    run = await BenchContext(target).open_loop([item(number, at_s=0.01 * number) for number in range(5)])
    assert [each.number for each in target.asked] == list(range(5))
    assert run.seconds >= 0.04
    crowded = FakeTarget()
    await BenchContext(crowded).open_loop([item(number) for number in range(8)], max_concurrent=2)
    assert crowded.most == 2


async def test_an_error_is_kept_with_its_request_and_others_go_on() -> None:
    run = await BenchContext(FakeTarget(fails=(1,))).closed_loop([iter([item(0), item(1), item(2)])])
    assert [each.error for each in run.records] == ["", "told to fail", ""]
    assert len(run.answered) == 2


async def test_a_target_that_answers_nothing_ends_the_run_with_what_it_said() -> None:
    with pytest.raises(TargetFailed, match="told to fail"):
        await BenchContext(FakeTarget(fails=(0, 1))).closed_loop([iter([item(0), item(1)])])


async def test_a_cancelled_run_ends_every_request_under_way() -> None:
    target = FakeTarget(forever=True)
    with pytest.raises(BenchCancelled):
        asking = BenchContext(target).closed_loop([iter([item(n)]) for n in range(3)])
        await unless_cancelled(asking, lambda: len(target.asked) == 3)
    assert len(target.closed) == 3


async def test_a_late_request_comes_while_all_streams_have_tokens_and_they_end_after_it() -> None:
    target = FakeTarget(forever=True)

    class Mixed(FakeTarget):
        async def send(self, item: Item) -> AsyncGenerator[Chunk, None]:
            async for chunk in (FakeTarget() if item.number == 99 else target).send(item):
                yield chunk

    streams, late = await BenchContext(Mixed()).during_streams(
        [iter([item(n)]) for n in range(3)], item(99), settle_tokens=5
    )
    assert len(streams) == 3
    assert late.chunks and not late.error
    assert all(stream.chunks[0][0] + stream.sent_s < late.sent_s for stream in streams)
    assert all(stream.chunks[-1][0] + stream.sent_s > late.sent_s for stream in streams)


async def test_a_stream_that_fails_beside_a_late_request_is_an_error() -> None:
    with pytest.raises(TargetFailed, match="told to fail"):
        await BenchContext(FakeTarget(fails=(1,), forever=True)).during_streams(
            [iter([item(n)]) for n in range(2)], item(9), 5
        )


class _Told(FakeTarget):
    """Says these chunks."""

    def __init__(self, *chunks: Chunk) -> None:
        super().__init__()
        self._chunks = chunks

    async def send(self, item: Item) -> AsyncGenerator[Chunk, None]:
        """Target."""
        for chunk in self._chunks:
            yield chunk


async def kept(*chunks: Chunk) -> Record:
    found = Record(item())
    await ask(_Told(*chunks), found, 0.0)
    return found


async def test_counts_that_grow_say_how_many_tokens_a_chunk_has() -> None:
    found = await kept(Chunk(tokens=1, output_tokens=1), Chunk(tokens=1, output_tokens=4), Chunk(output_tokens=4))
    assert [tokens for _, tokens in found.chunks] == [1, 3]
    assert found.output_tokens == 4


async def test_a_count_at_the_end_is_right_where_chunks_were_not() -> None:
    found = await kept(Chunk(tokens=1), Chunk(tokens=1), Chunk(output_tokens=7, prompt_tokens=11, cached_tokens=5))
    assert [tokens for _, tokens in found.chunks] == [1, 1]
    assert (found.output_tokens, found.prompt_tokens, found.cached_tokens) == (7, 11, 5)


async def test_an_answer_of_no_tokens_that_ended_well_is_no_failure() -> None:
    found = await kept(Chunk(prompt_tokens=3, output_tokens=0))
    assert (found.error, found.output_tokens, found.ttft_s) == ("", 0, None)


async def test_times_between_tokens_are_those_that_the_target_measured_however_they_arrive() -> None:
    found = await kept(Chunk(tokens=1), Chunk(tokens=3, gaps_s=[0.25, 0.5, 0.25]), Chunk(tokens=1, gaps_s=[2.0]))
    assert found.gaps_s == [0.25, 0.5, 0.25, 2.0]
    assert found.ttft_s is not None
    assert [at_s - found.ttft_s for at_s in found.times_s] == pytest.approx([0.0, 0.25, 0.75, 1.0, 3.0])
    assert summarize(Run((found,), seconds=1.0))["mean_itl_ms"] == pytest.approx(750)


async def test_a_target_that_never_gives_a_token_ends_the_run() -> None:
    with pytest.raises(TargetFailed, match="the answer had no tokens"):
        await BenchContext(_Told(Chunk(prompt_tokens=3))).closed_loop([iter([item(0), item(1)])])


async def test_a_stream_without_tokens_beside_a_late_request_is_an_error() -> None:
    with pytest.raises(TargetFailed, match="the answer had no tokens"):
        await BenchContext(_Told(Chunk(prompt_tokens=3))).during_streams([iter([item(0)])], item(9), settle_tokens=5)


def test_the_numbers_are_those_of_vllms_bench() -> None:
    run = Run((record(0.1, 0.2, 0.4), record(0.3, 0.4), record(0.5, error="lost")), seconds=2.0)
    found = summarize(run)
    assert (found["completed"], found["failed"], found["duration"]) == (2, 1, 2.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (6, 5)
    assert (found["request_throughput"], found["output_throughput"]) == (1.0, 2.5)
    assert found["total_token_throughput"] == 5.5
    assert found["request_goodput"] is None
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["median_tpot_ms"] == pytest.approx(statistics.median([150, 100]))
    assert found["mean_itl_ms"] == pytest.approx((100 + 200 + 100) / 3)
    assert found["p99_itl_ms"] == pytest.approx(198)
    assert found["median_e2el_ms"] == pytest.approx(400)
    assert found["std_ttft_ms"] == pytest.approx(100)
    assert {column.name for column in columns()} == found.keys()


def test_what_no_request_gave_is_no_number() -> None:
    found = summarize(Run((record(0.1, error="lost"),), seconds=1.0))
    assert (found["mean_ttft_ms"], found["p99_itl_ms"], found["tokens_per_chunk"]) == (None, None, None)


def test_goodput_counts_answers_that_keep_every_limit() -> None:
    quick, slow_start, slow_tokens = record(0.1, 0.2), record(0.9, 1.0), record(0.1, 0.9)
    run = Run((quick, slow_start, slow_tokens, record(0.1, error="lost")), seconds=2.0)
    found = summarize(run, Slo(ttft_s=0.5, itl_s=0.5))
    assert (found["request_goodput"], found["slo_attainment"]) == (0.5, 25.0)
    assert summarize(run, Slo(e2e_s=0.95))["request_goodput"] == 1.0


def test_time_per_token_is_of_those_after_the_first() -> None:
    assert tpot_s(record(0.1, 0.5, tokens=5)) == pytest.approx(0.1)
    assert tpot_s(record(0.1)) == 0.0


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (100, 4.0), (90, 3.7)])
def test_percentiles_lie_between_values(percent: float, value: float) -> None:
    assert percentiles([4.0, 1.0, 3.0, 2.0], percent / 100, interpolate=True) == [pytest.approx(value)]


def test_only_named_columns_are_in_the_table_and_each_once() -> None:
    found = columns("median_ttft_ms", "output_throughput")
    assert [column.name for column in found if column.shown] == ["output_throughput", "median_ttft_ms"]
    assert len({column.name for column in found}) == len(found)
