"""A file is saved where the operator says, and replaces none without a question."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from console.tui.app import EricApp
from console.tui.screens.dialogs import ConfirmScreen, LineScreen
from console.tui.screens.save_dialog import save_file, suggested_path
from tests.fakes.link import FakeLink
from tests.ui.seen import screen_text, until


async def asked(pilot: Pilot[None], path: Path, content: Callable[[], bytes] = lambda: b"new") -> None:
    """The dialog, opened."""
    save_file(pilot.app, "Save a list", path, content)
    await until(pilot, lambda: isinstance(pilot.app.screen, LineScreen))


async def test_enter_saves_to_the_path_in_the_box_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "list.txt"
    async with EricApp(FakeLink()).run_test(notifications=True, size=(140, 40)) as pilot:
        await asked(pilot, path)
        await pilot.press("enter")
        await until(pilot, lambda: "Saved to" in screen_text(pilot.app))
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_escape_saves_nothing(tmp_path: Path) -> None:
    async with EricApp(FakeLink()).run_test() as pilot:
        await asked(pilot, tmp_path / "list.txt")
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(pilot.app.screen, LineScreen))
    assert not (tmp_path / "list.txt").exists()


@pytest.mark.parametrize(("answer", "left"), [("y", b"new"), ("n", b"old")])
async def test_a_file_that_is_there_is_replaced_only_after_a_question(tmp_path: Path, answer: str, left: bytes) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(b"old")
    async with EricApp(FakeLink()).run_test(size=(140, 40)) as pilot:
        await asked(pilot, path)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, ConfirmScreen))
        await pilot.press(answer)
        if answer == "n":  # back to the path as it was typed
            await until(pilot, lambda: isinstance(pilot.app.screen, LineScreen))
            assert pilot.app.screen.query_one(Input).value == str(path)
        else:
            await until(pilot, lambda: path.read_bytes() == b"new")
    assert path.read_bytes() == left


async def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    async with EricApp(FakeLink()).run_test(notifications=True, size=(140, 40)) as pilot:
        await asked(pilot, tmp_path)
        await pilot.press("enter")
        await until(pilot, lambda: "is not a file." in screen_text(pilot.app))
        assert isinstance(pilot.app.screen, LineScreen)


async def test_a_file_that_cannot_be_saved_is_one_sentence(tmp_path: Path) -> None:
    def full() -> bytes:
        raise OSError(28, "No space left on device")

    async with EricApp(FakeLink()).run_test(notifications=True, size=(140, 40)) as pilot:
        await asked(pilot, tmp_path / "list.txt", full)
        await pilot.press("enter")
        await until(pilot, lambda: "No space left on device" in screen_text(pilot.app))


async def test_the_suggested_path_is_in_the_data_folder_and_takes_no_files_place(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "ericllm" / "exports"
    assert suggested_path("a.md") == folder / "a.md"
    folder.mkdir(parents=True)
    (folder / "a.md").touch()
    assert suggested_path("a.md") == folder / "a-2.md"


async def test_the_whole_path_stands_beneath_the_box_however_long_it_is(tmp_path: Path) -> None:
    path = tmp_path / ("a long folder " * 5).strip() / "list.txt"
    async with EricApp(FakeLink()).run_test(size=(80, 24)) as pilot:
        await asked(pilot, path)
        await pilot.pause()
        shown = pilot.app.screen.query_one("#explained", Static)
        assert str(shown.content) == str(path)
        assert shown.size.height * shown.size.width >= len(str(path))
        pilot.app.screen.query_one(Input).value = "~/notes.txt"
        await until(pilot, lambda: str(shown.content) == str(Path.home() / "notes.txt"))
