"""Alerts, marks and log lines of the engine when something goes wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.errors import EngineError, InsufficientMemory
from tests.fakes.backend import FakeBackend, expected_text
from tests.fakes.engines import Backends, DyingBackend, ask, read, serving, started, until, worker
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
        assert "1 of its requests went back to the queue" in alert.done
        assert [(mark.kind, mark.text) for mark in engine.publish().marks if mark.kind == "worker"] == [
            ("worker", "w0 died")
        ]
    assert [line for line in caplog.messages if line.startswith("w0 is ready again after")] != []


async def test_a_load_that_fails_is_an_alert_of_the_model_alone(tmp_path: Path) -> None:
    async with started(Backends(FakeBackend(load_error=InsufficientMemory("out of memory")))) as engine:
        with pytest.raises(EngineError):
            await engine.load(fake_spec(tmp_path))
        (alert,) = engine.publish().alerts
        assert (alert.cause, alert.subject) == ("out_of_memory", fake_spec(tmp_path).name)
        assert "could not be loaded" in alert.text
        assert "fewer workers" in alert.advice


async def test_a_load_is_marked(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends()) as engine:
        assert [mark.kind for mark in engine.publish().marks] == ["load"]


async def test_requests_that_fail_are_counted_for_a_minute(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(FakeBackend(fail_at_steps=[3]))) as engine:
        assert (await read(engine.submit(ask("x")))).last.finish == "error"
        assert (await read(engine.submit(ask("y")))).last.finish == "length"
        assert engine.publish().errors_per_min == 1
