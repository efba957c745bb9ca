"""Side by side: one question, two models or settings, two answers that stream at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Select

from console.tui.screens.chat.conversation_list import ChatList
from console.tui.screens.chat.settings import ChatSettingsScreen
from tests.fakes import fleet_scenes
from tests.fakes.link import FakeLink
from tests.ui.chatting import answers, ask, asked, console, ended, fill, foot, kept, opened, panes
from tests.ui.seen import until

pytestmark = pytest.mark.long


async def split(pilot: Pilot[None], *, model: str = "", temperature: str = "") -> None:
    """Open a second pane that asks otherwise."""
    await pilot.press("alt+v")
    await until(pilot, lambda: isinstance(pilot.app.screen, ChatSettingsScreen))
    pilot.app.screen.query_one(Select).value = model
    pilot.app.screen.query_one("#temperature", Input).value = temperature
    await pilot.press("ctrl+s")
    await until(pilot, lambda: not isinstance(pilot.app.screen, ChatSettingsScreen))


async def test_two_models_answer_the_same_question_each_with_its_own_settings(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    link = FakeLink(fleet_scenes.two_models())
    link.answers = {"NeuralHermes-7B": "large", "demo": "small"}
    async with console(link, chats).run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await split(pilot, model="demo", temperature="0")
        await ask(pilot, "Who?")
        await until(pilot, lambda: (answers(pilot, 0), answers(pilot, 1)) == (["large"], ["small"]) and ended(pilot))
        assert sorted(link.chat_models) == ["NeuralHermes-7B", "demo"]
        asked_with = dict(zip(link.chat_models, (params.temperature for _, params in link.chats), strict=True))
        assert asked_with == {"NeuralHermes-7B": 0.6, "demo": 0.0}
        assert "demo" in str(panes(pilot)[1].border_title)
        await ask(pilot, "More?")
        await until(pilot, lambda: len(answers(pilot, 1)) == 2 and ended(pilot))
        said = [[message.content for message in messages] for messages, _ in link.chats[2:]]
        assert sorted(said) == [["Who?", "large", "More?"], ["Who?", "small", "More?"]]
    assert [turn.content for turn in kept(chats).all()].count("Who?") == 1


async def test_both_stream_at_once_and_escape_stops_both(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    link = FakeLink(answer="one two three")
    async with console(link, chats).run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await split(pilot)
        link.hold("chat")
        await ask(pilot, "Count")
        await until(pilot, lambda: len(link.chats) == 2)
        link.step("chat")
        await until(pilot, lambda: (answers(pilot, 0), answers(pilot, 1)) == (["one"], ["one"]))
        await pilot.press("escape")
        await until(pilot, lambda: link.closed_chats == 2)
        await until(pilot, lambda: "stopped" in foot(pilot, 0) and "stopped" in foot(pilot, 1))
    assert [turn.note.finish for turn in kept(chats).all() if turn.role == "assistant"] == ["cancelled", "cancelled"]


@pytest.mark.parametrize(("width", "beside"), [(100, True), (140, True), (80, False)])
async def test_panes_stand_side_by_side_from_100_columns_on_and_are_stacked_below(width: int, beside: bool) -> None:
    async with console(FakeLink()).run_test(size=(width, 30)) as pilot:
        await opened(pilot)
        await split(pilot)
        await pilot.pause()
        left, right = (pane.region for pane in panes(pilot))
        assert (left.y == right.y) is beside
        assert (left.x == right.x) is not beside
        assert abs(left.width - right.width) <= 1
        assert min(left.height, right.height) >= 8


async def test_going_back_to_one_keeps_the_pane_in_focus_and_the_other_as_a_branch(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    link = FakeLink(fleet_scenes.two_models())
    link.answers = {"NeuralHermes-7B": "large", "demo": "small"}
    async with console(link, chats).run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await split(pilot, model="demo")
        await ask(pilot, "Who?")
        await until(pilot, lambda: len(answers(pilot, 1)) == 1 and ended(pilot))
        panes(pilot)[1].focus()
        await pilot.pause()
        await pilot.press("alt+v")
        await until(pilot, lambda: len(panes(pilot)) == 1 and answers(pilot) == ["small"])
        await until(pilot, lambda: "/2 ›" in foot(pilot))
    async with console(FakeLink(fleet_scenes.two_models()), chats).run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        assert answers(pilot) == ["small"]


async def test_two_panes_are_there_when_the_console_opens_again(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    async with console(FakeLink(answer="A"), chats).run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await split(pilot, temperature="0.1")
        await asked(pilot, "Q")
    async with console(FakeLink(), chats).run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        assert (answers(pilot, 0), answers(pilot, 1)) == (["A"], ["A"])
        assert "temperature 0.1" in str(panes(pilot)[1].border_title)


async def test_the_list_gives_its_room_to_two_panes_and_comes_back_when_asked(tmp_path: Path) -> None:
    fill(tmp_path / "chats.db", "Q", "A")
    async with console(FakeLink(), tmp_path / "chats.db").run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        assert pilot.app.screen.query_one(ChatList).region.width > 0
        await split(pilot)
        await until(pilot, lambda: pilot.app.screen.query_one(ChatList).region.width == 0)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: pilot.app.screen.query_one(ChatList).region.width > 0)
