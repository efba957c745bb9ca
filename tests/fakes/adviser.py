"""What the adviser looks at, in small: snapshots of an engine that is well, and what it says of others."""

from __future__ import annotations

from typing import Any

from console.adviser import Advice
from console.adviser.adviser import RULES
from console.adviser.evidence import Counts, Evidence
from engine.config import DeviceShare
from engine.snapshot import RequestRow, Second, Snapshot
from tests.fakes import scenes
from tests.fakes.scenes import GIB, NOW


def steady(seconds: int = 120, **changes: Any) -> tuple[Second, ...]:
    """A history in which nothing changes."""
    values = {"running": 8, "kv_usage": 0.5, "output_tokens": 300} | changes
    return tuple(Second(at=NOW - seconds + index, **values) for index in range(seconds))  # type: ignore[arg-type]


def healthy(**changes: Any) -> Snapshot:
    """Two twins at work on two cards, half their places taken, nobody waiting."""
    share = DeviceShare(device="cuda:0", layers=32, weights_bytes=9 * GIB, kv_bytes=6 * GIB, working_bytes=GIB)
    values: dict[str, Any] = {
        "workers": tuple(scenes.worker(index, active=4, used=(share,)) for index in range(2)),
        "devices": (scenes.gpu(0), scenes.gpu(1)),
        "queued": 0,
        "running": 8,
        "history": steady(),
    }
    return scenes.busy(**(values | changes))


NOTHING = Counts()


def found(snapshot: Snapshot, recent: Counts = NOTHING) -> dict[str, Advice]:
    """What all rules find in one snapshot, by code."""
    evidence = Evidence(snapshot, recent)
    return {advice.code: advice for rule in RULES for advice in rule.find(evidence)}


def ended(count: int, **changes: Any) -> tuple[RequestRow, ...]:
    """Answers that ended."""
    values: dict[str, Any] = {
        "source": "api",
        "state": "finished",
        "prompt_tokens": 500,
        "output_tokens": 100,
        "max_tokens": 100,
        "finish": "length",
    }
    return tuple(RequestRow(id=f"r{changes.get('finish')}{index}", **(values | changes)) for index in range(count))


def at(second: float, **changes: Any) -> Snapshot:
    """A healthy snapshot so many seconds after the first."""
    return healthy(at=NOW + second, uptime_s=8120.0 + second, **changes)


def hot(second: float) -> Snapshot:
    """A card that is too hot."""
    return at(second, devices=(scenes.gpu(0, temperature_c=90.0),))


def codes(said: tuple[Advice, ...]) -> list[str]:
    """What was said."""
    return [advice.code for advice in said]
