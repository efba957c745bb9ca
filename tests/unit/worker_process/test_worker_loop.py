"""The worker's loop, in a thread, with a backend that the test paces: steps, cancels, failures, the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from engine.backends.base import PrefixChanges, TokenEvent
from engine.errors import WorkerFailed
from engine.worker_process.hosts import ThreadHost, WorkerExit
from engine.worker_process.outbox import MIN_BATCHED_REQUESTS
from engine.worker_process.protocol import Cancel, Loaded, SetMaxPrompts, StepBatch, WorkerError
from tests.fakes.backend import PATIENCE_S, FakeBackend, Gate, expected_text
from tests.fakes.worker import PROMPT_IDS, Probe, step_until, submit_command


async def test_one_step_brings_one_batch_with_every_running_request_and_its_gauges(start_worker, model_folder):
    gate = Gate()
    probe = await start_worker(FakeBackend(gate=gate))
    await probe.load(model_folder, max_prompts=2)
    probe.send(*(submit_command(request_id, max_tokens=10**6) for request_id in "abc"))
    batch = await step_until(probe, gate, decoding=2, waiting=1)
    assert [(output.request_id, len(output.token_ids)) for output in batch.outputs] == [("a", 1), ("b", 1)]
    assert batch.step_s > 0
    assert batch.rss_bytes > 0


async def test_max_prompts_changed_while_running_lets_the_waiting_in(start_worker, model_folder):
    gate = Gate()
    probe = await start_worker(FakeBackend(gate=gate))
    await probe.load(model_folder, max_prompts=1)
    probe.send(submit_command("a", max_tokens=10**6), submit_command("b", max_tokens=2))
    await asyncio.to_thread(gate.wait_until_reached)
    probe.send(SetMaxPrompts(max_prompts=2))
    gate.open()
    finished = [output.request_id async for output in probe.outputs("b") if output.finish is not None]
    assert finished == ["b"]


async def test_a_cancelled_request_says_nothing_more_and_others_go_on(start_worker, model_folder):
    gate = Gate()
    backend = FakeBackend(gate=gate)
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(submit_command("a", max_tokens=10**6), submit_command("b", max_tokens=500))
    await step_until(probe, gate, decoding=2)
    probe.send(Cancel(request_id="a"))
    await step_until(probe, gate, decoding=1)
    gate.open()
    rest = [output async for output in probe.outputs("b")]
    assert {output.request_id for output in rest} == {"b"}
    assert rest[-1].finish == "length"
    assert backend.cancelled == ["a", "b"]


async def test_a_cancel_that_leaves_the_worker_idle_is_seen_in_the_next_gauges(start_worker, model_folder):
    gate = Gate()
    backend = FakeBackend(gate=gate)
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(submit_command("a", max_tokens=10**6))
    await step_until(probe, gate, decoding=1)
    probe.send(Cancel(request_id="a"))
    gate.open()
    while (await probe.wait_for(StepBatch)).stats.decoding:
        pass
    assert backend.cancelled == ["a"]


async def test_a_failed_step_fails_who_was_in_it_and_the_worker_goes_on(start_worker, model_folder):
    gate = Gate()
    backend = FakeBackend(gate=gate)
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(submit_command("a", max_tokens=10**6), submit_command("b", max_tokens=10**6))
    await step_until(probe, gate, decoding=2)
    backend.fail_at_steps = frozenset([backend.steps + 1])
    gate.open()
    finished = {output.request_id: output async for output in probe.outputs("a", "b") if output.finish is not None}
    assert {output.error.code for output in finished.values()} == {"worker_failed"}
    assert finished["a"].error.message == f"the step failed: step {min(backend.fail_at_steps)} was told to fail"
    probe.send(submit_command("c", max_tokens=3))
    assert (await probe.answer("c"))[0] == expected_text(PROMPT_IDS, 3)


async def test_a_second_failed_step_in_a_row_ends_the_worker_with_its_reason(start_worker, model_folder):
    probe = await start_worker(FakeBackend(fail_at_steps=[1, 2]))
    await probe.load(model_folder)
    probe.send(submit_command("a"))
    await probe.answer("a")
    probe.send(submit_command("b"))
    _, last = await probe.answer("b")
    assert last.error.code == "worker_failed"
    assert "2 steps in a row failed: step 2" in (await probe.wait_for(WorkerError)).error.message
    assert (await probe.wait_for(WorkerExit)).code == 1


class LosesDevice(FakeBackend):
    """A FakeBackend that loses its device in the step `loses_at`, and cannot do anything from there on."""

    loses_at = 0

    def step(self) -> Sequence[TokenEvent]:
        """Step, or end the worker."""
        if self.steps + 1 == self.loses_at:
            raise WorkerFailed("the device is lost")
        return super().step()

    def unload(self) -> None:
        """Fail as every call into a lost device does."""
        if self.loaded is not None and self.loses_at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        super().unload()


async def test_a_lost_device_ends_the_worker_at_once_and_no_request(start_worker, model_folder):
    gate = Gate()
    backend = LosesDevice(gate=gate)
    probe = await start_worker(backend)
    await probe.load(model_folder, max_prompts=1)
    probe.send(*(submit_command(request_id, max_tokens=10**6) for request_id in "ab"))
    await step_until(probe, gate, decoding=1, waiting=1)
    backend.loses_at = backend.steps + 2  # the next step is in the backend's hands already
    gate.open()
    assert (await probe.wait_for(WorkerError)).error.message == "the device is lost"
    assert (await probe.wait_for(WorkerExit)).code == 1
    outputs = [output for event in probe.events if isinstance(event, StepBatch) for output in event.outputs]
    assert {output.request_id for output in outputs} == {"a"}
    assert {output.finish for output in outputs} == {None}


async def test_a_worker_that_lost_its_device_leaves_before_it_unloads_and_whatever_that_does(
    start_worker, model_folder
):
    backend = LosesDevice()
    backend.loses_at = 1
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(submit_command("a"))
    assert (await probe.wait_for(WorkerError)).error.message == "the device is lost"
    exit_ = await probe.wait_for(WorkerExit)
    assert (exit_.code, exit_.log_tail) == (1, "")


async def test_the_backends_accounts_are_checked_when_it_becomes_idle(start_worker, model_folder):
    backend = FakeBackend(check_error="free 3 + held 4 is not total 8")
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=2))
    await probe.answer("r")
    assert "free 3 + held 4" in (await probe.wait_for(WorkerError)).error.message
    assert backend.checks == 1


async def test_an_idle_worker_says_that_it_lives(start_worker, model_folder):
    probe = await start_worker(FakeBackend())
    batch = await probe.wait_for(StepBatch)
    assert (batch.outputs, batch.stats.steps) == ([], 0)


async def test_a_busy_step_never_holds_up_the_sender(start_worker, model_folder):
    gate = Gate()
    backend = FakeBackend(gate=gate, max_model_len=10**6)
    probe = await start_worker(backend)
    await probe.load(model_folder, max_prompts=64)
    probe.send(submit_command("first"))
    await asyncio.to_thread(gate.wait_until_reached)
    probe.send(*(submit_command(f"r{number}", "x" * 100_000, max_tokens=1) for number in range(16)))
    assert backend.submitted[1:] == []
    gate.open()
    ids = [f"r{number}" for number in range(16)]
    finished = {output.request_id: output.finish async for output in probe.outputs("first", *ids)}
    assert {finished[request_id] for request_id in ids} == {"length"}


async def test_a_failed_step_keeps_what_short_steps_before_it_brought(start_worker, model_folder):
    probe = await start_worker(FakeBackend(fail_at_steps=[4]))
    await probe.load(model_folder, max_prompts=MIN_BATCHED_REQUESTS)
    ids = [f"r{number}" for number in range(MIN_BATCHED_REQUESTS)]
    probe.send(*(submit_command(request_id, max_tokens=50) for request_id in ids))
    tokens, finishes = Counter(), []
    async for output in probe.outputs(*ids):
        tokens[output.request_id] += len(output.token_ids)
        finishes += [output.finish] if output.finish is not None else []
    assert dict(tokens) == dict.fromkeys(ids, 3)
    assert finishes == ["error"] * MIN_BATCHED_REQUESTS


async def test_what_steps_went_on_with_is_counted_once_though_ends_are_told_before_the_rest(start_worker, model_folder):
    """What the dispatcher learns of a step's cost would be wrong if steps were told with only those that ended."""
    probe = await start_worker(FakeBackend())
    await probe.load(model_folder, max_prompts=2 * MIN_BATCHED_REQUESTS)
    ids = [f"r{number}" for number in range(2 * MIN_BATCHED_REQUESTS)]
    probe.send(*(submit_command(request_id, max_tokens=10 + at) for at, request_id in enumerate(ids)))
    live, batches = set(ids), []
    while live:
        batches.append(await probe.wait_for(StepBatch))
        live -= {output.request_id for output in batches[-1].outputs if output.finish is not None}
    assert sum(batch.answers for batch in batches) == sum(9 + at for at in range(len(ids)))
    assert any(len(output.token_ids) > 1 for batch in batches for output in batch.outputs)


