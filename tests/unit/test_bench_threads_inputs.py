"""What `bench threads` sends: the same in every row of a repeat, of a trace where there is one."""

from __future__ import annotations

import json
from pathlib import Path

from console.bench.kinds.threads import Threads
from console.bench.plan_fields import plan_of
from console.bench.run import run_bench
from console.bench.workload import Item
from engine.simulation.lengths import TRACE, Length
from tests.fakes.bench_target import FakeTarget

CLIENTS, REQUESTS, REPEATS = (1, 2, 4), 6, 2


async def rows_of(plan: Threads) -> list[list[Item]]:
    """What each row of each repeat sent, by the numbers of the requests; without the one that warms up."""
    target = FakeTarget()
    assert (await run_bench(plan, target)).complete
    asked = target.asked[1:]
    rows = [asked[at : at + plan.requests] for at in range(0, len(asked), plan.requests)]
    return [sorted(row, key=lambda item: item.number) for row in rows]


def threads(**changed: object) -> Threads:
    given = {"clients": CLIENTS, "requests": REQUESTS, "repeats": REPEATS, "guessed": (0,), **changed}
    plan = plan_of(Threads, given, quick=True)
    assert isinstance(plan, Threads)
    return plan


async def test_every_number_of_clients_gets_the_same_inputs_behind_first_tokens_of_its_own() -> None:
    rows = await rows_of(threads(prompt_tokens=Length.parse("8-16")))
    assert len(rows) == len(CLIENTS) * REPEATS
    inputs = [[item.prompt.ids[4:] for item in row] for row in rows]
    first, second = inputs[: len(CLIENTS)], inputs[len(CLIENTS) :]
    assert all(each == first[0] for each in first) and all(each == second[0] for each in second)
    assert first[0] != second[0], "another repeat has others"
    assert [item.output_tokens for item in rows[0]] == [item.output_tokens for item in rows[-1]]


async def test_no_two_inputs_begin_alike_so_that_a_prefix_cache_finds_nothing() -> None:
    rows = await rows_of(threads())
    beginnings = {item.prompt.ids[:4] for row in rows for item in row}
    assert len(beginnings) == len(CLIENTS) * REQUESTS * REPEATS


async def test_threads_takes_the_texts_of_a_trace(tmp_path: Path) -> None:
    talks = [("what is it?", "a thing"), ("who are you, then?", "nobody at all")]
    file = tmp_path / "trace.json"
    told = [{"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]} for a, b in talks]
    file.write_text(json.dumps(told))
    plan = threads(trace=str(file))
    assert (plan.prompt_tokens, plan.output_tokens) == (TRACE, TRACE)
    rows = [[("".join(map(chr, item.prompt.ids)), item.output_tokens) for item in row] for row in await rows_of(plan)]
    lengths = {asked: len(answered) for asked, answered in talks}
    for row in rows:
        assert [(text.partition("] ")[2], tokens) for text, tokens in row] == [
            (text.partition("] ")[2], tokens) for text, tokens in rows[0]
        ]
        assert all(lengths[text.partition("] ")[2]] == tokens for text, tokens in row)
    assert len({text for row in rows for text, _ in row}) == len(rows) * REQUESTS
