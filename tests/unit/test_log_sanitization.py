"""Nothing that a log line quotes steers a terminal, nor begins a line of its own; and no label of a metric does."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from console.api.http.observability import AccessLine, _encode
from console.api.http.traffic import CallFailure, Traffic, readable
from console.api.metrics import SnapshotCollector
from console.runtime.logs import logging_to
from engine.system.log import LogRing
from engine.text.printable import ANY_UNSAFE
from engine.worker_process.channel import WorkerChannel
from engine.worker_process.logs import NativeOutput, forwarded_logs
from engine.worker_process.protocol import Event, LogLine
from tests.fakes import fleet_scenes
from tests.fakes.hostile import HOSTILE, hostile


def is_clean(text: str) -> bool:
    """Whether it is lines, perhaps with tabs, that steer nothing."""
    return ANY_UNSAFE.search(text.replace("\n", "").replace("\t", "")) is None


def log_hostile_things() -> None:
    """A line, one that would begin another, and an error with its traceback."""
    log = logging.getLogger("engine.part")
    log.warning("cannot load %s", HOSTILE)
    log.warning("cannot load %s", "x\n2026-01-01 00:00:00,000 ERROR   engine: forged")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.exception("no %s", HOSTILE, stack_info=True)


def test_stderr_the_log_file_and_the_ring_are_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = LogRing()
    with logging_to(ring, tmp_path, stderr="info"):
        log_hostile_things()
    written = (tmp_path / "ericllm.log").read_text()
    for text in (written, capsys.readouterr().err, *(line.message for line in ring.after(0)[1])):
        assert is_clean(text)
        assert r"\x1b]52;c;QQ==" in text or "forged" in text
    assert [line for line in written.splitlines() if line.startswith("2026-01-01 00:00:00,000 ERROR")] == []
    assert "in log_hostile_things\n    raise ValueError(HOSTILE)\nValueError: \\x1b]52;c;QQ==" in written


def test_lines_of_a_worker_are_clean_before_they_leave_it() -> None:
    class Channel:
        """Keeps what is sent."""

        events: list[Event] = []  # noqa: RUF012

        def send(self, event: Event) -> None:
            self.events.append(event)

    with forwarded_logs(cast("WorkerChannel", Channel())):
        log_hostile_things()
    lines = [event.message for event in Channel.events if isinstance(event, LogLine)]
    assert len(lines) > 5 and all(map(is_clean, lines)) and not any("\n" in line for line in lines)


async def test_native_output_is_clean_in_the_file_the_log_and_the_tail(tmp_path: Path) -> None:
    lines: list[LogLine] = []
    output = NativeOutput(lines.append, tmp_path / "w0.log")
    os.write(output.child_fd, f"10%\r20%\r\none\ttwo\n{HOSTILE}\n".encode() + b"\x9b6n \xff\n")
    output.started()
    await asyncio.sleep(0)
    output.finish()
    written = (tmp_path / "w0.log").read_text()
    assert written.startswith("10%\n20%\n\none\ttwo\n\\x1b]52")
    for text in (written, output.tail, *(line.message for line in lines)):
        assert is_clean(text)
    assert [line.message for line in lines][:3] == ["10%", "20%", "one\ttwo"]


def test_no_label_of_a_metric_steers_a_terminal_and_all_can_be_parsed() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(lambda: hostile(fleet_scenes.two_models())))
    for generate, parse in (
        (generate_latest, text_string_to_metric_families),
        (generate_openmetrics, parse_openmetrics),
    ):
        text = generate(registry).decode()
        assert is_clean(text)
        labels = {value for family in parse(text) for sample in family.samples for value in sample.labels.values()}
        assert any(label.startswith(r"\x1b]52;c;QQ==\x1b") for label in labels)


def test_the_access_log_is_clean_json_that_says_what_was_asked() -> None:
    names = {field.name for field in msgspec.structs.fields(AccessLine)}
    texts: dict[str, Any] = dict.fromkeys(names, None) | dict.fromkeys(
        ("time", "id", "client", "key", "agent", "method", "path", "dialect", "model", "error"), HOSTILE
    )
    numbers = dict.fromkeys(("status", "prompt_tokens", "cached_tokens", "output_tokens", "total_s", "bytes"), 1)
    line = AccessLine(**{**texts, **numbers, "answers": [HOSTILE], "finish_reasons": []})
    encoded = _encode(line)
    assert ANY_UNSAFE.search(encoded.decode()) is None
    assert msgspec.json.decode(encoded, type=AccessLine) == line


async def test_what_a_client_says_of_itself_is_shown_as_escapes() -> None:
    traffic = Traffic()
    call = traffic.enter("10.0.0.1", f"agent/{HOSTILE}", "GET", f"/z{HOSTILE}")
    call.failure = CallFailure(401, "invalid_api_key", f"no {HOSTILE}")
    traffic.admit(call, "")
    (client,) = traffic.clients()
    traffic.leave(call)
    (failure,) = traffic.failures()
    for text in (client.program, failure.path, failure.message):
        assert r"\x1b]52;c;QQ==\x1b" in text and ANY_UNSAFE.search(text) is None
    assert readable("half \ud800 of a character") == r"half \ud800 of a character"
