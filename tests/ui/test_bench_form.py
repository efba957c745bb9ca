"""The form of a bench: what is asked, what is typed and stays, what is refused and where that is said."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot

from console.bench.target import TargetFailed
from console.link.benches import BenchOrder, BenchServer
from console.tui.app import EricApp
from console.tui.screens.benches.form import BenchFormScreen
from engine.errors import InvalidRequest
from tests.fakes import bench_scenes, tune_scenes
from tests.fakes.elsewhere import FakeRemote
from tests.ui.benching import app_with, formed, link_of, opened, shown
from tests.ui.seen import screen_text, shows, until

pytestmark = pytest.mark.long

URL = "http://127.0.0.1:8080"
SIZES = [(80, 24), (140, 40)]
TO_SERVE = ["down"] * 4


def orders(app: EricApp) -> list[BenchOrder]:
    return [named["order"] for name, named in link_of(app).commands if name == "start"]


async def _server(pilot: Pilot[None], *keys: str) -> None:
    """The form with an address, its cursor there."""
    await opened(pilot)
    await formed(pilot)
    for key in keys:
        await pilot.press(key)
        await pilot.pause()
    await pilot.press("ctrl+o", *URL)
    await shown(pilot, "dialect")


async def _serve(pilot: Pilot[None]) -> None:
    """The form, at the bench that takes a trace."""
    await opened(pilot)
    await formed(pilot)
    await pilot.press(*TO_SERVE)
    await shown(pilot, "at given request rates")
    await shown(pilot, "answer tokens 32")


# -- a server ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
async def test_the_address_of_a_server_asks_for_its_dialect_model_and_key(size: tuple[int, int]) -> None:
    app = app_with()
    async with app.run_test(size=size) as pilot:
        await opened(pilot)
        await formed(pilot)
        await shown(pilot, "target this engine or a server: http://host:port")
        assert "dialect" not in screen_text(app)
        await pilot.press("ctrl+o", *URL)
        await shown(pilot, "dialect openai ▼ model first listed key none")
        await shown(pilot, "/v1/completions (vLLM, others)")
        await shown(pilot, "Measures the server")


async def test_enter_runs_the_bench_on_the_server() -> None:
    app = app_with()
    async with app.run_test(size=(140, 40)) as pilot:
        await _server(pilot)
        await pilot.press("tab", "enter", *["down"] * 4, "enter")
        await shown(pilot, "/completion (llama.cpp)")
        await pilot.press("tab", *"theirs", "tab", *"secret")
        assert "secret" not in screen_text(app)
        await pilot.press("enter")
        server = BenchServer(url=URL, dialect="llamacpp", model="theirs", key="secret")
        await until(pilot, lambda: [order.server for order in orders(app)] == [server])


async def test_a_bench_of_the_engine_alone_is_not_asked_of_a_server() -> None:
    app = app_with()
    async with app.run_test(size=(140, 40)) as pilot:
        await _server(pilot, "down", "down", "down")
        await shown(pilot, "✖ This benchmark turns the knobs of the engine of this process.")
        await pilot.press("enter", *["backspace"] * len(URL))
        await until(pilot, lambda: "✖" not in screen_text(app))
        assert orders(app) == []
        await pilot.press("enter")
        await until(pilot, lambda: [(order.bench, order.server) for order in orders(app)] == [("grid", None)])


@pytest.mark.parametrize(("param", "box"), [("url", "place-url"), ("key", "place-key"), ("dialect", "place-dialect")])
async def test_a_server_that_refuses_is_told_at_the_field_and_nothing_typed_is_lost(param: str, box: str) -> None:
    app = app_with()
    link_of(app).failures["start"] = TargetFailed(f"{URL}/v1/completions answered 401: no such key", param=param)
    async with app.run_test(size=(80, 24)) as pilot:
        await _server(pilot, "down", "tab", *"7,8")
        await pilot.press("enter")
        await shown(pilot, f"✖ {URL}/v1/completions answered 401: no such key")
        assert app.focused is not None
        assert (app.focused.id, app.focused.has_class("-wrong")) == (box, True)
        assert "7,8" in screen_text(app)
        await pilot.press("ctrl+o", "end", "1")
        link_of(app).failures.clear()
        await pilot.press("enter")
        await until(pilot, lambda: len(orders(app)) == 2)
        again = orders(app)[-1]
        assert (again.settings["users"], again.server) == ("7,8", BenchServer(url=f"{URL}1"))


async def test_who_leaves_while_a_server_is_awaited_measures_nothing() -> None:
    app = app_with()
    link_of(app).hold("start")
    async with app.run_test(size=(80, 24)) as pilot:
        await _server(pilot)
        await pilot.press("enter")
        await shown(pilot, f"◔ Connecting to {URL}")
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, BenchFormScreen))
        link_of(app).release("start")
        await until(pilot, lambda: not any(worker.is_running for worker in app.workers if worker.group == "default"))
        assert not link_of(app).benches.report().under_way


# -- what is typed ----------------------------------------------------------------------------------------------------


async def test_what_was_typed_is_there_after_another_bench_another_size_and_another_form() -> None:
    app = app_with()
    async with app.run_test(size=(140, 40)) as pilot:
        await _server(pilot, "down", "tab", *"7,8")
        await pilot.press("ctrl+t")
        await shown(pilot, "Quick (ctrl+t)")
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, BenchFormScreen))
        await formed(pilot)
        await pilot.press("down")
        for words in (f"target {URL}", "users 7,8", "requests 64", "Full, as on the command"):
            await shown(pilot, words)


async def test_a_trace_gives_the_lengths_that_nobody_typed() -> None:
    app = app_with()
    async with app.run_test(size=(80, 24)) as pilot:
        await _serve(pilot)
        await pilot.press("tab", "tab", "tab", "tab")
        await until(pilot, lambda: app.focused is not None and app.focused.id == "field-3")
        await pilot.press(*"talks.json")
        await shown(pilot, "prompt tokens trace")
        await pilot.press("enter")
        lengths = {"prompt_tokens": "trace", "output_tokens": "trace", "trace": "talks.json"}
        await until(pilot, lambda: [order.settings for order in orders(app)] == [{"requests": "16", **lengths}])


async def test_a_trace_that_cannot_be_read_is_told_at_its_field() -> None:
    app = app_with()
    link_of(app).failures["start"] = InvalidRequest("talks.json cannot be read: No such file", param="trace")
    async with app.run_test(size=(80, 24)) as pilot:
        await _serve(pilot)
        await pilot.press("tab", "tab", "tab", "tab", *"talks.json", "tab", "enter")
        await shown(pilot, "✖ Talks.json cannot be read: No such file")
        assert app.focused is not None
        assert (app.focused.id, app.focused.has_class("-wrong")) == ("field-3", True)
        await shown(pilot, "talks.json")
        await pilot.press("x")
        await until(pilot, lambda: app.focused is not None and not app.focused.has_class("-wrong"))


# -- an engine elsewhere ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
async def test_of_an_engine_elsewhere_servers_and_traces_are_not_offered_and_it_says_where_to_go(
    size: tuple[int, int],
) -> None:
    link = FakeRemote("gpu-1:8000", tune_scenes.tuned())
    link.benches.results = bench_scenes.results()
    app = EricApp(link, start="tune")
    async with app.run_test(size=size) as pilot:
        await opened(pilot)
        await formed(pilot)
        await shown(pilot, "target the engine of gpu-1:8000")
        await shown(pilot, "'ericllm bench'.")
        await pilot.press(*TO_SERVE, "ctrl+o", *"http")
        await shown(pilot, "answer tokens")
        assert "ShareGPT" not in screen_text(app)
        assert "dialect" not in screen_text(app)
        await pilot.press("enter")
        await until(pilot, lambda: [order.server for order in orders(app)] == [None])


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_the_form_fits_a_small_terminal() -> None:
    async def form(pilot: Pilot[None]) -> None:
        await opened(pilot)
        await shown(pilot, "█")
        await formed(pilot)
        await pilot.press("down")
        await shown(pilot, "Mean response time by number of users")

    fields = "target       this engine", "latency", "users         1,2,4", "threads", "repeats       1", "serve", "load"
    end = "fewer and shorter requests.", "Start (enter)    Full run (ctrl+t)    Server (ctrl+o)    Cancel (esc)"
    assert shows(app_with(), *fields, *end, terminal_size=(80, 24), run_before=form)


@pytest.mark.parametrize("size", SIZES, ids=["small", "wide"])
def test_a_server_that_refuses_is_told_above_the_buttons(size: tuple[int, int]) -> None:
    app = app_with()
    app.link.failures["start"] = TargetFailed(f"{URL}/v1/completions answered 401: no such key", param="key")  # type: ignore[attr-defined]

    async def form(pilot: Pilot[None]) -> None:
        await opened(pilot)
        await shown(pilot, "█" if size[1] < 30 else "p plots another of")
        await formed(pilot)
        await pilot.press(*TO_SERVE, "ctrl+o", *URL, "enter")
        await shown(pilot, "answered 401: no such key")
        assert isinstance(pilot.app.screen, BenchFormScreen)

    fields = f"target       {URL}", "dialect", "openai", "key", "requests", " 16 ", "serve", "trace"
    end = "✖ http", "answered 401: no such key", "Start (enter)", "Cancel (esc)", "⏎ Start", "esc Cancel"
    assert shows(app, *fields, *end, terminal_size=size, run_before=form)
