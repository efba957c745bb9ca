"""The worker's loop, in a thread, with a backend that the test paces."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from engine.backends.base import PrefixChanges
from engine.config import AdapterSpec
from engine.errors import UnsupportedModel
from engine.worker.hosts import ThreadHost, WorkerExit
from engine.worker.outbox import CROWD
from engine.worker.protocol import (
    Attach,
    Attached,
    Cancel,
    CancelLoad,
    Detach,
    Loaded,
    LoadFailed,
    LogLine,
    Progress,
    SetMaxPrompts,
    Shutdown,
    StepBatch,
    WorkerError,
)
from tests.fakes.backend import FakeBackend, Gate, expected_text, saying
from tests.fakes.model import EOS_ID, write_fake_model
from tests.fakes.worker import Probe, load_command, submit_command

StartWorker = Callable[[FakeBackend], Awaitable[Probe]]
PROMPT_IDS = list(b"hello")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return write_fake_model(tmp_path / "fake")


@pytest.fixture
async def start_worker() -> AsyncIterator[StartWorker]:
    """Starts workers around given backends; stops them, and opens their gates, afterwards."""
    started: list[tuple[Probe, FakeBackend]] = []

    async def start(backend: FakeBackend) -> Probe:
        probe = Probe(ThreadHost(f"w{len(started)}", backend_factory=lambda spec: backend))
        started.append((probe, backend))
        return await probe.start()

    yield start
    for probe, backend in started:
        for gate in (backend.gate, backend.load_gate):
            if gate is not None:
                gate.open()
        await probe.host.stop(5.0)
        assert len(probe.exits) == 1


async def test_a_request_streams_one_output_per_step_and_ends_at_max_tokens(start_worker, model_folder):
    probe = await start_worker(FakeBackend())
    assert (await probe.load(model_folder)).model.backend == "fake"
    probe.send(submit_command("r", max_tokens=5))
    outputs = [output async for output in probe.outputs("r")]
    assert [len(output.token_ids) for output in outputs] == [1] * 5
    assert "".join(output.text for output in outputs) == expected_text(PROMPT_IDS, 5)
    assert [output.finish for output in outputs] == [None] * 4 + ["length"]
    assert outputs[0].cached_tokens == 0


async def test_an_end_token_ends_the_answer_and_makes_no_text(start_worker, model_folder):
    probe = await start_worker(FakeBackend(reply=saying("hi", then=EOS_ID)))
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=50))
    text, last = await probe.answer("r")
    assert (text, last.finish, last.token_ids) == ("hi", "stop", [EOS_ID])


async def test_a_stop_string_across_tokens_is_held_back_and_never_shown(start_worker, model_folder):
    backend = FakeBackend(reply=saying("answer END more"))
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=50, stop=("END",)))
    outputs = [output async for output in probe.outputs("r")]
    assert "".join(output.text for output in outputs) == "answer "
    assert sum(len(output.token_ids) for output in outputs) == len("answer END")
    assert outputs[-1].finish == "stop"
    assert backend.cancelled == ["r"]


async def test_text_held_for_a_stop_string_is_shown_when_the_answer_ends_otherwise(start_worker, model_folder):
    probe = await start_worker(FakeBackend(reply=saying("so EN", then=EOS_ID)))
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=50, stop=("END",)))
    text, last = await probe.answer("r")
    assert (text, last.text, last.finish) == ("so EN", "EN", "stop")


async def test_a_character_of_several_tokens_is_shown_once_whole(start_worker, model_folder):
    probe = await start_worker(FakeBackend(reply=saying("é😀", then=EOS_ID)))
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=50))
    texts = [output.text async for output in probe.outputs("r")]
    assert texts == ["", "é", "", "", "", "😀", ""]


async def test_a_resumed_request_emits_only_what_comes_after_its_tokens(start_worker, model_folder):
    whole = expected_text(PROMPT_IDS, 10)
    backend = FakeBackend()
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(submit_command("r", generated=whole[:4], max_tokens=10))
    text, last = await probe.answer("r")
    assert (text, last.finish) == (whole[4:], "length")


async def test_a_resumed_request_whose_tokens_end_it_is_finished_at_once(start_worker, model_folder):
    backend = FakeBackend()
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(submit_command("r", generated="abcd", max_tokens=4))
    text, last = await probe.answer("r")
    assert (text, last.finish, backend.submitted) == ("", "length", [])


async def step_until(probe: Probe, gate: Gate, *, decoding: int, waiting: int = 0) -> StepBatch:
    """Let steps through one by one until that many requests are on their way; the batch that says so."""
    while True:
        gate.allow(1)
        batch = await probe.wait_for(StepBatch)
        if (batch.stats.decoding, batch.stats.waiting) == (decoding, waiting):
            await asyncio.to_thread(gate.wait_until_reached)
            return batch


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
    gate.open()
    while (await probe.wait_for(StepBatch)).stats.decoding != 1:
        pass
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


async def test_a_prompt_that_the_backend_refuses_ends_with_its_typed_error(start_worker, model_folder):
    probe = await start_worker(FakeBackend(max_model_len=4))
    await probe.load(model_folder)
    probe.send(submit_command("r", "too long for it"))
    _, last = await probe.answer("r")
    assert last.finish == "error"
    assert last.error.code == "context_length_exceeded"
    assert last.error.details == {"prompt_tokens": 15, "limit": 4}


async def test_a_request_without_a_model_is_refused(start_worker, model_folder):
    probe = await start_worker(FakeBackend())
    probe.send(submit_command("r"))
    _, last = await probe.answer("r")
    assert last.error.code == "no_model_loaded"


async def test_a_load_reports_the_first_and_last_of_each_phase(start_worker, model_folder):
    probe = await start_worker(FakeBackend(load_steps=1000))
    await probe.load(model_folder)
    reports = [event.progress for event in probe.events if isinstance(event, Progress)]
    weights = [report for report in reports if report.phase == "weights"]
    assert (weights[0].done, weights[-1].done) == (0, weights[-1].total)
    assert reports[-1].phase == "kv_cache"
    assert len(reports) < 500


async def test_a_load_is_cancelled_between_two_reports_and_the_worker_stays_usable(start_worker, model_folder):
    load_gate = Gate(2)
    backend = FakeBackend(load_gate=load_gate)
    probe = await start_worker(backend)
    probe.send(load_command(model_folder))
    await asyncio.to_thread(load_gate.wait_until_reached)
    probe.send(CancelLoad())
    assert (await probe.wait_for(LoadFailed)).error.code == "load_cancelled"
    assert backend.loaded is None
    load_gate.open()
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=2))
    assert (await probe.answer("r"))[0] == expected_text(PROMPT_IDS, 2)


async def test_a_cancel_that_comes_right_behind_its_load_is_not_lost(start_worker, model_folder):
    gate = Gate()
    backend = FakeBackend(gate=gate)
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(submit_command("r"))
    await asyncio.to_thread(gate.wait_until_reached)
    backend.load_gate = Gate()
    probe.send(load_command(model_folder), CancelLoad())
    gate.open()
    assert (await probe.wait_for(LoadFailed)).error.code == "load_cancelled"


async def test_a_shutdown_during_a_load_ends_it(start_worker, model_folder):
    load_gate = Gate()
    probe = await start_worker(FakeBackend(load_gate=load_gate))
    probe.send(load_command(model_folder))
    await asyncio.to_thread(load_gate.wait_until_reached)
    probe.send(Shutdown())
    assert (await probe.wait_for(LoadFailed)).error.code == "load_cancelled"
    assert (await probe.wait_for(WorkerExit)).code == 0


async def test_an_unexpected_load_error_is_one_sentence_with_its_traceback_in_the_log_alone(start_worker, model_folder):
    backend = FakeBackend(load_error=ZeroDivisionError("weights are\nnot numbers"))
    probe = await start_worker(backend)
    probe.send(load_command(model_folder))
    error = (await probe.wait_for(LoadFailed)).error
    assert (error.code, error.message) == ("model_load_failed", "fake could not be loaded: weights are")
    log = [event.message for event in probe.events if isinstance(event, LogLine)]
    assert any("Traceback" in line for line in log)
    backend.load_error = None
    assert (await probe.load(model_folder)).model.parameters == 1000


async def test_a_folder_without_a_tokenizer_fails_the_load_by_name(start_worker, tmp_path):
    probe = await start_worker(FakeBackend())
    probe.send(load_command(tmp_path))
    assert (await probe.wait_for(LoadFailed)).error.code == "unsupported_model"


async def test_a_second_load_takes_the_place_of_the_first(start_worker, model_folder):
    backend = FakeBackend()
    probe = await start_worker(backend)
    await probe.load(model_folder, max_prompts=1)
    await probe.load(model_folder, max_prompts=3)
    assert backend.max_prompts == 3


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


async def test_logprobs_come_one_for_each_token(start_worker, model_folder):
    probe = await start_worker(FakeBackend())
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=3, logprobs=0))
    outputs = [output async for output in probe.outputs("r")]
    assert [[entry.token_id for entry in output.logprobs] for output in outputs] == [
        output.token_ids for output in outputs
    ]


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
    await probe.load(model_folder, max_prompts=CROWD)
    ids = [f"r{number}" for number in range(CROWD)]
    probe.send(*(submit_command(request_id, max_tokens=50) for request_id in ids))
    tokens, finishes = Counter(), []
    async for output in probe.outputs(*ids):
        tokens[output.request_id] += len(output.token_ids)
        finishes += [output.finish] if output.finish is not None else []
    assert dict(tokens) == dict.fromkeys(ids, 3)
    assert finishes == ["error"] * CROWD


async def test_what_steps_went_on_with_is_counted_once_though_ends_are_told_before_the_rest(start_worker, model_folder):
    """What the dispatcher learns of a step's cost would be wrong if steps were told with only those that ended."""
    probe = await start_worker(FakeBackend())
    await probe.load(model_folder, max_prompts=2 * CROWD)
    ids = [f"r{number}" for number in range(2 * CROWD)]
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
    await probe.host.stop(5.0)
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
    await probe.host.stop(5.0)


