"""A request's life: queue, prefill, decode, end. Workers are threads with fake backends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.config import SamplingParams
from engine.errors import ContextLengthExceeded, EngineClosed, InvalidRequest, NoModelLoaded, QueueFull
from engine.metrics.meter import ITL, PROMPT_TOKENS, STEP_TOKENS
from tests.fakes.backend import FakeBackend, Gate, expected_text, saying
from tests.fakes.engines import Backends, ask, read, row, serving, started, until, until_idle, worker
from tests.fakes.model import EOS_ID, fake_spec


async def test_sixty_four_at_once_lose_nothing_and_mix_nothing_up(tmp_path: Path) -> None:
    async with serving(tmp_path, num_workers=2, max_prompts=7) as engine:
        prompts = [f"marker {number}: say it again" for number in range(64)]
        streams = [engine.submit(ask(prompt, max_tokens=20 + number)) for number, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*map(read, streams))
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert answer.text == expected_text(prompt.encode(), 20 + number)
            assert (answer.last.finish, answer.last.output_tokens) == ("length", 20 + number)


async def test_one_worker_never_gets_more_than_max_prompts(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate)), max_prompts=3) as engine:
        streams = [engine.submit(ask(str(number))) for number in range(8)]
        snapshot = engine.publish()
        assert (snapshot.running, snapshot.queued, worker(engine, "w0").active) == (3, 5, 3)
        gate.open()
        await asyncio.gather(*map(read, streams))


async def test_a_higher_priority_overtakes_the_queue(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate)), max_prompts=1) as engine:
        first, later, urgent = (engine.submit(ask(name, id=name, priority=name == "urgent")) for name in _NAMES)
        gate.open()
        await asyncio.gather(read(first), read(later), read(urgent))
        assert [each.id for each in reversed(engine.publish().requests)] == ["first", "urgent", "later"]


_NAMES = ("first", "later", "urgent")


async def test_an_answer_without_max_tokens_goes_on_to_the_contexts_end(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(FakeBackend(max_model_len=50))) as engine:
        answer = await read(engine.submit(ask("x" * 30, max_tokens=None)))
        assert (answer.last.output_tokens, answer.last.finish) == (20, "length")


async def test_an_end_token_ends_the_answer_and_is_not_shown(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(FakeBackend(reply=saying("done", then=EOS_ID)))) as engine:
        answer = await read(engine.submit(ask("x", max_tokens=100)))
        assert (answer.text, answer.last.finish) == ("done", "stop")
        assert answer.token_ids == [*b"done", EOS_ID]


async def test_logprobs_come_one_per_token(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        answer = await read(engine.submit(ask("x", params=SamplingParams(max_tokens=9, logprobs=0))))
        logprobs = [logprob.token_id for delta in answer.deltas for logprob in delta.logprobs]
        assert logprobs == answer.token_ids


async def test_a_slow_reader_gets_merged_deltas_and_holds_up_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        slow = engine.submit(ask("slow", max_tokens=200))
        await read(engine.submit(ask("quick", max_tokens=300)))
        await until(lambda: slow.finished)
        answer = await read(slow)
        assert len(answer.deltas) == 1
        assert answer.text == expected_text(b"slow", 200)


# -- refusals -----------------------------------------------------------------------------------------------------


async def test_a_full_queue_is_refused_with_numbers_and_a_time_to_retry(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate)), max_prompts=2, max_queue=3) as engine:
        streams = [engine.submit(ask(str(number))) for number in range(5)]
        with pytest.raises(QueueFull) as refused:
            engine.submit(ask("one too many"))
        assert (refused.value.details["queued"], refused.value.details["limit"]) == (3, 3)
        assert refused.value.details["retry_after_s"] == 1
        assert engine.publish().totals.rejected == 1
        gate.open()
        await asyncio.gather(*map(read, streams))
        await read(engine.submit(ask("room again")))


async def test_a_client_that_fills_the_queue_leaves_the_others_their_shares(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate)), max_prompts=1, max_queue=6) as engine:
        streams = [engine.submit(ask(str(number), client="greedy")) for number in range(7)]
        for client, share in (("second", 3), ("third", 2)):
            streams += [engine.submit(ask(client, client=client)) for _ in range(share)]
            with pytest.raises(QueueFull):
                engine.submit(ask("one too many", client=client))
        with pytest.raises(QueueFull):
            engine.submit(ask("one too many", client="greedy"))
        gate.open()
        await asyncio.gather(*map(read, streams))


async def test_without_a_queue_free_places_still_take_requests(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate)), max_prompts=2, max_queue=0) as engine:
        engine.submit(ask("a"))
        engine.submit(ask("b"))
        with pytest.raises(QueueFull):
            engine.submit(ask("c"))
        gate.open()


async def test_without_a_model_a_request_is_refused_with_the_state(tmp_path: Path) -> None:
    async with started() as engine:
        with pytest.raises(NoModelLoaded) as refused:
            engine.submit(ask("x"))
        assert refused.value.details["state"] == "unloaded"


async def test_a_closed_engine_refuses(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        await engine.close()
        with pytest.raises(EngineClosed):
            engine.submit(ask("x"))
        with pytest.raises(EngineClosed):
            await engine.load(fake_spec(tmp_path))


async def test_a_prompt_longer_than_max_input_len_is_refused_with_numbers(tmp_path: Path) -> None:
    async with serving(tmp_path, spec=fake_spec(tmp_path, max_input_len=10)) as engine:
        with pytest.raises(ContextLengthExceeded, match="11 tokens"):
            engine.submit(ask("x" * 11))
        await read(engine.submit(ask("x" * 10)))


async def test_the_id_of_a_live_request_is_refused_and_free_again_after_it(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate))) as engine:
        first = engine.submit(ask("x", id="same"))
        with pytest.raises(InvalidRequest, match="same"):
            engine.submit(ask("y", id="same"))
        first.cancel()
        second = engine.submit(ask("y", id="same"))
        gate.open()
        assert (await read(second)).text == expected_text(b"y", 8)


# -- cancelling and deadlines -------------------------------------------------------------------------------------


async def test_cancelling_in_the_queue_ends_the_stream_and_never_reaches_a_worker(tmp_path: Path) -> None:
    backend = FakeBackend(gate=(gate := Gate()))
    async with serving(tmp_path, Backends(backend), max_prompts=1) as engine:
        running, waiting = engine.submit(ask("runs")), engine.submit(ask("waits", id="waits"))
        assert engine.cancel("waits")
        assert not engine.cancel("waits")
        assert (await read(waiting)).last.finish == "cancelled"
        gate.open()
        await read(running)
        assert len(backend.submitted) == 1


async def test_cancelling_in_prefill_frees_the_place_at_once(tmp_path: Path) -> None:
    backend = FakeBackend(gate=(gate := Gate()))
    async with serving(tmp_path, Backends(backend), max_prompts=1) as engine:
        first, second = engine.submit(ask("first", id="first")), engine.submit(ask("second", id="second"))
        assert (row(engine, "first").state, row(engine, "second").state) == ("prefill", "queued")
        await first.aclose()
        assert row(engine, "second").worker == "w0"
        gate.open()
        assert (await read(second)).text == expected_text(b"second", 8)


async def test_cancelling_in_decode_stops_the_computing(tmp_path: Path) -> None:
    backend = FakeBackend(gate=(gate := Gate()))
    async with serving(tmp_path, Backends(backend)) as engine:
        stream = engine.submit(ask("x", max_tokens=4000, id="x"))
        gate.allow(3)
        await until(lambda: row(engine, "x").output_tokens == 3)
        assert row(engine, "x").state == "decode"
        await stream.aclose()
        await until_idle(backend, gate)
        assert backend.steps < 4000
        assert engine.publish().totals.finished == {"cancelled": 1}


async def test_a_reader_that_is_cancelled_while_waiting_frees_its_place(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(FakeBackend(gate=Gate()))) as engine:

        async def client() -> None:
            async with engine.submit(ask("x")) as stream:
                async for _ in stream:
                    pass

        task = asyncio.create_task(client())
        await until(lambda: engine.publish().running == 1)
        task.cancel()
        await asyncio.wait((task,))
        assert engine.publish().running == 0


async def test_a_deadline_passes_in_the_queue_too(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(FakeBackend(gate=Gate())), max_prompts=1) as engine:
        engine.submit(ask("runs"))
        answer = await read(engine.submit(ask("waits", timeout_s=0.02)))
        assert answer.last.finish == "timeout"
        assert answer.last.error is not None
        assert (answer.last.error.code, answer.last.error.details["timeout_s"]) == ("request_timeout", 0.02)
        assert engine.publish().queued == 0


async def test_a_request_past_its_deadline_ends_with_what_it_has(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate))) as engine:
        stream = engine.submit(ask("x", id="x", timeout_s=1000.0))
        gate.allow(3)
        await until(lambda: row(engine, "x").output_tokens == 3)
        engine._tracker._expire(engine._tracker.live["x"])
        answer = await read(stream)
        assert (answer.last.finish, answer.last.error) == ("timeout", None)
        assert len(answer.token_ids) == 3
        assert engine.publish().totals.finished == {"timeout": 1}


async def test_the_engines_timeout_is_the_default(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(FakeBackend(gate=Gate())), timeout_s=0.02) as engine:
        answer = await read(engine.submit(ask("x")))
        assert answer.last.error is not None
        assert answer.last.error.code == "request_timeout"


# -- books --------------------------------------------------------------------------------------------------------


async def test_the_request_table_shows_live_and_finished_requests(tmp_path: Path) -> None:
    async with serving(tmp_path, max_prompts=4) as engine:
        streams = [engine.submit(ask("x" * 10, id=f"r{number}", source="chat")) for number in range(60)]
        await asyncio.gather(*map(read, streams))
        rows = engine.publish().requests
        assert len(rows) == 50
        last = rows[0]
        assert (last.source, last.state, last.finish, last.worker) == ("chat", "finished", "length", "w0")
        assert (last.prompt_tokens, last.output_tokens, last.max_tokens, last.computed_tokens) == (10, 8, 8, 17)
        assert last.ttft_s is not None
        assert 0 <= last.queued_s <= last.ttft_s <= last.age_s


async def test_totals_and_histograms_add_up(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        await asyncio.gather(*(read(engine.submit(ask("x" * 10, max_tokens=5))) for _ in range(12)))
        snapshot = engine.publish()
        totals = snapshot.totals
        assert (totals.requests, totals.prompt_tokens, totals.output_tokens) == (12, 120, 60)
        assert totals.finished == {"length": 12}
        (usage,) = engine.usage()
        assert (usage.name, usage.prompt_tokens, usage.output_tokens) == ("fake", 120, 60)
        counts = {name: histogram.count for name, histogram in usage.histograms.items()}
        assert counts.pop(ITL) == 48
        steps = usage.histograms[STEP_TOKENS]
        assert (counts.pop(STEP_TOKENS), steps.sum) == (steps.count, 60)
        assert set(counts.values()) == {12}
        assert usage.histograms[PROMPT_TOKENS].bounds[-1] == 2000.0


async def test_a_snapshot_can_be_read_from_another_thread(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        engine.publish()
        snapshot = await asyncio.to_thread(engine.snapshot)
        assert snapshot.status.state == "ready"


async def test_history_grows_by_the_second(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        await read(engine.submit(ask("x", max_tokens=7)))
        await until(lambda: sum(second.output_tokens for second in engine.publish().history) == 7)
        last = engine.publish().history[-1]
        assert (last.device_utilisation, last.device_memory) == ((0.5,), (0.5,))
