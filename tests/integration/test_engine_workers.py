"""Workers that die, come and go while requests run. Workers are threads with fake backends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.backends.base import TokenEvent
from engine.errors import InsufficientMemory, InvalidRequest
from engine.models.manager import ModelManager
from tests.fakes.backend import FakeBackend, Gate, expected_text, saying
from tests.fakes.engines import (
    Backends,
    DyingBackend,
    StillProbe,
    all_ready,
    ask,
    read,
    row,
    serving,
    started,
    until,
    worker,
)
from tests.fakes.model import fake_spec

MIB = 2**20


class PoisonedBackend(FakeBackend):
    """Dies of a prompt."""

    def step(self) -> Sequence[TokenEvent]:
        if any(request.prompt_ids == list(b"poison") for request, _ in self._live.values()):
            raise SystemExit("poisoned")
        return super().step()


async def test_a_worker_that_dies_mid_stream_leaves_no_gap_and_no_repetition(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(DyingBackend(dies_at=10))) as engine:
        prompts = [f"marker {number}" for number in range(6)]
        answers = await asyncio.gather(*(read(engine.submit(ask(prompt, max_tokens=30))) for prompt in prompts))
        assert [answer.text for answer in answers] == [expected_text(prompt.encode(), 30) for prompt in prompts]
        assert all(len(answer.token_ids) == answer.last.output_tokens == 30 for answer in answers)
        snapshot = engine.publish()
        assert (snapshot.totals.worker_restarts, snapshot.totals.requeued) == (1, 6)
        assert snapshot.workers[0].restarts == 1


async def test_what_keeps_the_memory_of_a_worker_lets_go_before_the_worker_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placement takes it for free once the worker has ended."""
    states: list[str] = []

    def note(models: ModelManager, worker_id: str) -> None:
        states.append(models.replica(worker_id)[1].state)

    monkeypatch.setattr(ModelManager, "release_memory", note)
    async with serving(tmp_path) as engine:
        await engine.unload()
        assert states[0] == "ready"


async def test_text_held_back_when_a_worker_died_is_not_lost(tmp_path: Path) -> None:
    """The worker dies between the bytes of one character."""
    say = saying("żółw ")
    backends = Backends(DyingBackend(dies_at=2, reply=say), then=lambda: FakeBackend(reply=say))
    async with serving(tmp_path, backends) as engine:
        answer = await read(engine.submit(ask("x", max_tokens=16)))
        assert answer.text == "żółw żółw "


async def test_requests_of_a_dead_worker_go_on_on_another(tmp_path: Path) -> None:
    backends = Backends(
        DyingBackend(dies_at=5, gate=Gate(100)), FakeBackend(), then=lambda: FakeBackend(load_gate=Gate())
    )
    async with serving(tmp_path, backends, num_workers=2) as engine:
        answers = await asyncio.gather(*(read(engine.submit(ask(f"r{number}", max_tokens=40))) for number in range(8)))
        assert [answer.text for answer in answers] == [expected_text(f"r{number}".encode(), 40) for number in range(8)]
        (again,) = (each for each in engine.publish().workers if each.state != "ready")
        assert again.restarts == 1
        assert again.last_error is not None


async def test_the_queue_is_kept_while_no_worker_is_ready(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, Backends(DyingBackend(dies_at=1), FakeBackend(load_gate=gate))) as engine:
        first = engine.submit(ask("first"))
        await until(lambda: worker(engine, "w0").state != "ready")
        second = engine.submit(ask("second"))
        assert engine.publish().queued == 2
        gate.open()
        assert (await read(first)).text == expected_text(b"first", 8)
        assert (await read(second)).text == expected_text(b"second", 8)


async def test_a_request_that_sees_three_deaths_is_given_up_and_the_rest_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(then=PoisonedBackend)) as engine:
        answer = await read(engine.submit(ask("poison")))
        assert answer.last.finish == "error"
        assert answer.last.error is not None
        assert (answer.last.error.code, answer.last.error.details["deaths"]) == ("worker_failed", 3)
        assert (await read(engine.submit(ask("healthy")))).text == expected_text(b"healthy", 8)
        assert engine.publish().totals.worker_restarts == 3


@pytest.mark.parametrize("together", [True, False])
async def test_requests_that_kill_a_lone_worker_do_not_take_the_model_with_them(tmp_path: Path, together: bool) -> None:
    async with serving(tmp_path, Backends(then=PoisonedBackend)) as engine:
        if together:
            ends = [(await read(stream)).last for stream in [engine.submit(ask("poison")) for _ in range(4)]]
        else:
            ends = [(await read(engine.submit(ask("poison")))).last for _ in range(4)]
        assert [end.error.code for end in ends if end.error is not None] == ["worker_failed"] * 4
        assert (await read(engine.submit(ask("healthy")))).text == expected_text(b"healthy", 8)


