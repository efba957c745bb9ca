"""Insight of an engine at work: what its requests and steps came to, by model, until an operator counts anew."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.errors import EngineBusy, EngineClosed
from tests.fakes.backend import FakeBackend, Gate
from tests.fakes.engines import Backends, ask, read, serving, until


async def test_requests_and_steps_add_up(tmp_path: Path) -> None:
    async with serving(tmp_path, slo_ttft_s=100.0, max_prompts=4) as engine:
        await asyncio.gather(*(read(engine.submit(ask("x" * 10, max_tokens=5))) for _ in range(12)))
        await until(lambda: engine.publish().insight.session.requests == 12)
        insight = engine.publish().insight
        assert (insight.session.output_tokens, insight.finished) == (60, {"length": 12})
        assert [insight.queue.count, insight.prefill.count, insight.decode.count] == [12, 12, 12]
        assert (insight.prompts.spread.p50, insight.outputs.spread.p99) == (10, 5)
        assert insight.longest_context_tokens == engine.publish().models[0].longest_context_tokens == 15
        model = engine.publish().status.model
        assert model is not None
        assert insight.configured_context_tokens == model.max_model_len
        assert (insight.goodput.judged, insight.goodput.within_slo) == (12, 12)
        assert insight.session.batch is not None
        assert 0 < insight.session.batch <= 4
        assert 0 < insight.session.busy_s <= insight.session.elapsed_s


async def test_a_reset_counts_the_session_anew_and_leaves_the_totals(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        await read(engine.submit(ask("x")))
        await engine.reset_session()
        snapshot = engine.publish()
        assert (snapshot.insight.session.requests, snapshot.insight.longest_context_tokens) == (0, 0)
        assert snapshot.totals.requests == 1
        assert snapshot.models[0].longest_context_tokens == 9


async def test_another_slo_can_be_set_while_it_serves(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        await engine.observe({"slo_itl_s": 1e-6})
        await read(engine.submit(ask("x")))
        await until(lambda: engine.publish().insight.goodput.judged == 1)
        assert engine.publish().insight.goodput.within_slo == 0


async def test_an_itl_target_reaches_every_worker_at_once_and_those_to_come(tmp_path: Path) -> None:
    backends = Backends()
    async with serving(tmp_path, backends) as engine:
        await engine.observe({"slo_itl_s": 0.05})
        await until(lambda: [each.itl_target_s for each in backends.made] == [0.05])
        await engine.reconfigure(num_workers=2)
        await until(lambda: [each.itl_target_s for each in backends.made] == [0.05, 0.05])
        await engine.observe({"slo_itl_s": None})
        await until(lambda: [each.itl_target_s for each in backends.made] == [None, None])


async def test_the_processor_is_left_alone_while_requests_are_live(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(FakeBackend(gate=Gate()))) as engine:
        engine.submit(ask("x"))
        with pytest.raises(EngineBusy):
            await engine.measure_limits()


async def test_an_engine_that_closes_takes_no_such_commands(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        engine.refuse_new()
        for command in (engine.reset_session(), engine.measure_limits(), engine.observe({})):
            with pytest.raises(EngineClosed):
                await command
