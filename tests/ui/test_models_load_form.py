"""The form of a load: values change the price and are loaded with; searching, comparing, downloads."""

from __future__ import annotations

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from console.link.protocol import Fetching
from console.settings.load_options import NO_OPTIONS, LoadOptions
from console.tui.app import EricApp
from console.tui.screens.models.comparison import CompareScreen
from console.tui.screens.models.form import LoadFormView
from console.tui.screens.models.loaded_models import ModelLoad, loaded_models_text
from console.tui.screens.models.screen import LoadScreen
from console.tui.screens.models.table import ModelTable, matches
from console.tui.widgets.table import Table
from engine.backends.base import LoadProgress
from engine.errors import LoadCancelled
from tests.fakes import estimates, fleet_scenes, scenes
from tests.fakes.link import MODELS, FakeLink
from tests.ui.seen import cells, listed, rows, screen_text, selected, shows, toasts, until

HERMES = str(MODELS[1].path)
UNFINISHED = msgspec.structs.replace(
    MODELS[1],
    name="org/big",
    unfinished="org/big",
    kept_bytes=3 * scenes.GIB,
    problem="its download stopped with 3.00 GiB; loading it continues the download",
)


async def priced(pilot: Pilot[None], link: FakeLink, times: int) -> None:
    """Until so many estimates were asked for, and the last one is shown."""
    await until(pilot, lambda: len(link.models.asked) >= times and "Estimating" not in selected(pilot))


# -- the form ---------------------------------------------------------------------------------------------------------


async def test_values_are_changed_by_keys_and_priced_anew_once_they_rest() -> None:
    link = FakeLink(scenes.busy())
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await pilot.press("down")
        await until(pilot, lambda: (HERMES, NO_OPTIONS) in link.models.asked)
        await pilot.press("e", "right", "down", "left", "down", "left", "left", "down", "left")
        own = LoadOptions(num_workers=3, max_prompts=6, max_model_len=4096, cache_bits=8)
        await until(pilot, lambda: link.models.asked[-1] == (HERMES, own))


async def test_a_number_is_typed_digit_by_digit_and_taken_back() -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link, start="models")
    async with app.run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await priced(pilot, link, 1)
        await pilot.press("e", "down", "3", "2")
        form = app.screen.query_one(LoadFormView)
        assert form.form is not None and form.form.own == LoadOptions(max_prompts=32)
        await pilot.press("backspace")
        assert form.form.own == LoadOptions(max_prompts=3)
        await pilot.press("backspace")
        assert form.form.own == NO_OPTIONS
        await pilot.press("down", "down", "8", "down", "5")
        assert form.form.own == LoadOptions(cache_bits=8)
        assert app.current_mode == "models"  # digits open screens elsewhere


async def test_values_can_be_clicked() -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link, start="models")
    async with app.run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await priced(pilot, link, 1)
        await until(pilot, lambda: any("each." in row for row in rows(app)))  # the last word: the rows below stay now
        y, row = next((y, row) for y, row in enumerate(rows(app)) if "max prompts" in row)
        await pilot.click(offset=(row.index("+", row.index("max prompts")), y))
        await until(pilot, lambda: link.models.asked[-1] == ("demo", LoadOptions(max_prompts=12)))


async def test_while_values_move_the_old_price_is_not_taken_for_the_new_one() -> None:
    link = FakeLink(scenes.busy())
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await priced(pilot, link, 1)
        link.hold("estimate")
        link.script["models.estimate"] = estimates.estimate_that_lacks()
        await pilot.press("e", "right")
        await until(pilot, lambda: len(link.models.asked) == 2)
        assert "◌ Estimating" in selected(pilot)
        assert "Fits" not in selected(pilot)
        link.release("estimate")
        await until(pilot, lambda: "✖ −2,310 MiB" in selected(pilot))


async def test_a_model_is_loaded_with_the_values_of_its_form() -> None:
    link = FakeLink(scenes.empty())
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await priced(pilot, link, 1)
        await pilot.press("e", "right", "enter")
        await until(pilot, lambda: ("load", {"model": "demo", "num_workers": 2}) in link.commands)