async def test_requests_beside_a_poisonous_one_are_all_answered(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(then=PoisonedBackend)) as engine:
        streams = [engine.submit(ask(text)) for text in ("a", "b", "poison", "c", "d")]
        answers = await asyncio.gather(*map(read, streams))
        assert [answer.last.finish for answer in answers] == ["length", "length", "error", "length", "length"]
        assert answers[4].text == expected_text(b"d", 8)


async def test_a_failed_step_is_an_error_for_its_requests_and_never_a_short_answer(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(FakeBackend(fail_at_steps=[3]))) as engine:
        answer = await read(engine.submit(ask("x")))
        assert (answer.last.finish, len(answer.token_ids)) == ("error", 2)
        assert answer.last.error is not None
        assert answer.last.error.code == "worker_failed"
        assert (await read(engine.submit(ask("y")))).last.finish == "length"


# -- growing and shrinking ----------------------------------------------------------------------------------------


async def test_changing_workers_and_max_prompts_under_load_loses_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, max_prompts=2) as engine:
        prompts = [f"marker {number}" for number in range(60)]
        reading = [asyncio.create_task(read(engine.submit(ask(prompt, max_tokens=40)))) for prompt in prompts]
        for workers, max_prompts in ((3, 4), (1, 1), (4, 8), (2, 3)):
            await engine.reconfigure(num_workers=workers, max_prompts=max_prompts)
            await all_ready(engine)
        answers = await asyncio.gather(*reading)
        assert [answer.text for answer in answers] == [expected_text(prompt.encode(), 40) for prompt in prompts]
        assert len(engine.publish().workers) == 2


async def test_a_new_worker_takes_what_waits(tmp_path: Path) -> None:
    held = Backends(FakeBackend(gate=(gate := Gate())))
    async with serving(tmp_path, held, max_prompts=1) as engine:
        engine.submit(ask("first"))
        waiting = engine.submit(ask("second"))
        await engine.reconfigure(num_workers=2)
        assert (await read(waiting)).text == expected_text(b"second", 8)
        gate.open()


async def test_raising_max_prompts_takes_effect_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(FakeBackend(gate=(gate := Gate()))), max_prompts=1) as engine:
        streams = [engine.submit(ask(str(number))) for number in range(5)]
        await engine.reconfigure(max_prompts=4)
        assert (engine.publish().running, engine.publish().queued) == (4, 1)
        gate.open()
        await asyncio.gather(*map(read, streams))


async def test_lowering_max_prompts_lets_running_requests_finish(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(FakeBackend(gate=(gate := Gate()))), max_prompts=4) as engine:
        streams = [engine.submit(ask(str(number))) for number in range(6)]
        await engine.reconfigure(max_prompts=1)
        assert (engine.publish().running, engine.publish().queued) == (4, 2)
        gate.open()
        answers = await asyncio.gather(*map(read, streams))
        assert all(answer.last.finish == "length" for answer in answers)


async def test_shrinking_drains_the_youngest_first(tmp_path: Path) -> None:
    gate = Gate()
    backends = Backends(then=lambda: FakeBackend(gate=gate))
    async with serving(tmp_path, backends, num_workers=2) as engine:
        streams = [engine.submit(ask(str(number))) for number in range(2)]
        await engine.reconfigure(num_workers=1)
        assert worker(engine, "w1").state == "draining"
        late = engine.submit(ask("late", id="late"))
        assert row(engine, "late").worker == "w0"
        gate.open()
        answers = await asyncio.gather(*map(read, [*streams, late]))
        assert all(answer.last.finish == "length" for answer in answers)
        await all_ready(engine)


async def test_a_draining_worker_is_kept_when_the_operator_grows_again(tmp_path: Path) -> None:
    gate = Gate()
    backends = Backends(then=lambda: FakeBackend(gate=gate))
    async with serving(tmp_path, backends, num_workers=2) as engine:
        for number in range(2):
            engine.submit(ask(str(number)))
        await engine.reconfigure(num_workers=1)
        await engine.reconfigure(num_workers=2)
        assert [each.state for each in engine.publish().workers] == ["ready", "ready"]
        assert len(backends.made) == 2
        gate.open()


async def test_a_draining_worker_that_dies_is_not_restarted_and_loses_nothing(tmp_path: Path) -> None:
    gate = Gate()
    backends = Backends(*(DyingBackend(dies_at=4, gate=gate) for _ in range(2)))
    async with serving(tmp_path, backends, num_workers=2) as engine:
        streams = [engine.submit(ask(str(number), max_tokens=20)) for number in range(2)]
        await engine.reconfigure(num_workers=1)
        gate.open()
        answers = await asyncio.gather(*map(read, streams))
        assert [answer.text for answer in answers] == [expected_text(str(number).encode(), 20) for number in range(2)]
        await all_ready(engine)


