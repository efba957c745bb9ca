"""A fake model and workers in threads, stopped when their test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.worker_process.hosts import ThreadHost
from tests.fakes.backend import PATIENCE_S, FakeBackend
from tests.fakes.model import write_fake_model
from tests.fakes.worker import Probe, StartWorker


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
        await probe.host.stop(PATIENCE_S)
        assert len(probe.exits) == 1
