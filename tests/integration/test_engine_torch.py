"""The engine over the real torch backend, in real processes, on a tiny random model.

In float32: in bfloat16 a sum may round differently in another batch, killed workers or not.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec, SamplingParams
from engine.engine import Engine
from tests.fakes.engines import all_ready, ask, config, read, until
from tests.fakes.held import Hold
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

SETTINGS = (
    SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True, seed=1),
    SamplingParams(max_tokens=150, temperature=1.3, top_p=0.9, ignore_eos=True, seed=2),
    SamplingParams(max_tokens=150, repetition_penalty=1.2, frequency_penalty=0.3, ignore_eos=True, seed=3),
)


async def test_a_killed_worker_changes_no_token_greedy_or_seeded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hold = Hold(monkeypatch, tmp_path, "make_torch")
    folder = make_tiny_model(tmp_path / "model")
    engine = Engine(config(worker_host="process", num_workers=2))
    await engine.start()
    try:
        await engine.load(ModelSpec(path=folder, name="tiny", threads=1, kv_cache_tokens=4096, dtype="float32"))
        await all_ready(engine)
        requests = [ask(f"marker {number}", params=params) for params in SETTINGS for number in range(2)]
        undisturbed = [await read(engine.submit(request)) for request in requests]

        hold.begin()
        reading = [asyncio.create_task(read(engine.submit(request))) for request in requests]
        await until(lambda: sum(row.state == "decode" for row in engine.publish().requests) == len(requests))
        busiest = max(engine.publish().workers, key=lambda worker: worker.active)
        assert busiest.pid is not None
        os.kill(busiest.pid, signal.SIGKILL)
        hold.end()
        disturbed = await asyncio.gather(*reading)

        assert engine.publish().totals.requeued > 0
        assert [answer.token_ids for answer in disturbed] == [answer.token_ids for answer in undisturbed]
        assert [answer.text for answer in disturbed] == [answer.text for answer in undisturbed]
        device = engine.publish().devices[-1]
        assert device.weights_bytes > 0
        assert device.kv_bytes > 0
    finally:
        await engine.close(drain_s=0.0)


class LosesDevice(ModelRunner):
    """A runner whose device is lost in the `LOST_AT`th step of the first worker, for good."""

    LOST_AT = 12
    first: ClassVar[LosesDevice | None] = None
    steps = 0

    def forward(self, *step: Any) -> Tensor:
        """A step, or what every call into a lost device raises."""
        if LosesDevice.first in (None, self):
            LosesDevice.first = self
            self.steps += 1
            if self.steps >= self.LOST_AT:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return super().forward(*step)


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_lost_device_costs_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int) -> None:
    folder = make_tiny_model(tmp_path / "model")
    monkeypatch.setattr(LosesDevice, "first", None)
    engine = Engine(config(num_workers=workers, max_prompts=2), backend_factory=lambda spec: TorchBackend(LosesDevice))
    await engine.start()
    try:
        await engine.load(ModelSpec(path=folder, name="tiny", kv_cache_tokens=4096, dtype="float32"))
        await all_ready(engine)
        requests = [ask(f"marker {number}", params=SETTINGS[0]) for number in range(8)]
        answers = await asyncio.gather(*(read(engine.submit(request)) for request in requests))
        assert [(len(answer.token_ids), answer.last.finish) for answer in answers] == [(150, "length")] * 8
        snapshot = engine.publish()
        assert sum(worker.restarts for worker in snapshot.workers) == 1
        assert 0 < snapshot.totals.requeued <= 2
    finally:
        await engine.close(drain_s=0.0)