# --- adapters -------------------------------------------------------------------------------------


class Picky(FakeBackend):
    """Takes no adapter called "bad", and breaks over one called "broken"."""

    def attach(self, adapter: AdapterSpec) -> int:
        if adapter.name == "bad":
            raise UnsupportedModel("it does not fit")
        if adapter.name == "broken":
            raise ZeroDivisionError("no rank")
        return super().attach(adapter)


def adapter(name: str) -> AdapterSpec:
    return AdapterSpec(name=name, path=Path("/adapters") / name)


async def test_each_attachment_is_answered_with_its_bytes_or_the_reason(start_worker, model_folder):
    probe = await start_worker(Picky())
    probe.send(Attach(adapter=adapter("early")))
    assert (await probe.wait_for(Attached)).error.code == "no_model_loaded"
    await probe.load(model_folder)
    probe.send(*(Attach(adapter=adapter(name)) for name in ("good", "bad", "broken")))
    good, bad, broken = [await probe.wait_for(Attached) for _ in range(3)]
    assert (good.name, good.size_bytes, good.error) == ("good", 1000, None)
    assert (bad.name, bad.error.message) == ("bad", "it does not fit")
    assert broken.error.message == "the adapter broken could not be attached: no rank"


async def test_a_load_brings_its_adapters_along_and_survives_one_that_fails(start_worker, model_folder):
    backend = Picky()
    probe = await start_worker(backend)
    load = msgspec.structs.replace(load_command(model_folder), adapters=(adapter("bad"), adapter("good")))
    probe.send(load)
    await probe.wait_for(Loaded)
    answers = [await probe.wait_for(Attached) for _ in range(2)]
    assert [(answer.name, answer.error is None) for answer in answers] == [("bad", False), ("good", True)]
    assert list(backend.adapters) == ["good"]


