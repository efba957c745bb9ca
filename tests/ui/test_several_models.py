"""Several models at once: which one is in view, what acts on it, and whether another would fit beside them."""

from __future__ import annotations

import pytest
from msgspec import structs

from console.link.protocol import ApiStatus
from console.tui import view
from console.tui.app import EricApp
from console.tui.commands import entries
from console.tui.screens.chat.screen import ChatScreen
from console.tui.screens.models.loaded_models import loaded_models_text
from console.tui.widgets.states import model_state
from console.tui.widgets.status_line import status_line
from engine.config import DeviceShare
from engine.errors import ErrorInfo
from engine.snapshot import LoadPlan, ModelStatus
from tests.fakes import fleet_scenes, scenes
from tests.fakes.link import MODELS, FakeLink
from tests.ui.seen import cells, foretold, listed, rows, screen_text, shows, toasts, until

pytestmark = pytest.mark.long

# -- the model in view ------------------------------------------------------------------------------------------------


def test_the_model_in_view_gives_the_snapshot_its_state_and_knobs() -> None:
    snapshot = fleet_scenes.two_models()
    shown = view.in_view(snapshot, "demo#2")
    assert shown.status.spec is not None
    assert (shown.status.spec.name, shown.target_workers, shown.max_prompts) == ("demo", 1, 16)
    assert [worker.id for worker in view.workers_of(shown)] == ["w2"]
    assert view.in_view(snapshot, "gone#9") is snapshot


def test_models_come_into_view_round_and_round() -> None:
    snapshot = fleet_scenes.two_models()
    assert view.next_model_key(snapshot, "") == "demo#2"
    assert view.next_model_key(snapshot, "demo#2") == "NeuralHermes-7B#1"
    assert view.next_model_key(snapshot, "gone#9") == "demo#2"
    assert view.next_model_key(scenes.empty(), "") == ""


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 40)])
async def test_the_top_line_says_that_there_are_more_models_and_m_goes_on_to_the_next(size: tuple[int, int]) -> None:
    app = EricApp(FakeLink(fleet_scenes.two_models()))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        assert "NeuralHermes-7B" in rows(app)[0]
        assert "+1" in rows(app)[0]
        await pilot.press("m")
        await pilot.pause()
        assert "demo" in rows(app)[0]
        assert ("− 16 +" in rows(app)[1]) == (size[0] > 100)
        assert "NeuralH" in screen_text(app)  # its workers are seen all the same


async def test_a_model_that_is_unloaded_until_its_next_request_wants_no_workers() -> None:
    snapshot = fleet_scenes.two_models()
    first, second = snapshot.models
    asleep = structs.replace(second, status=structs.replace(second.status, state="idle"))
    workers = tuple(worker for worker in snapshot.workers if worker.id != "w2")
    app = EricApp(FakeLink(scenes.changed(snapshot, models=(first, asleep), workers=workers)))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: f" of {first.target_workers} ready" in screen_text(app))


def test_a_load_that_requests_wait_for_is_on_the_top_line_and_on_models() -> None:
    snapshot = fleet_scenes.two_models()
    first, second = snapshot.models
    plan = LoadPlan(unloads=(first.name,), began=snapshot.at, stay_s=2.0, load_s=10.0)
    status = ModelStatus(state="loading", spec=second.status.spec)
    loading = structs.replace(second, waiting=3, plan=plan, status=status)
    shown = structs.replace(snapshot, models=(first, loading))
    words = f"unloads {first.name}, ready in about 12 s, 3 requests wait"
    assert f"◌ loading {second.name}: {words}" in status_line(shown, ApiStatus(), 220).plain
    assert f"◌ loading {second.name}" in status_line(shown, ApiStatus(), 100).plain
    assert words[1:] in loaded_models_text(shown).plain


async def test_the_words_for_more_models_can_be_clicked() -> None:
    app = EricApp(FakeLink(fleet_scenes.two_models()))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.click(offset=(rows(app)[0].index("+1 model"), 0))
        await pilot.pause()
        assert "· ● ready · 1/1×16 ·" in rows(app)[0] or "1/1 worker × 16 prompts" in rows(app)[0]


async def test_knobs_turn_those_of_the_model_in_view() -> None:
    link = FakeLink(fleet_scenes.two_models())
    async with EricApp(link).run_test() as pilot:
        await pilot.press("m", "plus", "right_square_bracket")
        await pilot.app.workers.wait_for_complete()
    assert link.commands == [
        ("reconfigure", {"max_prompts": 17, "model": "demo"}),
        ("reconfigure", {"num_workers": 2, "model": "demo"}),
    ]