async def test_a_worker_that_is_drained_finishes_takes_nothing_new_and_goes(tmp_path: Path) -> None:
    gate = Gate()
    backends = Backends(then=lambda: FakeBackend(gate=gate))
    async with serving(tmp_path, backends, num_workers=2) as engine:
        streams = [engine.submit(ask(str(number))) for number in range(2)]
        await engine.drain_worker("w0")
        assert (worker(engine, "w0").state, engine.publish().target_workers) == ("draining", 1)
        late = engine.submit(ask("late", id="late"))
        assert row(engine, "late").worker == "w1"
        await engine.drain_worker("w0")
        gate.open()
        answers = await asyncio.gather(*map(read, [*streams, late]))
        assert all(answer.last.finish == "length" for answer in answers)
        await all_ready(engine)
        assert [each.id for each in engine.publish().workers] == ["w1"]
        assert [mark.text for mark in engine.publish().marks if mark.kind == "knob"] == ["num_workers 2 -> 1"]


async def test_the_last_worker_that_could_answer_is_not_drained(tmp_path: Path) -> None:
    backends = Backends(FakeBackend(), FakeBackend(load_error=MemoryError("no room")))
    async with serving(tmp_path, backends) as engine:
        with pytest.raises(InvalidRequest, match="w0 is the last worker"):
            await engine.drain_worker("w0")
        await engine.reconfigure(num_workers=2)
        await until(lambda: worker(engine, "w1").state == "failed")
        with pytest.raises(InvalidRequest, match="w0 is the last worker"):
            await engine.drain_worker("w0")
        assert engine.publish().target_workers == 2
        await engine.drain_worker("w1")
        await all_ready(engine)
        assert [each.id for each in engine.publish().workers] == ["w0"]


async def test_a_worker_that_is_not_there_is_not_drained(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        with pytest.raises(InvalidRequest, match="There is no worker w7; available: w0"):
            await engine.drain_worker("w7")


async def test_what_the_operator_did_is_marked(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        await engine.reconfigure(num_workers=2, max_prompts=8)
        await engine.reconfigure(num_workers=2)
        assert [mark.text for mark in engine.publish().marks if mark.kind == "knob"] == [
            "num_workers 1 -> 2",
            "max_prompts 16 -> 8",
        ]


@pytest.mark.parametrize(
    ("setting", "field"), [({"num_workers": 0}, "num_workers"), ({"max_prompts": 0}, "max_prompts")]
)
async def test_a_target_out_of_range_is_refused_and_changes_nothing(
    tmp_path: Path, setting: dict[str, int], field: str
) -> None:
    async with serving(tmp_path) as engine:
        with pytest.raises(InvalidRequest) as refused:
            await engine.reconfigure(**{"max_prompts": 9, **setting})
        assert refused.value.details["param"] == field
        assert (engine.publish().target_workers, engine.publish().max_prompts) == (1, 16)


async def test_a_worker_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    probe = StillProbe(free_bytes=1000 * MIB)
    async with started(probe=probe) as engine:
        await engine.load(fake_spec(tmp_path))
        with pytest.raises(InsufficientMemory, match="short by"):
            await engine.reconfigure(num_workers=3)
        assert engine.publish().target_workers == 1


async def test_targets_set_before_a_load_hold_for_it(tmp_path: Path) -> None:
    async with started() as engine:
        await engine.reconfigure(num_workers=3, max_prompts=2)
        await engine.load(fake_spec(tmp_path))
        await all_ready(engine)
        assert [each.max_prompts for each in engine.publish().workers] == [2, 2, 2]


async def test_an_extra_worker_that_fails_to_load_leaves_the_others_at_work(tmp_path: Path) -> None:
    backends = Backends(FakeBackend(), FakeBackend(load_error=MemoryError("no room")))
    async with serving(tmp_path, backends) as engine:
        await engine.reconfigure(num_workers=2)
        await until(lambda: worker(engine, "w1").state == "failed")
        failed = worker(engine, "w1").last_error
        assert failed is not None
        assert "no room" in failed.message
        assert (await read(engine.submit(ask("x")))).last.finish == "length"
        await engine.reconfigure(num_workers=2)
        await all_ready(engine)


async def test_the_cores_are_shared_out_again_as_workers_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr("engine.workers.desired_state.usable_cores", lambda: 8)
    monkeypatch.setattr("engine.worker_process.loop.limit_torch_threads", told.append)
    async with serving(tmp_path, Backends()) as engine:
        await engine.reconfigure(num_workers=4)
        await all_ready(engine)
        await until(lambda: told[-1:] == [2])
        await engine.reconfigure(num_workers=1)
        await until(lambda: told[-1:] == [8])
