"""The settings screen: all of them, where each came from, found by a word, changed without losing what was typed."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from console.settings.schema import Settings, fields
from console.settings.sources import Sources
from console.tui.app import EricApp
from console.tui.screens.settings.panel import SettingPanel, SettingTable
from console.tui.widgets.table import Table
from engine.errors import InsufficientMemory
from tests.fakes.link import FILE, FakeLink, FakeSettings
from tests.ui.seen import screen_text, shows, toasts, until

PICTURED = (
    *("model", "models_dir", "backend", "dtype", "lora", "max_model_len", "num_workers", "max_prompts", "timeout"),
    *("devices", "cluster", "cache_bits", "draft_model", "draft_tokens", "attention"),
    *("api", "host", "port", "api_key", "headless", "theme", "refresh_hz", "verbose"),
)
"""What the pictures show, so that a new setting changes none."""


def an_app(link: FakeLink, **options: Any) -> EricApp:
    """On the settings screen, in the theme that the fake's file asks for."""
    return EricApp(link, **{"start": "settings", "theme": "ericllm-light", **options})


async def at(pilot: Pilot[None], name: str) -> SettingTable:
    """The table, with the cursor on a setting."""
    await until(pilot, lambda: bool(pilot.app.screen.query(SettingTable)))
    table = pilot.app.screen.query_one(SettingTable)
    await until(pilot, lambda: table.cursor_key is not None)
    if name not in {row.key for row in table.rows}:
        await pilot.press("v")
        await until(pilot, lambda: name in {row.key for row in table.rows})
    table.move_to([row.key for row in table.rows].index(name))
    await pilot.pause()
    return table


def cells(table: SettingTable, name: str) -> list[str]:
    row = next(row for row in table.rows if row.key == name)
    return ["".join(text for text, _ in cell).strip() for cell in row.cells]


def problem(pilot: Pilot[None]) -> str:
    return str(pilot.app.screen.query_one("#problem", Static).content)


def listed(table: SettingTable) -> set[str]:
    return {row.key for row in table.rows if not row.key.startswith("#")}


async def test_every_setting_of_the_schema_is_listed() -> None:
    async with an_app(FakeLink()).run_test(size=(120, 40)) as pilot:
        table = await at(pilot, "port")
        await pilot.press("v")
        await until(pilot, lambda: listed(table) == set(Settings.model_fields))
        assert f"All {len(Settings.model_fields)} settings" in screen_text(pilot.app)


async def test_basic_settings_and_changed_ones_come_first_and_a_search_looks_at_all() -> None:
    basic = {name for name, _, flag in fields() if flag.basic}
    async with an_app(FakeLink()).run_test(size=(120, 40)) as pilot:
        table = await at(pilot, "port")
        assert listed(table) == basic | {"draft_tokens"}  # which the file sets
        assert 20 <= len(basic) <= 30
        assert f"of {len(Settings.model_fields)}, v shows all" in screen_text(pilot.app)
        await pilot.press("slash", *"json_depth")
        await until(pilot, lambda: listed(table) == {"max_json_depth"})


async def test_a_row_says_its_value_where_it_came_from_and_what_the_file_has_instead() -> None:
    async with an_app(FakeLink()).run_test(size=(140, 40)) as pilot:
        table = await at(pilot, "port")
        assert cells(table, "port") == ["port", "8001", "--port", "file: 9000"]
        assert cells(table, "max_prompts") == ["max_prompts", "8", "config.toml", ""]
        assert cells(table, "gpu_split") == ["gpu_split", "not set", "default", ""]
        seen = screen_text(pilot.app)
        assert "--port overrides the saved value" in seen
        assert "Listen port" in seen


async def test_a_secret_is_dots_wherever_it_stands() -> None:
    async with an_app(FakeLink()).run_test(size=(140, 40)) as pilot:
        table = await at(pilot, "api_key")
        await pilot.press("enter", *"new-key")
        assert cells(table, "api_key")[1] == "••••••••"
        assert "new-key" not in screen_text(pilot.app)
        assert "s3cret" not in screen_text(pilot.app)


async def test_a_secret_is_not_written_unless_it_is_typed() -> None:
    link = FakeLink()
    async with an_app(link).run_test(size=(140, 40)) as pilot:
        await at(pilot, "api_key")
        await pilot.press("enter", "enter")
        await pilot.app.workers.wait_for_complete()
        assert link.settings.saves == []