async def test_presses_for_one_model_do_not_count_for_the_next() -> None:
    link = FakeLink(fleet_scenes.two_models())
    link.hold("reconfigure")
    async with EricApp(link).run_test() as pilot:
        await pilot.press("plus", "m", "plus")
        link.release("reconfigure")
        await pilot.app.workers.wait_for_complete()
    assert [arguments["max_prompts"] for _, arguments in link.commands] == [9, 17]


async def test_the_chat_asks_the_model_in_view() -> None:
    link = FakeLink(fleet_scenes.two_models())
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("m", "3")
        await until(pilot, lambda: isinstance(app.screen, ChatScreen) and app.focused is not None)
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: link.closed_chats == 1)
    assert link.chat_models == ["demo"]


async def test_a_model_that_is_idle_is_asked_and_so_woken() -> None:
    link = FakeLink(fleet_scenes.one_idle())
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        assert "○ idle" in rows(app)[0]
        await pilot.press("3")
        await until(pilot, lambda: isinstance(app.screen, ChatScreen) and app.focused is not None)
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: link.closed_chats == 1)


async def test_m_is_offered_only_where_there_are_several_models() -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        assert "m Model" not in rows(app)[-1]
        assert "Switch to the next loaded model" not in " ".join(entry.title for entry in entries(app.screen))
        link.show(fleet_scenes.two_models())
        app.refresh_screen()
        await until(pilot, lambda: "m Model" in rows(app)[-1])
        assert "Switch to the next loaded model" in " ".join(entry.title for entry in entries(app.screen))


# -- what the engine holds --------------------------------------------------------------------------------------------


def test_every_model_held_is_listed_with_what_it_does_and_takes() -> None:
    shown = loaded_models_text(fleet_scenes.two_models()).plain
    for words in (
        "▸ ● ready  NeuralHermes-7B  2 × 8 prompts",
        "14 running, 3 queued",
        "unloads after 10 min without requests",
        "KV host   ━━━━━━━━╸─── 5.6 GiB of 8.0 GiB\n          1,234 pages read back",
        "KV disk   ━━────────── 7.1 GiB of 40.0 GiB\n          96 pages read back",
        "✓ sql on 2 of 2 workers, 31.0 MiB",
        "✖ french: its rank is 256",
        "planned 16.7 → used 16.3 GiB, −2%",
        "● ready  demo  1 × 16 prompts",
    ):
        assert words in shown, words


def test_the_engine_says_of_every_device_what_its_workers_take_there() -> None:
    lines = loaded_models_text(fleet_scenes.two_models()).plain.splitlines()
    backend = next(line for line in lines if line.startswith("backend"))
    assert backend.endswith("1 on GPU0, 1 on GPU1")
    planned = [line.split()[0] for line in lines if "planned 16.7" in line]
    assert planned == ["GPU0", "GPU1"]


def test_a_device_with_several_workers_says_what_the_largest_of_them_takes() -> None:
    card, more = (DeviceShare(device="sim:1", weights_bytes=size << 30) for size in (2, 3))
    workers = [
        scenes.worker(number, devices=("sim:1",), planned=(share,), used=(share,))
        for number, share in enumerate((card, more, card))
    ]
    shown = loaded_models_text(scenes.busy(workers=tuple(workers))).plain
    assert "on SIM1\n" in shown
    assert "SIM1      planned 3.0 → used 3.0 GiB, as planned · largest of 3 workers" in shown


def test_a_second_model_shows_its_phases_while_the_first_serves() -> None:
    shown = loaded_models_text(fleet_scenes.second_loading()).plain
    assert "● ready  NeuralHermes-7B" in shown
    assert "◔ loading  demo" in shown
    assert "6.0/17.0 MiB" in shown


def test_an_idle_model_says_what_wakes_it() -> None:
    shown = loaded_models_text(fleet_scenes.one_idle()).plain
    assert "○ idle  NeuralHermes-7B" in shown
    assert "the next request reloads it" in shown


def test_a_second_model_that_failed_keeps_its_reason() -> None:
    error = ErrorInfo(code="insufficient_memory", message="short by 2,310 MiB")
    failed = fleet_scenes.demo_reading(status=ModelStatus(state="failed", spec=scenes.spec("demo"), error=error))
    snapshot = fleet_scenes.two_models()
    shown = loaded_models_text(scenes.changed(snapshot, models=(snapshot.models[0], failed))).plain
    assert "✖ failed  demo\nshort by 2,310 MiB" in shown


