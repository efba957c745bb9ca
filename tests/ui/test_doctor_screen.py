"""The doctor in the console: opened from the palette, looking, what it shows, looking again, closing."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot

from console.tui.app import EricApp
from console.tui.screens.doctor.screen import DoctorScreen
from engine.doctor.examine import examine
from engine.doctor.facts import Package
from engine.errors import EngineClosed
from tests.fakes import machines
from tests.fakes.link import FakeLink
from tests.ui.seen import choose, rows, screen_text

pytestmark = pytest.mark.long

BROKEN_FLASH = Package(installed=True, version="2.8.3", error="undefined symbol: _ZNK3c106SymInt")


def a_link_to(facts: Any, backend: Any = "exllamav2") -> FakeLink:
    link = FakeLink()
    link.script["engine.diagnose"] = examine(facts, backend)
    return link


async def opened(pilot: Pilot[Any]) -> DoctorScreen:
    """The doctor, opened as the palette opens it, as soon as it is on the screen."""
    await choose(pilot.app, "Doctor")
    await pilot.pause()
    assert isinstance(pilot.app.screen, DoctorScreen)
    return pilot.app.screen


async def looked(pilot: Pilot[Any]) -> None:
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


@pytest.mark.parametrize("size", [(140, 50), (80, 24)])
async def test_the_verdict_stands_above_the_findings(size: tuple[int, int]) -> None:
    async with EricApp(a_link_to(machines.H100_WITH_EVERYTHING)).run_test(size=size) as pilot:
        await opened(pilot)
        await looked(pilot)
        seen = screen_text(pilot.app)
        assert "✓ The exllamav2 backend can run here." in seen
        assert "NVIDIA H100 80GB HBM3" in seen


async def test_what_is_wrong_is_shown_with_the_command_that_mends_it() -> None:
    facts = machines.changed(machines.CPU_TORCH_ON_A_GPU_MACHINE, attention={"flash_attn": BROKEN_FLASH})
    async with EricApp(a_link_to(facts)).run_test(size=(140, 70)) as pilot:
        await opened(pilot)
        await looked(pilot)
        seen = screen_text(pilot.app)
        assert "✖ The exllamav2 backend cannot run here" in seen
        assert "○ exllamav2" in seen
        assert "pip install exllamav2==0.3.2" in seen
        assert "undefined symbol: _ZNK3c106SymInt" in seen


async def test_it_says_that_it_looks_until_it_has_looked() -> None:
    link = a_link_to(machines.WITHOUT_GPU, "torch")
    link.hold("diagnose")
    async with EricApp(link).run_test(size=(100, 40)) as pilot:
        await opened(pilot)
        assert "Checking the machine" in screen_text(pilot.app)
        link.release("diagnose")
        await looked(pilot)
        assert "Checking the machine" not in screen_text(pilot.app)
        assert "The torch backend can run here." in screen_text(pilot.app)


async def test_r_looks_again_with_the_last_findings_still_in_sight() -> None:
    link = a_link_to(machines.WITHOUT_GPU, "torch")
    async with EricApp(link).run_test(size=(100, 40)) as pilot:
        await opened(pilot)
        await looked(pilot)
        link.hold("diagnose")
        link.script["engine.diagnose"] = examine(machines.TURING, "torch")
        await pilot.press("r")
        await pilot.pause()
        assert "Checking the machine" in screen_text(pilot.app)
        assert "no NVIDIA card" in screen_text(pilot.app)
        link.release("diagnose")
        await looked(pilot)
        assert "RTX 2080 Ti" in screen_text(pilot.app)
        assert "no NVIDIA card" not in screen_text(pilot.app)
    assert len(link.asked_for("engine.diagnose")) == 2


async def test_a_machine_that_cannot_be_asked_says_why() -> None:
    link = FakeLink()
    link.failures["diagnose"] = EngineClosed("the engine is shutting down")
    async with EricApp(link).run_test() as pilot:
        await opened(pilot)
        await looked(pilot)
        assert "✖ the engine is shutting down" in screen_text(pilot.app)


async def test_escape_closes_it_while_it_looks() -> None:
    link = FakeLink()
    link.hold("diagnose")
    async with EricApp(link).run_test() as pilot:
        await opened(pilot)
        await pilot.press("escape")
        assert not isinstance(pilot.app.screen, DoctorScreen)
        await looked(pilot)


async def test_values_begin_in_one_column_and_all_can_be_reached_on_a_small_terminal() -> None:
    async with EricApp(a_link_to(machines.H100_TO_COMPILE)).run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        await looked(pilot)
        shown = rows(pilot.app)
        columns = {
            row.index(value) for row in shown for value in ("3.11.9", "AMD EPYC 9334", "100.0 of") if value in row
        }
        assert len(columns) == 1
        await pilot.press("end")
        await pilot.pause()
        assert "chosen, can run on the GPU" in screen_text(pilot.app)


def test_the_doctor_looks_right(snap_compare: Any) -> None:
    facts = machines.changed(machines.H100_TO_COMPILE, attention={"flash_attn": BROKEN_FLASH})

    async def open_it(pilot: Pilot[Any]) -> None:
        await opened(pilot)
        await looked(pilot)

    assert snap_compare(EricApp(a_link_to(facts)), terminal_size=(120, 50), run_before=open_it)