async def test_edits_of_a_model_stay_while_others_are_looked_at() -> None:
    link = FakeLink(scenes.empty())
    app = EricApp(link, start="models")
    async with app.run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await priced(pilot, link, 1)
        await pilot.press("e", "right", "escape", "down")
        await until(pilot, lambda: link.models.asked[-1] == (HERMES, NO_OPTIONS))
        await pilot.press("up")
        await until(pilot, lambda: link.models.asked[-1] == ("demo", LoadOptions(num_workers=2)))


async def test_the_form_starts_with_what_the_model_was_last_loaded_with_and_r_resets_it() -> None:
    link = FakeLink(scenes.empty())
    link.models.saved["demo"] = LoadOptions(max_model_len=512, cache_bits=8)
    app = EricApp(link, start="models")
    async with app.run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await until(pilot, lambda: ("demo", link.models.saved.get("demo")) in link.models.asked)
        assert "512" in str(app.screen.query_one(LoadFormView).content)
        await pilot.press("R")
        await until(pilot, lambda: link.models.asked[-1] == ("demo", NO_OPTIONS))
    assert ("forget", {"model": "demo"}) in link.commands
    assert link.models.saved == {}


async def test_the_verdict_stays_in_sight_while_all_options_are_gone_through() -> None:
    app = EricApp(FakeLink(scenes.empty()), start="models")
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("e", "m", *["down"] * 40)
        await until(pilot, lambda: isinstance(app.screen, LoadScreen) and "demo  ✓ Fits" in screen_text(app))
        form = app.screen.query_one(LoadFormView).form
        assert form is not None
        await until(pilot, lambda: f"▸ {form.fields[-1].title}" in screen_text(app))


async def test_where_it_is_narrow_the_form_has_a_page_of_its_own() -> None:
    link = FakeLink(scenes.empty())
    app = EricApp(link, start="models")
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("e")
        await until(pilot, lambda: isinstance(app.screen, LoadScreen) and "Fits" in screen_text(app))
        await pilot.press("down", "right", "b")
        own = {"model": "demo", "beside": True, "max_prompts": 24}
        await until(pilot, lambda: ("load", own) in link.commands)
        assert not isinstance(app.screen, LoadScreen)


# -- searching and comparing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "found"),
    [("hermes", ["NeuralHermes-7B"]), ("exl2", ["NeuralHermes-7B"]), ("LLAMA bf16", ["demo"]), ("mistral fp32", [])],
)
def test_models_are_found_by_name_architecture_and_quantisation(words: str, found: list[str]) -> None:
    assert [entry.name for entry in MODELS if matches(entry, words)] == found


async def test_slash_searches_enter_keeps_and_escape_shows_all() -> None:
    app = EricApp(FakeLink(scenes.empty()), start="models")
    async with app.run_test(size=(120, 40)) as pilot:
        table = await listed(pilot)
        await pilot.press("slash", *"mistral")
        await until(pilot, lambda: [row.key for row in table.rows] == ["NeuralHermes-7B"])
        assert table.border_subtitle == "1 of 3 models"
        await pilot.press("enter")
        assert table.has_focus and table.selected is not None and table.selected.name == "NeuralHermes-7B"
        await pilot.press("escape")
        assert len(table.rows) == 3
        assert not app.screen.query_one("#search", Input).has_class("-open")


async def test_a_search_that_finds_nothing_says_so() -> None:
    app = EricApp(FakeLink(scenes.empty()), start="models")
    async with app.run_test(size=(120, 40)) as pilot:
        await listed(pilot)
        await pilot.press("slash", *"zzz")
        await until(pilot, lambda: "No model matches" in screen_text(app))
        await pilot.press("escape", "down")
        assert len(app.screen.query_one(ModelTable).rows) == 3


