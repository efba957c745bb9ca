"""Loads as a worker does them: told, cancelled, failed, and one after another."""

from __future__ import annotations

import asyncio

from engine.worker_process.hosts import WorkerExit
from engine.worker_process.protocol import CancelLoad, LoadFailed, LogLine, Progress, Shutdown
from tests.fakes.backend import FakeBackend, Gate, expected_text
from tests.fakes.worker import PROMPT_IDS, load_command, submit_command


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