async def test_a_value_is_typed_and_saved() -> None:
    link = FakeLink()
    async with an_app(link).run_test(size=(120, 40), notifications=True) as pilot:
        table = await at(pilot, "host")
        await pilot.press("enter", *"0.0.0.0", "enter")
        await until(pilot, lambda: cells(table, "host")[3] == "→ 0.0.0.0 at next start")
        assert link.settings.saves == [("host", "0.0.0.0")]
        assert toasts(pilot.app) == ["host saved, applies at the next start."]
        assert table.has_focus


async def test_a_bad_value_is_one_sentence_and_what_was_typed_stays() -> None:
    link = FakeLink()
    async with an_app(link).run_test(size=(120, 40)) as pilot:
        await at(pilot, "max_prompts")
        await pilot.press("enter", *"0", "enter")
        await until(pilot, lambda: "Max prompts 0: min 1" in problem(pilot))
        box = pilot.app.screen.query_one("#typed", Input)
        assert (box.value, box.has_focus) == ("0", True)
        await pilot.press("escape")
        assert problem(pilot) == ""
        assert not pilot.app.screen.query_one(SettingPanel).editing


async def test_what_the_engine_refuses_is_said_where_the_value_was_typed() -> None:
    link = FakeLink()
    link.failures["save"] = InsufficientMemory("another worker does not fit")
    async with an_app(link).run_test(size=(120, 40)) as pilot:
        await at(pilot, "num_workers")
        await pilot.press("enter", *"9", "enter")
        await until(pilot, lambda: "another worker does not fit" in problem(pilot))


async def test_a_switch_is_chosen_from_a_list() -> None:
    link = FakeLink()
    async with an_app(link).run_test(size=(120, 40)) as pilot:
        table = await at(pilot, "verbose")
        await pilot.press("enter")
        await until(pilot, lambda: pilot.app.screen.query_one("#choices", Table).has_focus)
        await pilot.press("up", "enter")
        await until(pilot, lambda: table.has_focus)
        assert link.settings.saves == [("verbose", "on")]