async def test_two_marked_models_are_compared_with_the_fit_of_each() -> None:
    link = FakeLink(scenes.busy())
    link.models.expected[HERMES] = estimates.estimate_that_lacks()
    app = EricApp(link, start="models")
    async with app.run_test(size=(120, 40)) as pilot:
        table = await listed(pilot)
        await pilot.press("space", "down", "space")
        assert [cells(table, name)[0] for name in ("demo", "NeuralHermes-7B")] == ["1", "2 ●"]
        await pilot.press("v")
        await until(pilot, lambda: "✖ does not fit" in screen_text(app))
        assert "≠ differs" in screen_text(app)
        assert "= same" in screen_text(app)
        await pilot.press("d")
        await until(pilot, lambda: "= same" not in screen_text(app))
        await pilot.press("escape")
        assert not isinstance(app.screen, CompareScreen)


async def test_the_marked_model_is_compared_with_the_selected_one_and_one_alone_with_none() -> None:
    app = EricApp(FakeLink(scenes.empty()), start="models")
    async with app.run_test(size=(120, 40), notifications=True) as pilot:
        await listed(pilot)
        await pilot.press("space", "v")
        await until(pilot, lambda: any("Mark a model" in toast for toast in toasts(app)))
        await pilot.press("down", "v")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen))
        assert "GPU0 needs" in [row.key for row in app.screen.query_one(Table).rows] or "fit" in screen_text(app)


# -- loads and downloads ----------------------------------------------------------------------------------------------


async def test_a_download_is_shown_with_its_pace_beside_a_model_that_serves() -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link, start="models")
    async with app.run_test(size=(140, 40)) as pilot:
        await listed(pilot)

        def at(second: int, done_gib: int) -> None:
            progress = LoadProgress(phase="download", done=done_gib * scenes.GIB, total=8 * scenes.GIB)
            link.script["models.fetching"] = Fetching(model="org/big", progress=progress)
            link.show(scenes.busy(at=scenes.NOW + second))
            app.screen.query_one(ModelLoad).show(link.snapshot(), link.models.fetching())

        at(1, 1)
        at(3, 3)
        shown = str(app.screen.query_one(ModelLoad).content)
        assert "◔ downloading  org/big" in shown
        assert "3.0/8.0 GiB, 1.0 GiB/s, 5.00 s left" in shown
        assert "● ready  NeuralHermes-7B" in shown
        await pilot.press("c")
        await until(pilot, lambda: "cancel_load" in link.names())


def test_each_worker_of_a_load_shows_its_phase_and_its_pace() -> None:
    from console.tui.load_pace import Pace

    shown = loaded_models_text(scenes.busy(), None, {"w1": Pace(1.5 * scenes.GIB, 4.2)}).plain
    assert "w1 ◔ loading  weights 3.1/9.4 GiB, 1.5 GiB/s, 4.20 s left" in shown
    loading = fleet_scenes.second_loading()
    assert "weights" in loaded_models_text(loading, None, {"demo": Pace(0.0, None)}).plain
    assert "stalled" in loaded_models_text(loading, None, {"demo": Pace(0.0, None)}).plain


async def test_a_download_that_stopped_is_gone_on_with_by_its_hub_id() -> None:
    link = FakeLink(scenes.empty(), models=[UNFINISHED, *MODELS])
    app = EricApp(link, start="models")
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: bool(app.screen.query(ModelTable)))
        await until(pilot, lambda: len(app.screen.query_one(ModelTable).rows) == 4)
        await until(pilot, lambda: "◔ Download stopped at 3.0 GiB." in selected(pilot))
        await pilot.press("enter")
        await until(pilot, lambda: ("load", {"model": "org/big"}) in link.commands)


@pytest.mark.parametrize("name", ["org/big", "org/big:Q4_K_M", "org/big/file.gguf"])
async def test_ctrl_l_fetches_a_hub_id_and_loads_nothing(name: str) -> None:
    link = FakeLink(scenes.empty())
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await pilot.press("o", *name, "ctrl+l")
        await until(pilot, lambda: ("download", {"model": name}) in link.commands)
        assert "load" not in link.names()


async def test_a_cancelled_load_says_what_is_kept_and_is_no_failure() -> None:
    link = FakeLink(scenes.empty())
    link.failures["download"] = LoadCancelled("downloading org/big was cancelled; 3.0 of 8.0 GiB are kept")
    app = EricApp(link, start="models")
    async with app.run_test(size=(140, 40), notifications=True) as pilot:
        await listed(pilot)
        await pilot.press("o", *"org/big", "ctrl+l")
        await until(pilot, lambda: any("are kept" in toast for toast in toasts(app)))
        assert len(toasts(app)) == len(toasts(app, "information")) == 1


