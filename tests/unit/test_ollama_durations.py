"""How long an answer of Ollama's dialect took, by clocks that the test turns."""

from __future__ import annotations

import asyncio

from console.api.dialects.ollama.answers import Figures, Stopwatch
from engine.snapshot import RequestRow


class Clock:
    """Seconds, as many as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def row(**fields: object) -> RequestRow:
    return RequestRow(id="r", source="api", state="finished", **fields)  # type: ignore[arg-type]


async def test_every_duration_is_what_the_clocks_say() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    async def wake() -> str:
        clock.now += 2
        return "model"

    clock.now += 1
    assert await watch.loading(wake()) == "model"
    clock.now += 4
    figures = watch.figures(row(prompt_tokens=7, output_tokens=5, ttft_s=1.5, queued_s=1.0, itl_s=0.25))
    assert figures == Figures(
        total_duration=7 * 10**9,
        load_duration=2 * 10**9,
        prompt_eval_count=7,
        prompt_eval_duration=5 * 10**8,
        eval_count=5,
        eval_duration=10**9,
    )


async def test_a_model_that_did_not_come_counts_as_waited_for() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    async def fail() -> None:
        clock.now += 3
        raise LookupError

    assert await asyncio.gather(watch.loading(fail()), return_exceptions=True)
    assert watch.load_ns == 3 * 10**9


def test_an_answer_of_one_token_or_none_took_no_time_between_tokens() -> None:
    watch = Stopwatch(Clock())
    for output_tokens, ttft_s in ((1, 0.5), (0, None)):
        figures = watch.figures(row(prompt_tokens=7, output_tokens=output_tokens, ttft_s=ttft_s))
        assert figures.eval_duration == 0