async def test_unloading_happens_when_the_worker_ends(start_worker, model_folder):
    backend = FakeBackend()
    probe = await start_worker(backend)
    await probe.load(model_folder)
    await probe.host.stop(PATIENCE_S)
    assert backend.loaded is None
    assert probe.exits == [WorkerExit(code=0)]


async def test_a_killed_thread_is_abandoned_and_its_end_told_once(start_worker, model_folder):
    gate = Gate()
    probe = await start_worker(FakeBackend(gate=gate))
    await probe.load(model_folder)
    probe.send(submit_command("r"))
    await asyncio.to_thread(gate.wait_until_reached)
    probe.host.kill()
    await probe.wait_for(WorkerExit)
    probe.host.kill()
    await probe.host.stop(0.0)
    assert len(probe.exits) == 1


async def test_an_event_that_its_listener_trips_over_does_not_cost_the_channel(model_folder):
    seen: list[object] = []

    class Clumsy(Probe):
        def _on_event(self, event):
            super()._on_event(event)
            if isinstance(event, Loaded):
                seen.append(event)
                raise RuntimeError("tripped")

    probe = await Clumsy(ThreadHost("w0", backend_factory=lambda spec: FakeBackend())).start()
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=2))
    assert (await probe.answer("r"))[0] == expected_text(PROMPT_IDS, 2)
    assert len(seen) == 1
    await probe.host.stop(PATIENCE_S)


async def test_what_changed_in_the_prefix_cache_is_told_with_the_step(start_worker, model_folder):
    gate = Gate()
    backend = FakeBackend(gate=gate)
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(submit_command("r"))
    await asyncio.to_thread(gate.wait_until_reached)
    backend.changes = PrefixChanges(added=(b"8 bytes.",), dropped=(b"8 others",))
    gate.allow(2)
    while not (batch := await probe.wait_for(StepBatch)).outputs:
        assert batch.prefix == PrefixChanges()
    assert batch.prefix == PrefixChanges(added=(b"8 bytes.",), dropped=(b"8 others",))
    assert (await probe.wait_for(StepBatch)).prefix == PrefixChanges()
