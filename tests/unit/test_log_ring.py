"""The log ring and the handler that fills it."""

from __future__ import annotations

import logging
import threading

from engine.snapshot import LogEntry
from engine.system.log import MAX_LINE, LogRing, RingHandler


def messages(ring: LogRing, after: int = 0) -> list[str]:
    return [entry.message for entry in ring.after(after)[1]]


def test_the_ring_keeps_the_newest_lines_and_the_total() -> None:
    ring = LogRing(capacity=3)
    for number in range(5):
        ring.append(logging.INFO, "engine", f"line {number}")
    assert ring.total == 5
    assert messages(ring) == ["line 2", "line 3", "line 4"]


def test_only_lines_after_those_seen_are_given() -> None:
    ring = LogRing()
    for number in range(4):
        ring.append(logging.INFO, "engine", f"line {number}")
    assert messages(ring, after=3) == ["line 3"]
    assert messages(ring, after=4) == []
    assert messages(ring, after=9) == []


def test_a_line_of_a_book_is_kept_as_it_begins() -> None:
    ring = LogRing()
    ring.add(LogEntry(at=1.0, level=logging.INFO, source="s" * 10**6, message="m" * 10**6))
    ring.add(LogEntry(at=1.0, level=logging.INFO, source="s", message="m" * MAX_LINE))
    long, whole = ring.after(0)[1]
    assert (len(long.source), long.message) == (MAX_LINE, "m" * MAX_LINE + "…")
    assert (whole.source, whole.message) == ("s", "m" * MAX_LINE)


def test_no_line_is_lost_between_threads() -> None:
    ring = LogRing(capacity=10_000)
    threads = [
        threading.Thread(target=lambda: [ring.append(logging.INFO, "t", "x") for _ in range(500)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (ring.total, len(messages(ring))) == (4000, 4000)


def test_log_records_arrive_with_their_source_and_exception() -> None:
    ring = LogRing()
    logger = logging.Logger("engine.part")
    logger.addHandler(RingHandler(ring))
    logger.warning("worker %d is slow", 1, extra={"source": "w1"})
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("it failed")
    first, second = ring.after(0)[1]
    assert (first.level, first.source, first.message) == (logging.WARNING, "w1", "worker 1 is slow")
    assert (second.source, second.message) == ("engine.part", "it failed: ValueError('bad')")
