"""Alerts, marks and log lines of the engine when something goes wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.backends.base import BackendStats, KvTierStats, LoadedModel, LoadProgress
from engine.config import ModelSpec
from engine.errors import EngineError, InsufficientMemory, NodeGone
from engine.worker_process.hosts import ThreadHost
from engine.workers.replica import Replica
from tests.fakes.backend import FakeBackend, Gate, expected_text
from tests.fakes.engines import Backends, DyingBackend, all_ready, ask, read, serving, started, until, worker
from tests.fakes.model import fake_spec


async def test_a_workers_death_is_an_alert_a_mark_and_its_return_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="engine")
    async with serving(tmp_path, Backends(DyingBackend(dies_at=3))) as engine:
        answer = await read(engine.submit(ask("hello", max_tokens=12)))
        assert answer.text == expected_text(b"hello", 12)
        await until(lambda: worker(engine, "w0").state == "ready")
        (alert,) = engine.publish().alerts
        assert (alert.subject, alert.count, alert.level) == ("w0", 1, "error")
        assert "w0" in alert.text and alert.advice
        assert alert.done.startswith("Restarted; ready again after")
        assert "1 of its requests requeued" in alert.done
        assert [(mark.kind, mark.text) for mark in engine.publish().marks if mark.kind == "worker"] == [
            ("worker", "w0: crashed")
        ]
    assert [line for line in caplog.messages if line.startswith("w0 is ready again after")] != []


async def test_starts_on_a_machine_that_is_away_are_no_further_alert_mark_or_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, start = 0, ThreadHost.start

    async def away_for_a_while(host: ThreadHost, *listeners: Any) -> None:
        nonlocal starts
        starts += 1
        if 1 < starts < 9:
            raise NodeGone("worker w0 cannot run on left: it is not in the cluster")
        await start(host, *listeners)

    monkeypatch.setattr(ThreadHost, "start", away_for_a_while)
    knobs = {"restart_backoff_s": 0.001, "max_restart_backoff_s": 0.01}
    async with serving(tmp_path, Backends(DyingBackend(dies_at=3)), **knobs) as engine:
        assert (await read(engine.submit(ask("hello", max_tokens=12)))).text == expected_text(b"hello", 12)
        await until(lambda: worker(engine, "w0").state == "ready")
        (alert,) = engine.publish().alerts
        assert (alert.count, starts, worker(engine, "w0").restarts) == (1, 9, 1)
        assert "cannot run" not in alert.text and alert.done.startswith("Restarted; ready again after")
        assert [mark.text for mark in engine.publish().marks if mark.kind == "worker"] == ["w0: crashed"]


async def test_a_load_that_fails_is_an_alert_of_the_model_alone(tmp_path: Path) -> None:
    async with started(Backends(FakeBackend(load_error=InsufficientMemory("out of memory")))) as engine:
        with pytest.raises(EngineError):
            await engine.load(fake_spec(tmp_path))
        (alert,) = engine.publish().alerts
        assert [mark.kind for mark in engine.publish().marks] == ["failure"]
        assert (alert.cause, alert.subject) == ("out_of_memory", fake_spec(tmp_path).name)
        assert "could not be loaded" in alert.text
        assert "fewer workers" in alert.advice


async def test_a_load_an_unload_and_a_drain_are_marked(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends()) as engine:
        await engine.drain()
        await engine.resume()
        await engine.unload()
        assert [mark.kind for mark in engine.publish().marks] == ["load", "drain", "drain", "unload"]


class OutOfMemoryBackend(FakeBackend):
    """A FakeBackend whose third step runs out of memory; it goes on with a lower limit, or fails its requests."""

    def __init__(self, prompts_limit: int, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._prompts_limit = prompts_limit

    def stats(self) -> BackendStats:
        """Count it."""
        failed = int(self.steps >= 3)
        return msgspec.structs.replace(super().stats(), oom_steps=failed, prompts_limit=failed * self._prompts_limit)


@pytest.mark.parametrize(
    ("backend", "level", "done"),
    [
        (OutOfMemoryBackend(2), "warning", "Its max prompts is now 2."),
        (OutOfMemoryBackend(0), "warning", "Its steps are smaller from now on."),
        (OutOfMemoryBackend(0, fail_at_steps=[3]), "error", "1 of its requests failed."),
    ],
    ids=["fewer requests", "smaller steps", "failed"],
)
async def test_a_step_that_runs_out_of_memory_is_an_alert_and_a_mark(
    tmp_path: Path, backend: FakeBackend, level: str, done: str
) -> None:
    async with serving(tmp_path, Backends(backend)) as engine:
        await read(engine.submit(ask("x")))
        (alert,) = engine.publish().alerts
        assert (alert.cause, alert.subject, alert.count) == ("out_of_memory", "w0", 1)
        assert (alert.level, alert.done) == (level, done)
        assert [mark.text for mark in engine.publish().marks if mark.kind == "failure"] == ["w0: out of memory"]


class TierBackend(FakeBackend):
    """A FakeBackend with a tier of the KV cache that has this problem."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self._tiers = (KvTierStats(name="disk", problem=problem),)

    def stats(self) -> BackendStats:
        """Add the tier."""
        return msgspec.structs.replace(super().stats(), kv_tiers=self._tiers)