# -- pictures ---------------------------------------------------------------------------------------------------------


async def changed_form(pilot: Pilot[None]) -> None:
    """The second model's form with some values of its own, priced."""
    await listed(pilot)
    await pilot.press("down", "e", "right", "down", "right", "down", "left")
    own = LoadOptions(num_workers=3, max_prompts=12, max_model_len=6144)

    def shown() -> bool:
        form = pilot.app.screen.query_one(LoadFormView).form
        return form is not None and form.own == own and "Estimating" not in selected(pilot)

    await until(pilot, shown)


async def compared(pilot: Pilot[None]) -> None:
    """The first two models side by side, with the fit of each."""
    await listed(pilot)
    await pilot.press("space", "down", "v")
    await until(pilot, lambda: isinstance(pilot.app.screen, CompareScreen))
    table = pilot.app.screen.query_one(Table)
    await until(pilot, lambda: "GPU1 left" in [row.key for row in table.rows])
    behind = pilot.app.screen_stack[-2].query_one("#brief", Static)
    await until(pilot, lambda: "Estimating" not in str(behind.content))


def test_a_form_looks_right(snap_compare: object) -> None:
    app = EricApp(FakeLink(scenes.busy()), start="models")
    assert snap_compare(app, terminal_size=(120, 40), run_before=changed_form)  # type: ignore[operator]


@pytest.mark.parametrize("size", [(80, 24), (140, 44)])
def test_the_verdict_is_above_the_form_and_the_devices_below_it(size: tuple[int, int]) -> None:
    app = EricApp(FakeLink(scenes.busy()), start="models")
    values = (
        "NeuralHermes-7B  ✓ Fits: 2 workers",
        "workers      −         3 +",
        "max prompts  −        12 +",
        "▸ context      −     6,144 +",
    )
    fit = (
        "GiB   weights",
        "GPU0      9.4     6.1",
        "GPU1      9.4     6.1",
        "1 on GPU0, 1 on GPU1",
    )
    assert shows(app, *values, *fit, terminal_size=size, run_before=changed_form)


def comparison() -> EricApp:
    """The second model lacks memory."""
    link = FakeLink(scenes.busy())
    link.models.expected[HERMES] = estimates.estimate_that_lacks()
    return EricApp(link, start="models")


def test_a_comparison_looks_right(snap_compare: object) -> None:
    assert snap_compare(comparison(), terminal_size=(120, 40), run_before=compared)  # type: ignore[operator]


def test_a_comparison_fits_a_small_terminal() -> None:
    models = (
        "Two models",
        "demo             NeuralHermes-7B",
        "architecture       Llama            Mistral           ≠ differs",
    )
    rows = "17.0 MiB         4.4 GiB", "× 265", "backend            torch            torch             = same"
    load = "load: max prompts  8                8", "fit                ✓ fits           ✖ does not fit"
    assert shows(comparison(), *models, *rows, *load, terminal_size=(80, 24), run_before=compared)


async def test_a_model_that_cannot_be_loaded_offers_no_load_and_no_form() -> None:
    link = FakeLink()
    app = EricApp(link, start="models")
    async with app.run_test(size=(140, 44), notifications=True) as pilot:
        table = await listed(pilot)
        table.move_to([row.key for row in table.rows].index("old-pickle[v1]"))
        await until(pilot, lambda: "the weights are pickles" in screen_text(app))
        seen = screen_text(app)
        assert "Enter loads it" not in seen and seen.count("the weights are pickles") == 1
        assert not app.screen.query_one(LoadFormView).display
        await pilot.press("enter", "e")
        assert not toasts(app)
        assert "load" not in link.names()
        assert table.has_focus
        table.move_to(0)
        await until(pilot, lambda: app.screen.query_one(LoadFormView).display)
        assert "Enter loads it" in screen_text(app)
