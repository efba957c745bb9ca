"""Conversations are found, named, exported, copied; settings have names; the draft is counted."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from console.chats import ChatSettings, ChatStore
from console.chats.export import Export, ExportedTurn, from_json, to_json
from console.chats.records import TurnNote
from console.link.chat import DraftCount
from console.tui import clipboard
from console.tui.app import EricApp
from console.tui.screens.chat.conversation_list import ChatList
from console.tui.screens.chat.input import ChatInput, count_line
from console.tui.screens.chat.settings import ChatSettingsScreen, PresetsScreen
from console.tui.screens.dialogs import LineScreen
from tests.fakes import scenes
from tests.fakes.hostile import HOSTILE
from tests.fakes.link import FakeLink
from tests.ui.chatting import answers, ask, asked, console, fill, last_turn, opened, panes, questions
from tests.ui.seen import rows, screen_text, toasts, until

pytestmark = pytest.mark.long

CODE = "Look:\n\n```py\nfirst()\n```\n\nand\n\n```py\nif x:\n    second()\n```\n"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.db"
    fill(path, "What is TTFT?", CODE, others=("Explain paged attention", "Haiku about a page"))
    return path


@pytest.fixture(autouse=True)
def no_native_clipboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipboard, "native_command", lambda: None)


def said(app: EricApp) -> list[str]:
    """The toasts."""
    return toasts(app)


def count(pilot: Pilot[None]) -> str:
    return str(pilot.app.screen.query_one("#count").content)  # type: ignore[attr-defined]


async def test_search_finds_by_title_and_text_and_escape_shows_all_again(chats: Path) -> None:
    async with console(FakeLink(), chats).run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        found = pilot.app.screen.query_one(ChatList)
        await pilot.press("ctrl+f", *"PAGE")
        await until(pilot, lambda: found.option_count == 2)
        field = pilot.app.screen.query_one(Input)
        field.value = "second()"
        await until(pilot, lambda: found.option_count == 1)
        await pilot.press("escape")
        await until(pilot, lambda: found.option_count == 3)
        assert not field.display


async def test_a_conversation_that_was_found_can_be_opened_with_enter(chats: Path) -> None:
    async with console(FakeLink(), chats).run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        found = pilot.app.screen.query_one(ChatList)
        await pilot.press("ctrl+f", *"haiku")
        await until(pilot, lambda: found.option_count == 1)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: questions(pilot) == ["Haiku about a page"])


async def test_what_was_looked_for_is_shown_even_in_another_branch(tmp_path: Path) -> None:
    chats = tmp_path / "chats.db"
    fill(chats, "Name a fruit", "An apple. | A pear.", "Why?", "It is green.")
    async with console(FakeLink(), chats).run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        assert answers(pilot) == ["A pear.", "It is green."]
        await pilot.press("ctrl+f", *"APPLE")
        await until(pilot, lambda: pilot.app.screen.query_one(ChatList).option_count == 1)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: answers(pilot) == ["An apple."])
        assert panes(pilot)[0].turn_widgets()[1].has_class("-selected")


async def test_a_conversation_is_renamed(chats: Path) -> None:
    async with console(FakeLink(), chats).run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("alt+t")
        await until(pilot, lambda: isinstance(pilot.app.screen, LineScreen))
        field = pilot.app.screen.query_one(Input)
        assert field.value == "What is TTFT?"
        field.value = "Latency"
        await pilot.press("enter")
        await until(pilot, lambda: str(panes(pilot)[0].border_title) == "Latency")
    assert ChatStore(chats).conversations()[0].title == "Latency"


async def test_markdown_and_json_go_where_the_operator_says_and_json_comes_back(chats: Path, tmp_path: Path) -> None:
    app = console(FakeLink(), chats)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await opened(pilot)
        for key in ("alt+w", "alt+shift+w"):
            await pilot.press(key)
            await until(pilot, lambda: isinstance(app.screen, LineScreen))
            await pilot.press("enter")
            await until(pilot, lambda: not isinstance(app.screen, LineScreen))
        await until(pilot, lambda: len(said(app)) == 2)
        folder = tmp_path / "data" / "ericllm" / "exports"
        assert (folder / "what-is-ttft.md").read_text().startswith("# What is TTFT?\n\n## You\n\nWhat is TTFT?")
        assert len(from_json((folder / "what-is-ttft.json").read_bytes()).turns) == 2
        await pilot.press("alt+shift+r")
        await until(pilot, lambda: isinstance(app.screen, LineScreen))
        app.screen.query_one(Input).value = str(folder / "what-is-ttft.json")
        await pilot.press("enter")
        await until(pilot, lambda: not isinstance(app.screen, LineScreen))
        await until(pilot, lambda: app.screen.query_one(ChatList).option_count == 4)
        assert answers(pilot) == [CODE]


async def test_a_file_that_cannot_be_read_back_is_one_sentence(tmp_path: Path) -> None:
    app = console(FakeLink())
    async with app.run_test(notifications=True) as pilot:
        await opened(pilot)
        await pilot.press("alt+shift+r", *"nowhere.json", "enter")
        await until(pilot, lambda: said(app) == ["Cannot read nowhere.json: No such file or directory"])
        await pilot.press("alt+w")
        await until(pilot, lambda: "Nothing to export yet: send a message first." in said(app))


async def test_an_exported_conversation_of_a_stranger_ends_no_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "1.json")
    (tmp_path / "2.json").write_bytes(b'{"x":' * 100_000)
    (tmp_path / "3.json").write_bytes(b'{"format":"\xff"}')
    (tmp_path / "4.json").touch()
    os.truncate(tmp_path / "4.json", 65 * 2**20)
    note = TurnNote(output_tokens=2**63 - 1, ttft_s=1e308, tokens_per_s=-1e308)
    turns = tuple(ExportedTurn(id=2**63 + at, parent=None, role="user", content=HOSTILE, note=note) for at in range(3))
    stranger = Export(title=HOSTILE, settings=ChatSettings(model=HOSTILE), shown=2**64, turns=turns)
    (tmp_path / "5.json").write_bytes(to_json(stranger))
    app = console(FakeLink())
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await opened(pilot)
        for number in range(1, 6):
            await pilot.press("alt+shift+r", *f"{number}.json", "enter")
            await until(pilot, lambda: not isinstance(app.screen, LineScreen))
        await until(pilot, lambda: len(said(app)) == 4)
        await until(pilot, lambda: r"\x1b]52;c;QQ==" in screen_text(app))
    assert app.return_code in (0, None)


async def test_the_last_answer_or_the_selected_turn_is_copied_from_its_source(chats: Path) -> None:
    app = console(FakeLink(), chats)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: app.clipboard == CODE)
        await pilot.press("alt+k", "alt+k", "alt+y")
        await until(pilot, lambda: app.clipboard == "What is TTFT?")


async def test_code_blocks_are_copied_from_the_last_one_backwards(chats: Path) -> None:
    app = console(FakeLink(), chats)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await opened(pilot)
        await pilot.press("escape")
        for block in ("if x:\n    second()\n", "first()\n", "if x:\n    second()\n"):
            await pilot.press("alt+x")
            await until(pilot, lambda block=block: app.clipboard == block)  # type: ignore[misc]
        assert "Copied code block 2 of 2, 2 lines." in said(app)


async def test_a_preset_is_chosen_from_the_list_and_kept_with_the_conversation(chats: Path) -> None:
    link = FakeLink(answer="A")
    async with console(link, chats).run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        await pilot.press("alt+p")
        await until(pilot, lambda: isinstance(pilot.app.screen, PresetsScreen))
        await pilot.press("down", "enter")
        await until(pilot, lambda: not isinstance(pilot.app.screen, PresetsScreen))
        await asked(pilot, "Q")
        assert link.chats[0][1].temperature == 0.0
    assert ChatStore(chats).conversations()[0].settings == ChatSettings(temperature=0.0)


async def test_settings_are_kept_as_a_preset_and_the_preset_can_be_deleted(chats: Path) -> None:
    app = console(FakeLink(), chats)
    async with app.run_test(size=(100, 32), notifications=True) as pilot:
        await opened(pilot)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: isinstance(app.screen, ChatSettingsScreen))
        await pilot.press(*"Rhyme.", "tab", *"0.9", "ctrl+t")
        await until(pilot, lambda: isinstance(app.screen, PresetsScreen))
        await pilot.press("n", *"Poet", "enter")
        await until(pilot, lambda: isinstance(app.screen, PresetsScreen))
        assert ChatStore(chats).presets()[0].settings == ChatSettings(system_prompt="Rhyme.", temperature=0.9)
        assert "Poet" in screen_text(app)
        await pilot.press("d", "y")
        await until(pilot, lambda: "Poet" not in screen_text(app))
        await pilot.press("d")
        await until(pilot, lambda: "Built-in presets cannot be deleted." in said(app))
        assert app.screen.query_one(OptionList).option_count > 3
    assert ChatStore(chats).presets() == []


async def test_the_draft_is_counted_once_typing_rests_against_the_context(chats: Path) -> None:
    link = FakeLink()
    async with console(link, chats).run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        before = len(link.conversation.counted)
        await pilot.press(*"three words here")
        await until(pilot, lambda: "+ 3 of 8,192 tokens" in count(pilot))
        assert len(link.conversation.counted) - before < len("three words here")
        link.conversation.context = 30
        await pilot.press(*" and")
        await until(pilot, lambda: "left for the answer" in count(pilot))
        link.conversation.context = 28
        await pilot.press(*" more")
        await until(pilot, lambda: "over" in count(pilot))


async def test_counting_never_holds_the_keys() -> None:
    link = FakeLink()
    link.hold("count_tokens")
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await pilot.press(*"typing")
        assert pilot.app.screen.query_one(ChatInput).text == "typing"
        link.release("count_tokens")
        await until(pilot, lambda: "of 8,192 tokens" in count(pilot))


async def test_a_draft_stays_in_the_box_when_another_conversation_is_opened(chats: Path) -> None:
    async with console(FakeLink(), chats).run_test() as pilot:
        await opened(pilot)
        await pilot.press(*"draft", "ctrl+n")
        await until(pilot, lambda: answers(pilot) == [])
        assert pilot.app.screen.query_one(ChatInput).text == "draft"


async def test_without_a_model_nothing_is_counted() -> None:
    link = FakeLink()
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await until(pilot, lambda: "tokens" in count(pilot))
        link.show(scenes.empty())
        await until(pilot, lambda: count(pilot) == "")


def test_the_count_warns_before_nothing_is_left_for_the_answer() -> None:
    assert count_line(DraftCount(history=312, draft=48, context=8192)) == ("312 + 48 of 8,192 tokens", False)
    near = DraftCount(history=7700, draft=48, context=8192)
    assert count_line(near) == ("7,700 + 48 of 8,192 tokens · 444 left for the answer", True)
    assert count_line(near, max_tokens=400) == ("7,700 + 48 of 8,192 tokens", False)
    full = DraftCount(history=8190, draft=4, context=8192)
    assert count_line(full) == ("8,190 + 4 of 8,192 tokens · 3 over", True)
    assert count_line(DraftCount(history=5, draft=4, context=0)) == ("5 + 4 tokens", False)
    assert count_line(DraftCount(history=5, draft=0, context=8192)) == ("5 of 8,192 tokens", False)


async def test_a_file_locked_while_chatting_is_one_sentence_and_the_chat_goes_on(chats: Path) -> None:
    app = console(FakeLink(answer="in memory"), chats)
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await opened(pilot)
        locking = sqlite3.connect(chats, isolation_level=None)
        locking.execute("BEGIN IMMEDIATE")
        await asked(pilot, "Q")
        assert answers(pilot)[-1] == "in memory"
        await until(pilot, lambda: any("database is locked" in message for message in said(app)))
        assert len(said(app)) == 1
        locking.execute("ROLLBACK")
        locking.close()
    assert last_turn(chats).content == CODE


async def test_a_file_of_a_newer_version_is_one_sentence_and_the_chat_goes_on(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "chats.db") as db:
        db.execute("PRAGMA user_version = 99")
    app = console(FakeLink(answer="A"), tmp_path / "chats.db")
    async with app.run_test(notifications=True) as pilot:
        await opened(pilot)
        await asked(pilot, "Q")
        assert answers(pilot) == ["A"]
        assert len(said(app)) == 1
        assert "newer version" in said(app)[0]


async def test_the_words_beside_the_count_can_be_clicked(chats: Path) -> None:
    async with console(FakeLink(), chats).run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        row = next(at for at, line in enumerate(rows(pilot.app)) if "rename" in line)
        await pilot.click(offset=(rows(pilot.app)[row].index("rename"), row))
        await until(pilot, lambda: isinstance(pilot.app.screen, LineScreen))


async def test_digits_and_letters_go_into_the_box() -> None:
    async with console(FakeLink()).run_test() as pilot:
        await opened(pilot)
        await pilot.press(*"1 or 2, query <a> [b] /c jkvwbWR?")
        assert pilot.app.screen.query_one(ChatInput).text == "1 or 2, query <a> [b] /c jkvwbWR?"
        assert isinstance(pilot.app, EricApp)
        assert pilot.app.current_mode == "chat"


async def test_every_action_of_the_chat_is_in_the_palette_while_typing() -> None:
    from console.tui.commands import entries
    from console.tui.screens.chat.screen import CHAT_BINDINGS

    link = FakeLink(answer="    code")
    link.conversation.thinking = "Hm."
    async with console(link).run_test() as pilot:
        await opened(pilot)
        await asked(pilot, "Q")
        offered = {entry.title for entry in entries(pilot.app.screen)}
        idle = {binding.tooltip for binding in CHAT_BINDINGS if binding.id != "chat.stop"}  # type: ignore[union-attr]
        assert idle <= offered
        await ask(pilot, "Q")