async def test_a_tier_that_fails_one_of_two_workers_is_one_alert(tmp_path: Path) -> None:
    backends = Backends(TierBackend("the disk is full"), TierBackend(""))
    async with serving(tmp_path, backends, num_workers=2) as engine:
        await all_ready(engine)
        await asyncio.gather(*(read(engine.submit(ask(name, max_tokens=20))) for name in "abcd"))
        assert all(each.stats.kv_tiers for each in engine.publish().workers), "both made steps"
        (alert,) = engine.publish().alerts
        assert (alert.cause, alert.text, alert.count) == ("kv_tier", "the disk is full", 1)


class SlowDiskBackend(FakeBackend):
    """A FakeBackend that reads its weights at 2 KB/s."""

    def load(self, spec: ModelSpec, *, report: Callable[[LoadProgress], None], **settings: Any) -> LoadedModel:
        """Report the rate."""

        def slow(progress: LoadProgress) -> None:
            rate = 2000.0 if progress.phase == "weights" else None
            report(msgspec.structs.replace(progress, slow_bytes_per_s=rate))

        return super().load(spec, report=slow, **settings)


async def test_a_load_that_waits_for_its_disk_is_an_alert_until_the_weights_are_read(tmp_path: Path) -> None:
    gate = Gate(2)
    async with started(Backends(SlowDiskBackend(load_gate=gate))) as engine:
        loading = asyncio.ensure_future(engine.load(fake_spec(tmp_path)))
        await until(lambda: engine.publish().alerts)
        (alert,) = engine.publish().alerts
        assert (alert.cause, alert.subject, alert.level) == ("slow_disk", fake_spec(tmp_path).name, "warning")
        assert str(tmp_path) in alert.text and "0.00191 MiB/s, 2 s left" in alert.text
        assert "SSD" in alert.advice
        gate.open()
        await loading
        (alert,) = engine.publish().alerts
        assert (alert.done, alert.count) == ("Reading has ended.", 1)


async def test_a_stall_is_an_alert_until_the_worker_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stalled_s: float | None = 15.0
    monkeypatch.setattr(Replica, "stalled_s", lambda replica, now: stalled_s if replica.active else None)
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate)), hang_s=60.0) as engine:
        stream = engine.submit(ask("x"))
        await until(lambda: engine.publish().alerts)
        (alert,) = engine.publish().alerts
        assert (alert.cause, alert.subject, alert.level) == ("stalled", "w0", "warning")
        assert alert.text == "w0 made no step for 15 s with 1 request"
        assert alert.done == "It is replaced after 60 s without a report."
        stalled_s = None
        await until(lambda: engine.publish().alerts[0].done == "It went on after 15 s.")
        gate.open()
        await read(stream)
        assert engine.publish().alerts[0].count == 1


async def test_requests_that_fail_are_counted_for_a_minute(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(FakeBackend(fail_at_steps=[3]))) as engine:
        assert (await read(engine.submit(ask("x")))).last.finish == "error"
        assert (await read(engine.submit(ask("y")))).last.finish == "length"
        assert engine.publish().errors_per_min == 1
