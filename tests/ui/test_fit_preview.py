"""Whether the selected model would fit: foretold while one chooses, and never in the way."""

from __future__ import annotations

import msgspec
import pytest

from console.settings.load_options import LoadOptions
from console.tui.app import EricApp
from console.tui.screens.models.panel import fit_lines
from engine.errors import InsufficientMemory
from engine.placement.model_memory import Correction
from tests.fakes import estimates, scenes
from tests.fakes.link import MODELS, FakeLink
from tests.ui.seen import foretold, listed, screen_text, selected, shows, until

pytestmark = pytest.mark.long


async def test_the_selected_model_says_whether_it_fits_and_what_it_takes() -> None:
    link = FakeLink(scenes.busy())
    async with EricApp(link, start="models").run_test(size=(120, 40)) as pilot:
        await listed(pilot)
        await until(pilot, lambda: "✓ Fits: 2 workers" in selected(pilot))
        lines = [line.split()[:6] for line in selected(pilot).splitlines()]
        assert ["GPU1", "9.4", "6.1", "1.2", "1.5", "5.6"] in lines
        assert "1 on GPU0, 1 on GPU1" in selected(pilot)
        assert "replacing NeuralHermes-7B, b" in screen_text(pilot.app)
    assert link.models.asked == [("demo", LoadOptions())]


async def test_what_does_not_fit_says_how_much_is_lacking_where() -> None:
    link = FakeLink(scenes.busy())
    link.script["models.estimate"] = estimates.estimate_that_lacks()
    async with EricApp(link, start="models").run_test(size=(120, 40)) as pilot:
        await listed(pilot)
        await until(pilot, lambda: "✖ Does not fit" in selected(pilot))
        assert "✖ −2,310 MiB" in selected(pilot)


async def test_the_fit_is_computed_anew_when_a_knob_or_the_selection_moves() -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link, start="models")
    async with app.run_test(size=(120, 40)) as pilot:
        await listed(pilot)
        await until(pilot, lambda: len(link.models.asked) == 1)
        link.show(scenes.busy(target_workers=3))
        app.refresh_screen()
        await until(pilot, lambda: len(link.models.asked) == 2)
        await pilot.press("down")
        await until(pilot, lambda: len(link.models.asked) == 3)
    assert [model for model, _ in link.models.asked] == ["demo", "demo", str(MODELS[1].path)]


async def test_r_finds_out_anew_what_the_devices_have_free() -> None:
    link = FakeLink(scenes.busy())
    async with EricApp(link, start="models").run_test(size=(120, 40)) as pilot:
        await listed(pilot)
        await until(pilot, lambda: len(link.models.asked) == 1)
        await pilot.press("r")
        await until(pilot, lambda: len(link.models.asked) == 2)


async def test_an_answer_that_comes_late_is_not_taken_for_another_model() -> None:
    link = FakeLink(scenes.busy())
    link.hold("estimate")
    async with EricApp(link, start="models").run_test(size=(120, 40)) as pilot:
        await listed(pilot)
        await until(pilot, lambda: len(link.models.asked) == 1)
        assert "◌ Estimating" in selected(pilot)
        await pilot.press("down", "down")
        await until(pilot, lambda: "pickles" in selected(pilot))
        link.release("estimate")
        await pilot.app.workers.wait_for_complete()
        assert "Fits" not in selected(pilot)


async def test_what_cannot_be_foretold_is_a_sentence() -> None:
    link = FakeLink(scenes.busy())
    link.failures["estimate"] = InsufficientMemory("config.json says nothing of layers")
    async with EricApp(link, start="models").run_test(size=(120, 40)) as pilot:
        await listed(pilot)
        await until(pilot, lambda: "✖ config.json says nothing of layers" in selected(pilot))


async def test_a_small_terminal_says_in_a_line_whether_it_fits() -> None:
    app = EricApp(FakeLink(scenes.busy()), start="models")
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await until(pilot, lambda: "demo  ✓ Fits: 2 workers" in screen_text(app))


def test_a_fit_on_simulated_devices_says_so_and_what_was_learned() -> None:
    device = msgspec.structs.replace(estimates.estimate().devices[0], id="node2/sim:0", node="node2", kind="simulated")
    found = estimates.estimate(devices=(device,), simulated=True, learned=Correction(weights_factor=1.02, loads=3))
    shown = "\n".join(line.plain for line in fit_lines(found))
    assert "node2 SIM0" in shown
    assert "The devices are simulated" in shown
    assert "Calibrated from 3 earlier loads" in shown


def test_a_model_that_does_not_fit_shows_what_each_device_lacks() -> None:
    link = FakeLink(scenes.busy())
    link.script["models.estimate"] = estimates.estimate_that_lacks()
    app = EricApp(link, start="models")
    words = (
        "✖ Does not fit: 2,310 MiB short on GPU1",
        "GiB   weights",
        "GPU0 ",
        "5.6",
        "GPU1 ",
        "✖ −2,310 MiB",
        "1 on GPU0, 1 on GPU1",
    )
    assert shows(app, *words, terminal_size=(100, 30), run_before=foretold)


def test_a_preview_for_eight_cards_has_a_row_for_each() -> None:
    link = FakeLink(scenes.eight_gpus())
    link.script["models.estimate"] = estimates.estimate_for_eight()
    app = EricApp(link, start="models")
    devices = [f"GPU{number}      9.4     6.1" for number in range(8)]
    end = "✖ −2,310 MiB", "1 on each of 7 devices"
    assert shows(app, "✖ Does not fit", "GiB   weights", *devices, *end, terminal_size=(120, 40), run_before=foretold)
