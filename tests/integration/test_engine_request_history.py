"""What the engine keeps of requests: timelines as they happened, rows of all that ended, texts where allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import SamplingParams
from engine.errors import RequestNotFound
from tests.fakes.backend import FakeBackend, Gate, expected_text
from tests.fakes.engines import Backends, DyingBackend, ask, read, row, serving, until


async def test_a_request_that_ended_is_told_by_increments_and_in_detail(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        params = SamplingParams(max_tokens=5, temperature=0.5)
        await read(engine.submit(ask("first", id="first", client="bob", params=params)))
        total, rows = engine.finished_requests()
        assert (total, [each.id for each in rows]) == (1, ["first"])
        await read(engine.submit(ask("second", id="second")))
        assert [each.id for each in engine.finished_requests(total)[1]] == ["second"]
        detail = engine.request_detail("first")
        assert detail.row == rows[0] and detail.row.finish == "length" and detail.row.client == "bob"
        assert detail.sampling == {"temperature": 0.5, "max_tokens": 5}
        assert sum(burst.tokens for burst in detail.bursts) == 5
        (stay,) = detail.stays
        assert stay.worker == "w0" and stay.until_s is not None and not stay.lost
        assert 0 <= stay.since_s <= detail.bursts[0].since_s <= stay.until_s <= detail.row.age_s


async def test_a_live_request_tells_how_far_it_is(tmp_path: Path) -> None:
    backend = FakeBackend(gate=(gate := Gate()))
    async with serving(tmp_path, Backends(backend)) as engine:
        stream = engine.submit(ask("x", id="x", max_tokens=100))
        gate.allow(3)
        await until(lambda: row(engine, "x").output_tokens == 3)
        detail = engine.request_detail("x")
        assert detail.row.state == "decode" and detail.stays[0].until_s is None
        assert sum(burst.tokens for burst in detail.bursts) == 3
        await stream.aclose()


async def test_a_move_after_a_death_is_in_the_timeline(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(DyingBackend(dies_at=3))) as engine:
        answer = await read(engine.submit(ask("hello", id="x", max_tokens=8)))
        assert answer.text == expected_text(b"hello", 8)
        first, second = engine.request_detail("x").stays
        assert first.lost and not second.lost
        assert first.until_s is not None and first.until_s <= second.since_s


async def test_nothing_of_a_text_is_kept_unless_it_is_allowed(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        await read(engine.submit(ask("hello", id="x")))
        detail = engine.request_detail("x")
        assert detail.text is None and not detail.texts


async def test_where_it_is_allowed_prompt_and_answer_can_be_read_also_while_it_runs(tmp_path: Path) -> None:
    backend = FakeBackend(gate=(gate := Gate()))
    async with serving(tmp_path, Backends(backend), show_prompts=True) as engine:
        stream = engine.submit(ask("hello", id="x"))
        gate.allow(2)
        await until(lambda: row(engine, "x").output_tokens == 2)
        live = engine.request_detail("x")
        assert live.texts and live.text is not None and live.text.answer == expected_text(b"hello", 2)
        gate.open()
        answer = await read(stream)
        text = engine.request_detail("x").text
        assert text is not None and (text.prompt, text.answer, text.cut) == ("hello", answer.text, False)


async def test_a_request_that_nobody_knows_is_not_found(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        with pytest.raises(RequestNotFound, match="unknown request x"):
            engine.request_detail("x")


async def test_all_that_waits_can_be_cancelled_at_once_and_what_runs_goes_on(tmp_path: Path) -> None:
    backend = FakeBackend(gate=(gate := Gate()))
    async with serving(tmp_path, Backends(backend), max_prompts=1) as engine:
        streams = [engine.submit(ask(f"{index}", id=f"{index}")) for index in range(4)]
        await until(lambda: row(engine, "0").state == "prefill")
        assert engine.cancel_queued() == 3
        gate.open()
        answers = [await read(stream) for stream in streams]
        assert [answer.last.finish for answer in answers] == ["length", "cancelled", "cancelled", "cancelled"]
        assert engine.cancel_queued() == 0


async def test_a_turned_knob_leaves_a_mark_with_its_values_that_says_when_it_was_in_effect(tmp_path: Path) -> None:
    backend = FakeBackend(load_gate=(gate := Gate()))
    async with serving(tmp_path, Backends(FakeBackend(), backend)) as engine:
        name = engine.status.spec.name if engine.status.spec else ""
        await engine.reconfigure(num_workers=2)
        await engine.reconfigure(idle_unload_s=60)
        _, workers, idle = engine.publish().marks
        assert (workers.knob, workers.before, workers.after, workers.model) == ("num_workers", 1, 2, name)
        assert (idle.knob, idle.before, idle.after, idle.text) == ("idle_unload_s", 0, 60, "idle_unload_s 0 -> 60")
        assert workers.settled_at is None
        gate.open()
        await until(lambda: engine.publish().marks[1].settled_at is not None)
        settled = engine.publish().marks[1]
        assert settled.settled_at is not None and settled.settled_at >= settled.at
