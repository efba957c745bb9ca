"""keys.toml: a person's own keys, used when they are saved, and every mistake in them told in one message."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from console.cli.main import main
from console.tui.app import EricApp
from console.tui.binding_index import all_bindings, can_conflict
from console.tui.keys_file import KeysFile, check_keys, is_key, keys_path, read_keys, sample
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, toasts, until


def saved(text: str) -> Path:
    keys_path().parent.mkdir(parents=True, exist_ok=True)
    keys_path().write_text(text)
    return keys_path()


def found(**keys: str) -> KeysFile:
    """What the file of those keys (dots as underscores) comes to."""
    return check_keys(
        KeysFile({name.replace("_", "."): each for name, each in keys.items()}), all_bindings(), can_conflict
    )


def test_ids_are_quoted_or_dotted_and_keys_words_or_lists(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text('workers.more = "ctrl+k"\n"help" = ["?", "f12"]\n"quit" = "-, Q"')
    assert read_keys(tmp_path / "keys.toml") == KeysFile(
        {"workers.more": "ctrl+k", "help": "question_mark,f12", "quit": "minus,Q"}
    )


def test_no_file_is_no_mistake(tmp_path: Path) -> None:
    assert read_keys(tmp_path / "keys.toml") == KeysFile()


@pytest.mark.parametrize("text", ["[", b"\xff", '"help" = 3', '"help" = []', '"help" = ""'])
def test_what_is_no_keys_file_is_one_sentence(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "keys.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    file = read_keys(tmp_path / "keys.toml")
    assert file.keys == {}
    assert len(file.problems) == 1


def test_an_id_that_nothing_has_is_named_with_the_nearest() -> None:
    assert found(workers_mor="K").problems == ("workers.mor is not an action; did you mean workers.more?",)


def test_a_key_that_no_terminal_sends_is_named() -> None:
    assert found(workers_more="ctlr+k").problems == ('workers.more: "ctlr+k" is not a key; did you mean ctrl+k?',)


@pytest.mark.parametrize("key", ["w", "G", "?", "ctrl+k", "ctrl+shift+k", "f5", "question_mark", "alt+left", "ctrl++"])
def test_keys_that_terminals_send_are_keys(key: str) -> None:
    assert is_key(key)


def test_a_key_that_means_two_things_in_one_place_is_a_clash_and_neither_is_changed() -> None:
    file = found(settings_edit="d")
    assert file.problems == ('"d" is bound to both settings.edit and settings.reset',)
    assert file.keys == {}


def test_a_screen_cannot_take_a_key_of_the_console_but_a_dialog_can() -> None:
    assert found(settings_edit="q").problems == ('"q" is bound to both quit and settings.edit',)
    assert found(worker_restart="a").problems == ()


def test_the_same_key_on_two_screens_is_no_clash() -> None:
    assert found(settings_edit="K", logs_level="K").problems == ()


def test_two_actions_can_swap_their_keys() -> None:
    assert found(workers_more="left_square_bracket", workers_fewer="right_square_bracket").problems == ()


def test_the_sample_names_every_id_and_uncommented_changes_nothing(tmp_path: Path) -> None:
    text = sample(all_bindings())
    lines = [line.removeprefix("# ") for line in text.splitlines() if re.match(r'# "[\w.]+" = ', line)]
    (tmp_path / "keys.toml").write_text("\n".join(lines))
    file = read_keys(tmp_path / "keys.toml")
    assert set(file.keys) == {bound.id for bound in all_bindings()}
    assert check_keys(file, all_bindings(), can_conflict).problems == ()
    assert tomllib.loads(text) == {}


def test_the_command_prints_them_and_where_they_belong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys"]) == 0
    assert '# "workers.more" = "right_square_bracket"  # Add a worker' in capsys.readouterr().out
    assert main(["keys", "path"]) == 0
    assert capsys.readouterr().out == f"{keys_path()}\n"


async def test_keys_are_mapped_from_the_start_and_shown_as_they_are() -> None:
    saved('"workers.more" = "K"\n"help" = "H"')
    link = FakeLink()
    app = EricApp(link)
    async with app.run_test(size=(120, 30)) as pilot:
        await until(pilot, lambda: "H Help" in rows(app)[-1])
        await pilot.press("K")
        await until(pilot, lambda: link.commands == [("reconfigure", {"num_workers": 3})])
        await pilot.press("right_square_bracket")
        await app.workers.wait_for_complete()
        assert len(link.commands) == 1


async def test_saved_keys_are_used_without_a_new_start() -> None:
    app = EricApp(FakeLink())
    async with app.run_test(size=(120, 30)) as pilot:
        saved('"help" = "H"')
        app.preferences.look()
        await until(pilot, lambda: "H Help" in rows(app)[-1])
        keys_path().unlink()
        app.preferences.look()
        await until(pilot, lambda: "? Help" in rows(app)[-1])


async def test_one_message_names_every_mistake_and_the_other_keys_work() -> None:
    saved('"workers.mor" = "K"\n"help" = "H"\n"settings.edit" = "ctlr+e"\n"logs.level" = "q"')
    app = EricApp(FakeLink())
    async with app.run_test(size=(120, 30), notifications=True) as pilot:
        await until(pilot, lambda: bool(toasts(app)))
        (toast,) = toasts(app)
        assert all(words in toast for words in ("keys.toml", "workers.mor ", '"ctlr+e"', "quit and logs.level"))
        await until(pilot, lambda: "H Help" in rows(app)[-1])