async def test_all_models_that_are_loaded_are_marked_in_the_table() -> None:
    async with EricApp(FakeLink(fleet_scenes.second_loading()), start="models").run_test(size=(120, 40)) as pilot:
        table = await listed(pilot)
        marks = [cells(table, entry.name)[0] for entry in MODELS]
        assert marks == [model_state("loading").glyph, model_state("ready").glyph, "✖"]


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 40)])
async def test_the_phases_of_a_second_model_are_seen_at_every_size(size: tuple[int, int]) -> None:
    app = EricApp(FakeLink(fleet_scenes.second_loading()), start="models")
    async with app.run_test(size=size) as pilot:
        table = await listed(pilot)
        await pilot.pause()
        assert "Read weights" in screen_text(app)
        assert table.region.height >= 5


async def test_b_loads_beside_what_is_loaded() -> None:
    link = FakeLink(scenes.busy())
    async with EricApp(link, start="models").run_test(size=(120, 40)) as pilot:
        await listed(pilot)
        await pilot.press("b")
        await until(pilot, lambda: ("load", {"model": "demo", "beside": True}) in link.commands)


async def test_u_unloads_the_selected_model_where_it_is_loaded() -> None:
    link = FakeLink(fleet_scenes.two_models())
    async with EricApp(link, start="models").run_test(size=(120, 40)) as pilot:
        await listed(pilot)
        await pilot.press("u")
        await until(pilot, lambda: ("unload", {"model": "demo"}) in link.commands)


async def test_u_unloads_the_model_in_view_where_the_selected_one_is_not_loaded() -> None:
    link = FakeLink(fleet_scenes.two_models())
    async with EricApp(link, start="models").run_test(size=(120, 40)) as pilot:
        await listed(pilot)
        await pilot.press("m", "down", "down", "u")
        await until(pilot, lambda: ("unload", {"model": "demo"}) in link.commands)


# -- adapters ---------------------------------------------------------------------------------------------------------


async def test_an_adapter_is_attached_by_its_folder_and_detached_by_its_row() -> None:
    link = FakeLink(fleet_scenes.two_models())
    app = EricApp(link, start="models")
    async with app.run_test(size=(100, 30)) as pilot:
        await listed(pilot)
        await pilot.press("d")
        await until(pilot, lambda: "Adapters of NeuralHermes-7B" in screen_text(app))
        assert "✓ on 2 of 2 workers" in screen_text(app)
        assert "✖ its rank is 256" in screen_text(app)
        await pilot.press(*"fr=/a/french", "enter", *"/a/latin", "enter")
        await pilot.press("shift+tab", "down", "x")
        await until(pilot, lambda: "Detach sql?" in screen_text(app))
        await pilot.press("y")
        await app.workers.wait_for_complete()
        await pilot.press("escape")
        assert "Adapters of" not in screen_text(app)
    model = {"model": "NeuralHermes-7B"}
    assert link.commands == [
        ("attach", {"name": "fr", "path": "/a/french", **model}),
        ("attach", {"name": "latin", "path": "/a/latin", **model}),
        ("detach", {"name": "sql", **model}),
    ]


async def test_without_a_model_there_is_nothing_to_attach_to() -> None:
    app = EricApp(FakeLink(scenes.empty()), start="models")
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await listed(pilot)
        await pilot.press("d")
        await pilot.pause()
        assert any("Load a model first" in toast for toast in toasts(app))


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_several_models_look_right(snap_compare: object) -> None:
    app = EricApp(FakeLink(fleet_scenes.two_models()), start="models")
    assert snap_compare(app, terminal_size=(120, 40), run_before=foretold)  # type: ignore[operator]


def test_a_second_model_that_loads_is_under_the_first_on_a_small_terminal() -> None:
    app = EricApp(FakeLink(fleet_scenes.second_loading()), start="models")
    words = (
        "◔ demo",
        "● NeuralHermes-7B",
        "Engine",
        "▸ ● ready  NeuralHermes-7B",
        "GPU1",
        "◔ loading  demo",
        "◔ Read weights",
        "35%",
    )
    assert shows(app, *words, terminal_size=(80, 24), run_before=foretold)


def test_two_models_are_named_at_their_workers_on_the_dashboard() -> None:
    app = EricApp(FakeLink(fleet_scenes.two_models()))
    words = "demo", "● ready", "+1 model", "Workers", "model", "NeuralHermes", "demo", "Requests"
    assert shows(app, *words, terminal_size=(120, 40), press=["m"])
