"""What tests of the benchmarks share: the console with results of benches, and its pages."""

from __future__ import annotations

from typing import Any

from textual.pilot import Pilot

from console.bench.kinds import PLANS
from console.link.benches import BenchReport
from console.tui.app import EricApp
from console.tui.screens.benches.form import BenchFormScreen
from tests.fakes import bench_scenes, tune_scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import screen_text, until

SIZES = [(80, 24), (120, 40), (160, 50)]


def app_with(report: BenchReport | None = None, *, results: bool = True, **how: Any) -> EricApp:
    """The console at the Tune screen, over a link with results of benches."""
    link = FakeLink(tune_scenes.tuned())
    link.script["benches.report"] = report or BenchReport()
    link.benches.results = bench_scenes.results() if results else {}
    return EricApp(link, start="tune", **how)


def link_of(app: EricApp) -> FakeLink:
    """What it talks to."""
    assert isinstance(app.link, FakeLink)
    return app.link


async def shown(pilot: Pilot[None], words: str) -> None:
    """Wait until the words are on the screen, whatever blanks are between them."""
    await until(pilot, lambda: words in " ".join(screen_text(pilot.app).split()))


async def opened(pilot: Pilot[None]) -> None:
    """From the Tune screen, with the results read."""
    await until(pilot, lambda: "Tune" in screen_text(pilot.app))
    await pilot.press("b")
    await shown(pilot, "Benchmark results")
    await shown(pilot, "users")


async def formed(pilot: Pilot[None]) -> None:
    """The form of a bench, filled in."""
    await pilot.press("n")
    await until(pilot, lambda: isinstance(pilot.app.screen, BenchFormScreen))
    await shown(pilot, PLANS["latency"].sentence()[:40])
