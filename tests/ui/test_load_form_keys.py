"""Every option of a load on the form: all of them shown, one typed, and the load has it."""

from __future__ import annotations

from console.settings.load_options import LoadOptions
from console.tui.app import EricApp
from console.tui.screens.dialogs import LineScreen
from console.tui.screens.models.form import LoadFormView
from tests.fakes import scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import toasts, until


async def test_all_options_are_shown_and_a_list_is_typed() -> None:
    link = FakeLink(scenes.empty())
    app = EricApp(link, start="models")
    async with app.run_test(size=(140, 60)) as pilot:
        await until(pilot, lambda: bool(link.models.asked))
        view = app.screen.query_one(LoadFormView)
        assert "gpu split" not in str(view.content)
        await pilot.press("e", "m")
        assert view.form is not None
        names = [field.name for field in view.form.fields]
        await pilot.press(*["down"] * names.index("gpu_split"), "t")
        await until(pilot, lambda: isinstance(app.screen, LineScreen))
        await pilot.press(*"16,x", "enter")
        await until(pilot, lambda: any("is not a value of gpu split" in each for each in toasts(app)))
        await pilot.press("t")
        await until(pilot, lambda: isinstance(app.screen, LineScreen))
        await pilot.press(*"16,24", "enter")
        await until(pilot, lambda: link.models.asked[-1] == ("demo", LoadOptions(gpu_split=(16.0, 24.0))))
        await pilot.press("m", "enter")
        await until(pilot, lambda: ("load", {"model": "demo", "gpu_split": (16.0, 24.0)}) in link.commands)
