"""The frame: screens, knobs, the API switch, quitting, the palette and the help."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.screen import ModalScreen
from textual.widgets import Input

from console.link.protocol import ApiStatus
from console.tui.app import EricApp
from console.tui.commands import BindingCommands, entries
from console.tui.modes import MODES, Mode
from console.tui.screens.dialogs import FinishOrCutScreen, LineScreen
from console.tui.screens.help import HelpScreen
from engine.errors import EngineError, InvalidRequest
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, toasts, until


async def test_digits_and_function_keys_open_the_screens() -> None:
    app = EricApp(FakeLink())
    async with app.run_test() as pilot:
        seen = []
        for key in ("2", "7", "1", "f2", "f7", "f3", "f1"):
            await pilot.press(key)
            seen.append(app.current_mode)
    assert seen == ["models", "logs", "dashboard", "models", "logs", "chat", "dashboard"]


async def test_the_start_screen_can_be_chosen_and_an_unknown_one_is_the_dashboard() -> None:
    for start, expected in (("models", "models"), ("nowhere", "dashboard")):
        app = EricApp(FakeLink(), start=start)
        async with app.run_test():
            assert app.current_mode == expected


async def test_digits_go_into_a_text_field_that_has_the_focus() -> None:
    app = EricApp(FakeLink())
    async with app.run_test() as pilot:
        field = Input()
        await app.screen.mount(field)
        field.focus()
        await pilot.press("2", "q", "plus", "a")
        assert (field.value, app.current_mode) == ("2q+a", "dashboard")
        await pilot.press("f2")
        assert app.current_mode == "models"


@pytest.mark.parametrize(
    ("keys", "arguments"),
    [
        (["right_square_bracket"], {"num_workers": 3}),
        (["left_square_bracket"], {"num_workers": 1}),
        (["plus"], {"max_prompts": 9}),
        (["equals_sign"], {"max_prompts": 9}),
        (["minus"], {"max_prompts": 7}),
    ],
)
async def test_a_key_turns_a_knob(keys: list[str], arguments: dict[str, int]) -> None:
    link = FakeLink()
    async with EricApp(link).run_test() as pilot:
        await pilot.press(*keys)
        await pilot.app.workers.wait_for_complete()
    assert link.commands == [("reconfigure", arguments)]


async def test_quick_presses_add_up_before_the_engine_answered() -> None:
    link = FakeLink()
    link.hold("reconfigure")
    async with EricApp(link).run_test() as pilot:
        await pilot.press("plus", "plus", "plus", "minus")
        link.release("reconfigure")
        await pilot.app.workers.wait_for_complete()
    assert [arguments["max_prompts"] for _, arguments in link.commands] == [9, 10, 11, 10]


async def test_a_refused_knob_says_why_and_starts_again_from_what_is_set() -> None:
    link = FakeLink()
    link.failures["reconfigure"] = InvalidRequest("num_workers is 3; there is room for 2")
    app = EricApp(link)
    async with app.run_test(notifications=True) as pilot:
        await pilot.press("right_square_bracket")
        await app.workers.wait_for_complete()
        await pilot.press("right_square_bracket")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "num_workers is 3; there is room for 2" in toasts(app)
    assert [arguments for _, arguments in link.commands] == [{"num_workers": 3}, {"num_workers": 3}]


async def test_the_knobs_can_be_clicked() -> None:
    link = FakeLink()
    app = EricApp(link)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        row = rows(app)[1]
        await pilot.click(offset=(row.index("+", row.index("Workers")), 1))
        await app.workers.wait_for_complete()
        await pilot.click(offset=(row.index("Models"), 1))
        assert app.current_mode == "models"
    assert ("reconfigure", {"num_workers": 3}) in link.commands


async def opened(pilot: Pilot[None], mode: Mode) -> None:
    """Open a screen and wait until its tab is the one that is marked."""
    await pilot.press(f"f{mode.digit}")
    await until(pilot, lambda: pilot.app.current_mode == mode.name and f" {mode.title} " in rows(pilot.app)[1])


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (160, 48)])
async def test_every_tab_has_its_name_on_every_screen(size: tuple[int, int]) -> None:
    app = EricApp(FakeLink())
    async with app.run_test(size=size) as pilot:
        for mode in MODES:
            await opened(pilot, mode)
            await until(pilot, lambda: [each.title for each in MODES if each.title not in rows(app)[1]] == [])


@pytest.mark.parametrize(("width", "names"), [(72, ["1 Dash", "4 Reqs", "8 Set"]), (50, ["1 Dash"])])
async def test_a_terminal_too_narrow_for_the_names_has_short_ones_and_then_digits(width: int, names: list[str]) -> None:
    app = EricApp(FakeLink())
    async with app.run_test(size=(width, 24)) as pilot:
        await pilot.pause()
        row = rows(app)[1]
        assert [name for name in ("1 Dash", "4 Reqs", "8 Set") if name in row] == names
        assert all(mode.digit in row for mode in MODES)


async def test_the_knobs_stand_on_dashboard_and_tune_alone() -> None:
    app = EricApp(FakeLink())
    async with app.run_test(size=(160, 48)) as pilot:
        for mode in MODES:
            await opened(pilot, mode)
            assert ("Workers  −" in rows(app)[1]) == (mode.name in ("dashboard", "tune")), mode.name


async def test_a_switches_the_api_off_and_on_at_once_where_nobody_uses_it() -> None:
    link = FakeLink(scenes.cpu_idle(), api=ApiStatus(running=True))
    async with EricApp(link).run_test() as pilot:
        for _ in range(2):
            await pilot.press("a")
            await pilot.app.workers.wait_for_complete()
    assert link.names() == ["stop_api", "start_api"]
    assert link.served.running


_API_ROWS = [row for row in scenes.busy().requests if row.source == "api" and row.state != "finished"]
_QUEUED = sum(row.state == "queued" for row in _API_ROWS)
LIVE = f"{len(_API_ROWS) - _QUEUED} requests running, {_QUEUED} queued"


async def asked_about(pilot: Pilot[None], key: str = "a") -> str:
    """Press a key and return the question that it asks."""
    await pilot.press(key)
    await until(pilot, lambda: isinstance(pilot.app.screen, ModalScreen))
    await pilot.pause()
    return screen_text(pilot.app)


@pytest.mark.parametrize(
    ("key", "commands"),
    [("n", []), ("escape", []), ("enter", []), ("y", [("stop_api", {})]), ("f", [("stop_api", {"finish": True})])],
)
async def test_a_asks_while_requests_run_and_offers_to_let_them_finish(
    key: str, commands: list[tuple[str, object]]
) -> None:
    link = FakeLink(scenes.busy(), api=ApiStatus(running=True, clients=3))
    async with EricApp(link).run_test() as pilot:
        seen = await asked_about(pilot)
        assert f"{LIVE}, 3 clients in the last minute" in seen
        assert "Finish them first (f)" in seen
        await pilot.press(key)
        await pilot.app.workers.wait_for_complete()
    assert link.commands == commands


async def test_a_asks_where_clients_are_connected_though_nothing_runs() -> None:
    link = FakeLink(scenes.cpu_idle(), api=ApiStatus(running=True, connections=2))
    async with EricApp(link).run_test() as pilot:
        seen = await asked_about(pilot)
        assert "2 connections are open" in seen
        assert "Finish" not in seen
        link.show(scenes.busy())  # they come while the question is open
        await pilot.press("y")
        await pilot.app.workers.wait_for_complete()
    assert link.commands == [("stop_api", {"finish": True})]


async def test_a_request_of_the_chat_is_none_of_the_api() -> None:
    own = msgspec.structs.replace(scenes.busy().requests[4], source="chat", client="console")
    link = FakeLink(msgspec.structs.replace(scenes.cpu_idle(), requests=(own,), running=1), api=ApiStatus(running=True))
    async with EricApp(link).run_test() as pilot:
        await pilot.press("a")
        await pilot.app.workers.wait_for_complete()
    assert link.names() == ["stop_api"]


async def test_an_api_that_waits_for_its_last_requests_says_so_and_can_be_cut_off() -> None:
    link = FakeLink(scenes.busy(), api=ApiStatus(running=True, clients=3))
    link.hold("stop_api")
    app = EricApp(link)
    async with app.run_test(size=(140, 40)) as pilot:
        await asked_about(pilot)
        await pilot.press("f")
        await until(pilot, lambda: "API 127.0.0.1:8000 stopping" in rows(app)[0])
        seen = await asked_about(pilot)
        assert f"API is stopping: {LIVE}. It goes off after the last one." in seen
        await pilot.press("y")
        link.release("stop_api")
        await app.workers.wait_for_complete()
        await until(pilot, lambda: "API off" in rows(app)[0])
    assert link.commands == [("stop_api", {"finish": True}), ("stop_api", {})]


async def test_an_api_that_stops_can_be_kept_on() -> None:
    link = FakeLink(scenes.busy(), api=ApiStatus(running=True, clients=3))
    link.hold("stop_api")
    app = EricApp(link)
    async with app.run_test(size=(140, 40), notifications=True) as pilot:
        await asked_about(pilot)
        await pilot.press("f")
        await until(pilot, lambda: "API 127.0.0.1:8000 stopping" in rows(app)[0])
        assert "Keep it on (k)" in await asked_about(pilot)
        await pilot.press("k")
        await until(pilot, lambda: "start_api" in link.names())
        link.release("stop_api")
        await app.workers.wait_for_complete()
        await until(pilot, lambda: "API 127.0.0.1:8000 on" in rows(app)[0])
        assert "The API stays on: new requests are accepted again" in toasts(app)
        assert "The API is off" not in toasts(app)
    assert link.commands == [("stop_api", {"finish": True}), ("start_api", {})]


async def test_an_api_that_cannot_start_says_why() -> None:
    link = FakeLink()
    link.served = type(link.served)(running=False)
    link.failures["start_api"] = EngineError("port 8000 of 127.0.0.1 is taken")
    app = EricApp(link)
    async with app.run_test(notifications=True) as pilot:
        await pilot.press("a")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "port 8000 of 127.0.0.1 is taken" in toasts(app)


@pytest.mark.parametrize("key", ["q", "ctrl+q"])
async def test_quitting_asks_only_while_requests_are_unfinished(key: str) -> None:
    idle = EricApp(FakeLink(scenes.cpu_idle()))
    async with idle.run_test() as pilot:
        await pilot.press(key)
        await pilot.pause()
    assert idle.return_code == 0

    busy = EricApp(FakeLink(scenes.busy()))
    async with busy.run_test() as pilot:
        await pilot.press(key)
        assert isinstance(busy.screen, FinishOrCutScreen)
        assert "Not finished: 14 requests running, 3 queued" in screen_text(busy)
        await pilot.press("n")
        assert not isinstance(busy.screen, FinishOrCutScreen)
        await pilot.press(key, "y")
    assert busy.return_code == 0


async def test_help_lists_the_keys_and_explains_the_numbers() -> None:
    app = EricApp(FakeLink())
    async with app.run_test(size=(100, 70)) as pilot:
        await pilot.press("down", "question_mark")
        assert isinstance(app.screen, HelpScreen)
        shown = screen_text(app)
        for words in ("Cancel the selected request", "Add a worker", "time to first token", "inter-token latency"):
            assert words in shown
        await pilot.press("escape")
        assert not isinstance(app.screen, HelpScreen)


async def test_the_palette_offers_every_key_and_runs_it() -> None:
    link = FakeLink()
    app = EricApp(link)
    async with app.run_test() as pilot:
        await pilot.press("down")
        titles = {entry.title for entry in entries(app.screen)}
        assert {"Add a worker", "Go to Chat", "Cancel the selected request", "Quit the console"} <= titles
        hits = [hit async for hit in BindingCommands(app.screen).search("add a worker")]
        await hits[0].command()  # type: ignore[misc]
        await app.workers.wait_for_complete()
    assert ("reconfigure", {"num_workers": 3}) in link.commands


async def test_only_the_screen_that_is_seen_is_updated() -> None:
    link = FakeLink()
    app = EricApp(link)
    async with app.run_test(size=(140, 40)) as pilot:
        dashboard = app.screen
        await pilot.press("2")
        updates: list[object] = []
        dashboard.update_body = lambda *_: updates.append(None)  # type: ignore[attr-defined]
        link.show(scenes.cpu_idle())
        app.refresh_screen()
        assert not updates
        assert "demo" in rows(app)[0]
        await pilot.press("1")
        await pilot.pause()
        assert updates


async def test_a_screenshot_is_of_the_screen_beneath_and_saved_where_the_operator_says(tmp_path: Path) -> None:
    async with EricApp(FakeLink()).run_test(notifications=True) as pilot:
        await pilot.pause()
        pilot.app._save_picture()
        await until(pilot, lambda: isinstance(pilot.app.screen, LineScreen))
        await pilot.press("enter")
        await until(pilot, lambda: any("Saved to" in toast for toast in toasts(pilot.app)))
    (picture,) = (tmp_path / "data" / "ericllm" / "exports").glob("ericllm-*.svg")
    assert "Dashboard" in picture.read_text(encoding="utf-8")
    assert "Save&#160;the&#160;screenshot" not in picture.read_text(encoding="utf-8")


async def test_sigterm_before_the_first_screen_is_there_quits_without_a_failure() -> None:
    class Hasty(EricApp):
        def on_load(self) -> None:
            super().on_load()
            signal.raise_signal(signal.SIGTERM)

    app = Hasty(FakeLink(scenes.busy()))
    await app.run_async(headless=True)
    assert app.return_code == 0