async def test_an_adapter_is_detached_when_the_last_request_that_names_it_has_ended(start_worker, model_folder):
    gate = Gate()
    backend = FakeBackend(gate=gate)
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(Attach(adapter=adapter("it")), Attach(adapter=adapter("idle")))
    probe.send(submit_command("a", adapter="it", max_tokens=10**6), submit_command("b", max_tokens=10**6))
    await step_until(probe, gate, decoding=2)
    probe.send(Detach(name="it"), Detach(name="idle"))
    while "idle" in backend.adapters:
        await step_until(probe, gate, decoding=2)
    assert list(backend.adapters) == ["it"]
    probe.send(Cancel(request_id="a"))
    while backend.adapters:
        await step_until(probe, gate, decoding=1)


async def test_an_adapter_attached_again_before_it_could_go_stays(start_worker, model_folder):
    gate = Gate()
    backend = FakeBackend(gate=gate)
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(Attach(adapter=adapter("it")), submit_command("a", adapter="it", max_tokens=10**6))
    await step_until(probe, gate, decoding=1)
    probe.send(Detach(name="it"), Attach(adapter=adapter("it")), Cancel(request_id="a"), submit_command("b"))
    gate.open()
    await probe.answer("b")
    assert list(backend.adapters) == ["it"]


async def test_a_banned_string_is_gone_round_under_an_adapter_that_is_to_go(start_worker, model_folder):
    class Naming(FakeBackend):
        """Refuses requests for adapters that are not there, as a real backend does."""

        def submit(self, request, mask=None):
            if request.adapter and request.adapter not in self.adapters:
                raise UnsupportedModel(f"no adapter {request.adapter}")
            super().submit(request)

    gate = Gate()
    backend = Naming(gate=gate, reply=saying("a bad end"))
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(Attach(adapter=adapter("it")))
    probe.send(submit_command("a", adapter="it", banned_strings=("bad",), max_tokens=9))
    await asyncio.to_thread(gate.wait_until_reached)
    probe.send(Detach(name="it"))
    gate.open()
    text, last = await probe.answer("a")
    assert last.finish == "length"
    assert len(backend.submitted) == 2
    assert "bad" not in text


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