async def test_a_theme_is_tried_on_and_put_back_by_escape() -> None:
    link = FakeLink()
    app = an_app(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await at(pilot, "theme")
        await pilot.press("enter")
        await until(pilot, lambda: app.screen.query_one("#choices", Table).has_focus)
        await pilot.press("down")
        await until(pilot, lambda: app.theme != "ericllm-light")
        await pilot.press("escape")
        await until(pilot, lambda: app.theme == "ericllm-light")
        assert link.settings.saves == []


async def test_a_chosen_theme_is_worn_and_saved() -> None:
    link = FakeLink()
    app = an_app(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await at(pilot, "theme")
        await pilot.press("enter")
        await until(pilot, lambda: app.screen.query_one("#choices", Table).has_focus)
        await pilot.press("down", "enter")
        await until(pilot, lambda: bool(link.settings.saves))
        assert link.settings.saves == [("theme", app.theme)]
        assert app.theme == "ericllm-safe"


async def test_the_rate_of_the_screen_changes_at_once() -> None:
    link = FakeLink()
    app = an_app(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await at(pilot, "refresh_hz")
        await pilot.press("enter", *"10", "enter")
        await until(pilot, lambda: app._clock._interval == 0.1)


async def test_a_setting_is_taken_out_of_the_file() -> None:
    link = FakeLink()
    async with an_app(link).run_test(size=(120, 40)) as pilot:
        table = await at(pilot, "max_prompts")
        await pilot.press("d")
        await until(pilot, lambda: cells(table, "max_prompts")[1:3] == ["16", "default"])
        assert link.settings.saves == [("max_prompts", None)]


async def test_there_is_nothing_to_take_out_of_a_file_that_does_not_say_it() -> None:
    link = FakeLink()
    async with an_app(link).run_test(size=(120, 40)) as pilot:
        await at(pilot, "host")
        await pilot.press("d")
        await pilot.app.workers.wait_for_complete()
        assert link.settings.saves == []


async def test_words_find_settings_by_name_group_and_help() -> None:
    async with an_app(FakeLink()).run_test(size=(120, 40)) as pilot:
        table = await at(pilot, "port")
        await pilot.press("slash", *"concurrent worker")
        await until(pilot, lambda: [row.key for row in table.rows] == ["#Engine", "max_prompts"])
        await pilot.press("enter")
        assert table.has_focus
        await pilot.press("escape")
        await until(pilot, lambda: len(table.rows) > 20)


async def test_only_what_was_changed_can_be_shown() -> None:
    async with an_app(FakeLink()).run_test(size=(120, 40)) as pilot:
        table = await at(pilot, "port")
        await pilot.press("c")
        await pilot.pause()
        names = {row.key for row in table.rows if not row.key.startswith("#")}
        assert names == {"port", "api_key", "theme", "max_prompts", "draft_tokens"}


async def test_a_row_can_be_edited_with_the_mouse() -> None:
    async with an_app(FakeLink()).run_test(size=(120, 40)) as pilot:
        await at(pilot, "model")
        await pilot.click(SettingTable, offset=(4, 2), times=2)
        await until(pilot, lambda: pilot.app.screen.query_one(SettingPanel).editing)


async def test_the_cursor_passes_over_headings_both_ways() -> None:
    async with an_app(FakeLink()).run_test(size=(120, 40)) as pilot:
        table = await at(pilot, "num_experts")
        await pilot.press("down")
        assert table.cursor_key == "num_workers"
        await pilot.press("up")
        assert table.cursor_key == "num_experts"


async def test_a_knob_turned_elsewhere_says_so_and_what_the_next_start_has() -> None:
    link = FakeLink()
    link.settings.turned["max_prompts"] = 12
    async with an_app(link).run_test(size=(140, 40)) as pilot:
        table = await at(pilot, "max_prompts")
        assert cells(table, "max_prompts")[1:] == ["12", "changed at runtime", "→ 8 at next start"]


async def test_the_file_is_named() -> None:
    async with an_app(FakeLink()).run_test(size=(120, 40)) as pilot:
        await at(pilot, "port")
        assert str(FILE) in screen_text(pilot.app)


async def test_markup_in_a_value_is_text() -> None:
    link = FakeLink()
    link.settings = FakeSettings(link, Sources(saved={"model": "[red]x[/]"}, file=FILE))
    async with an_app(link, theme="ericllm-dark").run_test(size=(120, 40)) as pilot:
        await at(pilot, "model")
        assert screen_text(pilot.app).count("[red]x[/]") == 2


def pictured() -> EricApp:
    link = FakeLink()
    saved = {**link.settings.sources.saved, "theme": "ericllm-dark"}
    link.settings = FakeSettings(link, link.settings.sources.saving(saved, {}), names=PICTURED)
    return an_app(link, theme="ericllm-dark")


def test_the_settings_look_right(snap_compare: Any) -> None:
    async def there(pilot: Pilot[None]) -> None:
        await at(pilot, "port")
        await pilot.app.workers.wait_for_complete()
        await pilot.pause()

    assert snap_compare(pictured(), terminal_size=(120, 40), run_before=there)


@pytest.mark.parametrize(
    ("size", "name", "keys", "words"),
    [
        (
            (80, 24),
            "max_prompts",
            ("enter", "0", "enter"),
            ("num_workers", "max_prompts", "value    8", "✖ Max prompts 0: min 1"),
        ),
        (
            (120, 40),
            "backend",
            ("enter",),
            ("Inference backend.", "enter: save", "● auto", "○ torch", "○ exllamav2"),
        ),
        (
            (140, 40),
            "max_prompts",
            (),
            ("Max concurrent requests per worker", "value    8", "max_prompts       8", "file: 9000", "⏎ Edit"),
        ),
    ],
    ids=["small", "choices", "wide"],
)
def test_a_setting_is_described_with_its_value(
    size: tuple[int, int], name: str, keys: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert shows(pictured(), *words, terminal_size=size, run_before=lambda pilot: at(pilot, name), press=keys)


async def test_a_saved_value_that_waits_stands_beside_the_one_in_use_with_when_it_is_used() -> None:
    link = FakeLink()
    await link.settings.save("timeout", "900")
    async with an_app(link).run_test(size=(140, 40)) as pilot:
        table = await at(pilot, "timeout")
        assert cells(table, "timeout") == ["timeout", "600 s", "last start", "→ 900 s at next start"]
        seen = screen_text(pilot.app)
        assert "in use   600 s" in seen
        assert "saved    900 s, used from the next start on" in seen
        assert "from     config.toml" not in seen


async def test_times_are_shown_with_their_unit_and_typed_without() -> None:
    async with an_app(FakeLink()).run_test(size=(140, 40)) as pilot:
        table = await at(pilot, "timeout")
        assert cells(table, "timeout")[1] == "600 s"
        await pilot.press("enter")
        await until(pilot, lambda: pilot.app.screen.query_one(SettingPanel).editing)
        assert pilot.app.screen.query_one("#typed", Input).value == "600"
