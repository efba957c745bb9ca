"""Model folders that somebody else made, on the Models screen: a row with its reason, and the console goes on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from console.tui.app import EricApp
from console.tui.screens.models.table import ModelTable
from engine.models.catalog import MAX_COUNT, ModelEntry
from engine.models.discover import discover
from tests.fakes import scenes
from tests.fakes.hostile_folders import FOLDERS
from tests.fakes.link import MODELS, FakeLink
from tests.fakes.model_folders import write_model
from tests.ui.seen import cells, screen_text, selected, until

pytestmark = pytest.mark.long


async def test_every_hostile_folder_is_a_row_whose_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    for number, (spoil, _) in enumerate(FOLDERS.values()):
        spoil(write_model(tmp_path / "models" / f"hostile{number:02}"))
    found = [entry for entry in discover([tmp_path / "models"]) if entry.origin != "demo"]
    app = EricApp(FakeLink(scenes.empty(), models=found), start="models")
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: len(pilot.app.screen.query(ModelTable)) == 1)
        table = app.screen.query_one(ModelTable)
        await until(pilot, lambda: len(table.rows) == len(FOLDERS))
        for entry in found:
            table.move_to([row.key for row in table.rows].index(entry.name))
            await until(pilot, lambda name=entry.name: name in selected(pilot))
            await until(pilot, lambda why=entry.problem: why[:30] in selected(pilot))
    assert app.return_code in (None, 0)


async def test_the_largest_counts_that_there_can_be_are_shown_and_compared() -> None:
    largest = msgspec.structs.replace(
        MODELS[0],
        name="largest",
        parameters=MAX_COUNT,
        weights_bytes=MAX_COUNT,
        context_tokens=MAX_COUNT,
        kept_bytes=MAX_COUNT,
    )
    densest = msgspec.structs.replace(largest, name="densest", parameters=1)
    app = EricApp(FakeLink(scenes.empty(), models=[largest, densest]), start="models")
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: len(pilot.app.screen.query(ModelTable)) == 1)
        table = app.screen.query_one(ModelTable)
        await until(pilot, lambda: len(table.rows) == 2)
        assert cells(table, "largest")[5] == "9223372036.9B"
        await pilot.press("space", "down", "v")
        await until(pilot, lambda: "densest" in screen_text(app) and "bits per weight" in screen_text(app))


@pytest.mark.parametrize("field", ["parameters", "weights_bytes", "context_tokens", "kept_bytes"])
@pytest.mark.parametrize("count", [MAX_COUNT + 1, 10**400, -1], ids=["one more", "400 digits", "less than none"])
def test_a_number_beyond_all_counts_is_no_entrys(field: str, count: int) -> None:
    with pytest.raises(ValueError, match="beyond all counts"):
        msgspec.structs.replace(MODELS[0], **{field: count})
    fields = msgspec.to_builtins(MODELS[0], enc_hook=str) | {field: -1}
    with pytest.raises(msgspec.ValidationError, match="beyond all counts"):
        msgspec.convert(fields, ModelEntry, dec_hook=lambda kind, value: kind(value))
