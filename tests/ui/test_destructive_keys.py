"""No single key ends what runs, or keeps new requests out: it asks first, and Enter changes nothing."""

from __future__ import annotations

import msgspec
import pytest
from textual.screen import ModalScreen
from textual.widgets import Button

from console.tui import modes
from console.tui.app import EricApp
from console.tui.binding_index import all_bindings, bindings_with_calls
from console.tui.keymap import DRAIN, ConsoleBinding
from console.tui.screens.dialogs import ConfirmScreen, FinishOrCutScreen
from engine.config import MAX_TIMEOUT_S
from engine.snapshot import ModelReading
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import listed, screen_text, until

ENDS_REQUESTS = {
    "cancel_load",
    "cancel_queued",
    "cancel_request",
    "detach",
    "drain",
    "drain_worker",
    "load",
    "restart_worker",
    "revoke_key",
    "stop_api",
    "switch_dialect",
    "unload",
}
"""Calls that end requests, or refuse ones that were answered before."""


def busy() -> FakeLink:
    """A model with requests, as the Models screen lists it."""
    snapshot = scenes.busy()
    model = ModelReading(
        key="m1", name="NeuralHermes-7B", status=snapshot.status, target_workers=2, max_prompts=8, running=16, queued=1
    )
    return FakeLink(msgspec.structs.replace(snapshot, models=(model,)))


def waited_for() -> FakeLink:
    """A second model that loads, for which requests wait; nothing runs."""
    busy_model = busy().current.models[0]
    ready = msgspec.structs.replace(busy_model, running=0, queued=0)
    status = msgspec.structs.replace(scenes.loading().status, spec=scenes.spec("coder"))
    coming = ModelReading(key="m2", name="coder", status=status, target_workers=1, max_prompts=8, waiting=2)
    snapshot = scenes.busy(models=(ready, coming), running=0, queued=0, requests=())
    return FakeLink(snapshot)


KEYS = sorted(
    {key for each in all_bindings() if each.owner and each.id in bindings_with_calls(each.owner) for key in each.keys}
    | {"enter", "b", "l", "delete", "q", "ctrl+q"}
)


@pytest.mark.parametrize("mode", [mode.name for mode in modes.MODES])
async def test_no_single_key_ends_requests_or_keeps_new_ones_out(mode: str) -> None:
    link = busy()
    app = EricApp(link, start=mode)
    async with app.run_test(size=(140, 50)) as pilot:
        await pilot.pause()
        kinds = {
            each if isinstance(each, Button) else (type(each), type(each.parent)): each
            for each in app.screen.focus_chain
        }
        for focused in (None, *kinds.values()):
            for key in KEYS:
                app.screen.set_focus(focused)
                await pilot.press(key)
                await pilot.pause()
                if isinstance(app.screen, ConfirmScreen | FinishOrCutScreen):
                    await pilot.press("enter")
                while len(app.screen_stack) > 1:
                    app.pop_screen()
                    await pilot.pause()
        harmless = [("load", {"model": "NeuralHermes-7B"}), *(each for each in link.commands if "beside" in each[1])]
        assert [each for each in link.commands if each[0] in ENDS_REQUESTS and each not in harmless] == []
        assert app.is_running


async def test_drain_asks_refuses_new_requests_and_the_same_key_takes_them_again() -> None:
    link = busy()
    app = EricApp(link)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.press("D")
        await until(pilot, lambda: "Drain? 14 requests running, 3 queued: they finish first." in screen_text(app))
        await pilot.press("y")
        await until(pilot, lambda: "draining 0 s, 17 left" in screen_text(app))
        link.change(at=link.current.at + 42, running=0, queued=0, requests=())
        await until(pilot, lambda: "drained 42 s" in screen_text(app))
        await pilot.press("D", "enter")
        assert link.names() == ["drain"]
        await pilot.press("D", "y")
        await until(pilot, lambda: "drained" not in screen_text(app))
    assert link.names() == ["drain", "resume"]


def test_drain_is_a_key_of_every_screen_that_a_read_only_console_leaves_out() -> None:
    owners = {bound.owner.__name__ for bound in all_bindings() if bound.id == DRAIN.id and bound.owner is not None}
    assert owners == {"ConsoleScreen"}
    assert isinstance(DRAIN, ConsoleBinding)
    assert DRAIN.mutates


async def test_quit_can_wait_for_what_runs() -> None:
    link = busy()
    app = EricApp(link)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.press("q")
        await until(pilot, lambda: "Finish them first (f)" in screen_text(app))
        await pilot.press("f")
        await until(pilot, lambda: "draining 0 s, 17 left" in screen_text(app))
        assert app.is_running
        link.change(running=0, queued=0, requests=())
        app.refresh_screen()
        await pilot.pause()
    assert app.return_code == 0
    assert link.names() == ["drain"]


async def test_a_quit_that_waits_is_called_off_by_taking_requests_again() -> None:
    link = busy()
    app = EricApp(link)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.press("q", "f")
        await until(pilot, lambda: "draining" in screen_text(app))
        await pilot.press("D", "y")
        await until(pilot, lambda: "draining" not in screen_text(app))
        link.change(running=0, queued=0, requests=())
        app.refresh_screen()
        await pilot.pause()
        assert app.is_running


@pytest.mark.parametrize(("key", "drain_seconds"), [("f", MAX_TIMEOUT_S), ("y", 0)])
async def test_unloading_a_model_with_requests_finishes_them_or_cuts_them_off(key: str, drain_seconds: float) -> None:
    link = busy()
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await pilot.press("u")
        await until(pilot, lambda: isinstance(pilot.app.screen, FinishOrCutScreen))
        await pilot.press(key)
        await until(pilot, lambda: link.commands == [("unload", {"drain_seconds": drain_seconds})])


async def test_a_load_in_place_of_a_model_with_requests_asks() -> None:
    link = busy()
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        table = await listed(pilot)
        table.move_to(next(i for i, row in enumerate(table.rows) if row.key not in ("NeuralHermes-7B", "broken")))
        await pilot.press("enter")
        asked = "Replace NeuralHermes-7B? It has 16 requests running, 1 queued."
        await until(pilot, lambda: asked in screen_text(pilot.app))
        await pilot.press("n")
        assert link.names() == []
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, ModalScreen))
        await pilot.press("y")
        await until(pilot, lambda: link.names() == ["load"])


async def test_cancelling_a_load_that_requests_wait_for_asks() -> None:
    link = waited_for()
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await pilot.press("c")
        await until(pilot, lambda: "2 requests wait for the load." in screen_text(pilot.app))
        await pilot.press("enter")
        assert link.names() == []
        await pilot.press("c", "y")
        await until(pilot, lambda: link.names() == ["cancel_load"])


@pytest.mark.parametrize(("key", "said"), [("q", "Not finished: 2 requests waiting for a load."), ("D", "Drain? 2")])
async def test_requests_that_wait_for_a_load_count_as_unfinished(key: str, said: str) -> None:
    app = EricApp(waited_for())
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.press(key)
        await until(pilot, lambda: said in screen_text(app))


async def test_quitting_from_another_question_asks() -> None:
    link = busy()
    app = EricApp(link)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.press("a")
        await until(pilot, lambda: isinstance(app.screen, FinishOrCutScreen))
        await pilot.press("ctrl+q")
        await until(pilot, lambda: "Not finished: " in screen_text(app))
        assert app.is_running
        await pilot.press("ctrl+q")
        await pilot.pause()
    assert app.return_code == 0
