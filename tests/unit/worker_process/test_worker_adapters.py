"""Adapters that a worker takes, brings along and gives up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from engine.config import AdapterSpec
from engine.errors import UnsupportedModel
from engine.worker_process.protocol import Attach, Attached, Cancel, Detach, Loaded
from tests.fakes.backend import FakeBackend, Gate, saying
from tests.fakes.worker import load_command, step_until, submit_command


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
    assert (good.key, good.size_bytes, good.error) == ("good", 1000, None)
    assert (bad.key, bad.error.message) == ("bad", "it does not fit")
    assert broken.error.message == "the adapter broken could not be attached: no rank"


async def test_a_load_brings_its_adapters_along_and_survives_one_that_fails(start_worker, model_folder):
    backend = Picky()
    probe = await start_worker(backend)
    load = msgspec.structs.replace(load_command(model_folder), adapters=(adapter("bad"), adapter("good")))
    probe.send(load)
    await probe.wait_for(Loaded)
    answers = [await probe.wait_for(Attached) for _ in range(2)]
    assert [(answer.key, answer.error is None) for answer in answers] == [("bad", False), ("good", True)]
    assert list(backend.adapters) == ["good"]


async def test_an_adapter_is_detached_when_the_last_request_that_names_it_has_ended(start_worker, model_folder):
    gate = Gate()
    backend = FakeBackend(gate=gate)
    probe = await start_worker(backend)
    await probe.load(model_folder)
    probe.send(Attach(adapter=adapter("it")), Attach(adapter=adapter("idle")))
    probe.send(submit_command("a", adapter="it", max_tokens=10**6), submit_command("b", max_tokens=10**6))
    await step_until(probe, gate, decoding=2)
    probe.send(Detach(key="it"), Detach(key="idle"))
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
    probe.send(Detach(key="it"), Attach(adapter=adapter("it")), Cancel(request_id="a"), submit_command("b"))
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
    probe.send(Detach(key="it"))
    gate.open()
    text, last = await probe.answer("a")
    assert last.finish == "length"
    assert len(backend.submitted) == 2
    assert "bad" not in text
