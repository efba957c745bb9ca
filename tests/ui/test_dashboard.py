"""The dashboard: what an operator sees of each state, at each size, and what the keys do there."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from console.tui.app import EricApp
from console.tui.screens.dashboard.panels.requests import RequestsPanel
from console.tui.screens.dashboard.panels.session import SessionPanel
from console.tui.screens.dashboard.panels.throughput import LimitStrip, limit_legend
from console.tui.screens.dashboard.panels.workers import WorkersPanel
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.screens.requests.row_actions import curl_body
from console.tui.widgets.graph import Graph, Span
from console.tui.widgets.table import Table
from engine.backends.base import StepLimit
from engine.errors import ErrorInfo
from engine.requests.causes import Cause, describe_all
from engine.snapshot import Snapshot
from tests.fakes import fleet_scenes, request_scenes, scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, shows, toasts, until


async def _seen(snapshot: Snapshot, size: tuple[int, int]) -> str:
    app = EricApp(FakeLink(snapshot))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        return screen_text(app)


SIZES = [(80, 24), (100, 30), (140, 40), (200, 60), (80, 50), (140, 24)]


@pytest.mark.parametrize("size", SIZES)
async def test_the_essentials_are_seen_at_every_size(size: tuple[int, int]) -> None:
    seen = await _seen(scenes.busy(), size)
    for words in (
        "NeuralHermes-7B",
        "● ready",
        "14:02:11",
        "1 Dashboard",
        "GPU0",
        "87%",
        "18.2/24.0",
        "● busy",
        "7/8",
        "loading",
        "out tok/s",
        "TTFT",
        "ITL",
        "req-0000",
        "decode",
        "workers 1 → 2",
        "q Quit",
    ):
        assert words in seen, words


@pytest.mark.parametrize("columns", [1, 2, 3])
async def test_a_terminal_that_is_dragged_shut_does_not_end_the_console(columns: int) -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(60, 20)) as pilot:
        await pilot.resize_terminal(columns, 20)
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert "NeuralHermes-7B" in screen_text(app)


async def test_80x24_shows_the_numbers_workers_and_five_requests() -> None:
    seen = await _seen(scenes.busy(), (80, 24))
    for words in ("out 612 tok/s", "running 14", "queue 3", "KV 71%", "TTFT p50 80 ms", "ITL p50 14 ms", "3.1/9.4 GiB"):
        assert words in seen, words
    assert seen.count("● decode") >= 5


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (140, 40)])
async def test_eight_gpus_are_all_seen(size: tuple[int, int]) -> None:
    seen = await _seen(scenes.eight_gpus(), size)
    assert all(f"GPU{index}" in seen for index in range(8))
    assert "decode" in seen


async def test_eight_gpus_fit_100x30_with_eight_workers_and_requests_to_work_with() -> None:
    crowd = scenes.eight_gpus()
    seen = await _seen(scenes.changed(crowd, devices=(*crowd.devices, scenes.cpu())), (100, 30))
    devices = [line for line in seen.splitlines() if "GiB" in line]
    assert [line.split()[0] for line in devices] == [*(f"GPU{index}" for index in range(8)), "CPU"]
    assert all(f" w{index} " in seen for index in range(8))
    assert seen.count("● decode") >= 5
    assert "out tok/s" in seen


async def test_of_many_workers_those_that_are_not_ready_come_first_and_the_frame_counts_them() -> None:
    workers = [scenes.worker(index % 8, id=f"w{index}") for index in range(16)]
    workers[9] = msgspec.structs.replace(workers[9], state="loading")
    workers[12] = msgspec.structs.replace(workers[12], state="failed", last_error=fleet_scenes.left_dead("w12"))
    snapshot = scenes.changed(scenes.eight_gpus(), workers=tuple(workers), target_workers=16, models=())
    app = EricApp(FakeLink(snapshot))
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: "14 of 16 ready, 1 loading, 1 dead" in screen_text(app))
        table = app.screen.query_one(WorkersPanel).table
        await until(pilot, lambda: [row.key for row in table.rows[:3]] == ["w12", "w9", "w0"])


async def test_without_a_request_for_a_minute_the_graphs_have_the_room_of_the_requests() -> None:
    link = FakeLink(scenes.cpu_idle())
    app = EricApp(link)
    async with app.run_test(size=(160, 48)) as pilot:
        graphs = app.screen.query_one("#overview")
        await until(pilot, lambda: graphs.size.height > 35)
        link.show(scenes.busy())
        app.refresh_screen()
        await until(pilot, lambda: graphs.size.height < 30)


async def test_more_workers_than_there_is_room_for_are_scrolled_to() -> None:
    workers = tuple(scenes.worker(index % 8, id=f"w{index}") for index in range(16))
    app = EricApp(FakeLink(scenes.changed(scenes.eight_gpus(), workers=workers)))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        assert "w15" not in screen_text(app)
        await pilot.press("shift+tab", "end")
        await pilot.pause()
        assert "w15" in screen_text(app)
        assert "req-00" in screen_text(app)


async def test_nothing_loaded_says_what_to_do() -> None:
    seen = await _seen(scenes.empty(), (80, 24))
    assert "○ no model" in seen
    assert "No model loaded. Press 2 to choose one." in seen


async def test_a_failed_load_shows_the_reason_on_the_top_line_and_in_full_below() -> None:
    reason = "the model needs 14.2 GiB on cuda:0, which is short by 2,310 MiB"
    narrow = await _seen(scenes.failed(reason), (80, 24))
    assert "✖ failed: the model needs 14.2 GiB" in narrow.splitlines()[0]
    assert reason in " ".join(narrow.split())
    wide = await _seen(scenes.failed(reason), (140, 40))
    assert reason in wide.splitlines()[0]


async def test_a_load_under_way_shows_phase_bytes_and_a_bar() -> None:
    top = (await _seen(scenes.loading(), (140, 40))).splitlines()[0]
    assert "◔ loading weights 3.1/9.4 GiB ━━━" in top
    assert "33%" in top


async def test_the_machine_without_a_gpu_is_a_device() -> None:
    seen = await _seen(scenes.cpu_idle(), (80, 24))
    for words in ("CPU", "5.6/16.0 GiB", "others 5.2", "○ idle", "or press 3 to chat"):
        assert words in seen, words


async def test_text_of_clients_is_never_markup() -> None:
    row = msgspec.structs.replace(scenes.requests()[0], id="[red]x[/]", source="[b]")
    worker = scenes.worker(
        0, state="failed", last_error=ErrorInfo(code="worker_failed", message="[bold]died[/bold] of [signal 9]")
    )
    seen = await _seen(scenes.busy(requests=(row,), workers=(worker,)), (140, 40))
    assert "[red]x[/]" in seen
    assert "✖ failed [bold]died[/bold]" in seen


async def test_live_requests_come_first_and_prefill_shows_how_far_it_is() -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(140, 60)):
        keys = [row.key for row in app.screen.query_one(RequestsPanel).table.rows]
        assert "720/1441" in screen_text(app)
    live = [row.id for row in scenes.requests() if row.state != "finished"]
    assert set(keys[: len(live)]) == set(live)


async def test_the_cursor_stays_on_its_request_while_others_come_and_go() -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.press("down", "down", "down")
        table = app.screen.query_one("#request-table", Table)
        chosen = table.cursor_key
        assert chosen == scenes.requests()[2].id
        newest = msgspec.structs.replace(scenes.requests()[0], id="newest")
        link.show(scenes.busy(requests=(newest, *scenes.requests()[2:])))
        app.refresh_screen()
        await pilot.pause()
        assert table.cursor_key == chosen
        link.show(scenes.busy(requests=()))
        app.refresh_screen()
        assert table.cursor_key is None


async def test_x_cancels_the_selected_request_after_a_question_and_says_so() -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link)
    async with app.run_test(size=(140, 40), notifications=True) as pilot:
        await pilot.press("x")
        assert link.commands == []
        await pilot.press("down", "x")
        await pilot.pause()
        assert isinstance(app.screen, ConfirmScreen)
        assert link.commands == []
        await pilot.press("enter", "x")
        await pilot.pause()
        assert isinstance(app.screen, ConfirmScreen)
        await pilot.press("y")
        await app.workers.wait_for_complete()
        await pilot.pause()
        chosen = scenes.requests()[0].id
        assert link.commands == [("cancel_request", {"request_id": chosen})]
        assert f"Cancelled {chosen}" in toasts(app)


async def test_a_click_selects_a_request() -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        row = next(at for at, line in enumerate(rows(app)) if scenes.requests()[1].id in line)
        await pilot.click(offset=(20, row))
        assert app.screen.query_one("#request-table", Table).cursor_key == scenes.requests()[1].id


async def test_z_shows_a_longer_time() -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        assert "last 59 s" in screen_text(app)
        assert "max_prompts 4 → 8" not in screen_text(app)
        await pilot.press("z")
        await pilot.pause()
        assert "last 5 min" in screen_text(app)
        assert "max_prompts 4 → 8" in screen_text(app)


@pytest.mark.parametrize("scene", [scenes.busy, scenes.eight_gpus])
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_an_ascii_terminal_gets_ascii(
    monkeypatch: pytest.MonkeyPatch, scene: Callable[[], Snapshot], size: tuple[int, int]
) -> None:
    monkeypatch.setenv("TERM", "linux")
    app = EricApp(FakeLink(scene()))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        drawn = rows(app)[:-1]
    assert [char for line in drawn for char in line if ord(char) > 126 and not char.isalnum()] == []
    assert "* ready" in drawn[0]


@pytest.mark.parametrize("scene", [scenes.busy, scenes.eight_gpus])
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_without_colours_bars_are_told_by_letters_and_curves_by_shades(
    monkeypatch: pytest.MonkeyPatch, scene: Callable[[], Snapshot], size: tuple[int, int]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = EricApp(FakeLink(scene()))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        seen, curves = screen_text(app), app.screen.query_one("#ttft").size.height > 0
    assert "wwwkk" in seen
    assert "o work" in seen
    assert "x others" in seen
    assert "free" in seen
    assert ("░" in seen) == curves


def test_the_busy_dashboard_looks_right(snap_compare: object) -> None:
    assert snap_compare(EricApp(FakeLink(scenes.busy())), terminal_size=(140, 40))  # type: ignore[operator]


def test_the_busy_dashboard_looks_right_on_a_small_terminal_in_the_light_theme(snap_compare: object) -> None:
    app = EricApp(FakeLink(scenes.busy()), theme="ericllm-light")
    assert snap_compare(app, terminal_size=(80, 24))  # type: ignore[operator]


def test_eight_gpus_have_a_row_each_on_100x30() -> None:
    devices = [f"GPU{number} " for number in range(8)]
    workers = [f"w{number}  GPU{number}" for number in range(8)]
    rest = "Requests", "req-00000000", "req-00056075", "⏎ Open"
    app = EricApp(FakeLink(scenes.eight_gpus()))
    assert shows(app, "■ weights", *devices, "Workers", *workers, *rest, terminal_size=(100, 30))


def test_eight_gpus_look_right_on_80x24(snap_compare: object) -> None:
    assert snap_compare(EricApp(FakeLink(scenes.eight_gpus())), terminal_size=(80, 24))  # type: ignore[operator]


def test_eight_gpus_look_right_on_120x40_in_the_light_theme(snap_compare: object) -> None:
    app = EricApp(FakeLink(scenes.eight_gpus()), theme="ericllm-light")
    assert snap_compare(app, terminal_size=(120, 40))  # type: ignore[operator]


def scene(live: int, ended: int = 40, *, first: int = 0) -> Snapshot:
    """Requests in flight, numbered from `first`, and more that ended than there is room for."""
    running = [
        msgspec.structs.replace(row, id=f"live-{first + at}", state="decode", order=1000 + first + at)
        for at, row in enumerate(scenes.requests(live, 0))
    ]
    done = [msgspec.structs.replace(row, id=f"done-{at}", order=at) for at, row in enumerate(scenes.requests(0, ended))]
    return scenes.busy(requests=(*running, *done))


def live_seen(app: EricApp) -> list[str]:
    """The ids of live requests on the screen, from the top."""
    return [word for line in rows(app) for word in line.split() if word.startswith("live-")]


@pytest.mark.parametrize("keys", [["down"], ["down", "enter", "escape"], ["end"], ["pagedown"] * 3, ["down"] * 20])
async def test_live_requests_stay_on_top_wherever_the_cursor_is(keys: list[str]) -> None:
    link = FakeLink(scene(6))
    app = EricApp(link)
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        await pilot.press(*keys)
        for passed in range(1, 25):  # a request ends and another one begins, again and again
            ended = [
                msgspec.structs.replace(scene(1, first=at).requests[0], state="finished", finish="length")
                for at in reversed(range(passed))
            ]
            now = scene(6, first=passed)
            link.show(msgspec.structs.replace(now, requests=(*now.requests[:6], *ended, *now.requests[6:])))
            app.refresh_screen()
            await pilot.pause()
        assert live_seen(app)[:6] == [f"live-{24 + at}" for at in range(6)]


async def test_the_row_under_the_cursor_can_be_seen_below_the_live_ones() -> None:
    app = EricApp(FakeLink(scene(6)))
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        await pilot.press("v", *["down"] * 30)
        await pilot.pause()
        assert app.screen.query_one("#request-table", Table).cursor_key == "done-23"
        assert "done-23" in screen_text(app)
        await pilot.press("end")
        await pilot.pause()
        assert "done-39" in screen_text(app)
        assert len(live_seen(app)) == 6


@pytest.mark.parametrize("key", ["escape", "home"])
async def test_escape_and_home_show_the_newest_again(key: str) -> None:
    link = FakeLink(scene(6))
    app = EricApp(link)
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        await pilot.press("v", "end", key)
        await pilot.pause()
        assert "done-0" in screen_text(app)
        table = app.screen.query_one("#request-table", Table)
        assert table.cursor_key == (None if key == "escape" else "live-0")


async def test_more_live_requests_than_there_is_room_for_leave_rows_for_the_others() -> None:
    app = EricApp(FakeLink(scene(17)))
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        await pilot.press("v", "end")
        await pilot.pause()
        seen = screen_text(app)
        assert "live-0 " in seen
        assert "done-39" in seen


async def test_ended_requests_are_hidden_until_v_and_the_subtitle_counts_them() -> None:
    app = EricApp(FakeLink(scene(6)))
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        assert "done-0" not in screen_text(app)
        assert "40 ended (v shows)" in screen_text(app)
        await pilot.press("v")
        await pilot.pause()
        assert "done-0" in screen_text(app)
        assert "40 ended (v hides)" in screen_text(app)


@pytest.mark.parametrize("size", [*SIZES, (160, 48)])
async def test_the_oldest_queued_request_and_the_key_for_ended_ones_are_read_at_every_size(
    size: tuple[int, int],
) -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: "14 running, 3 queued (oldest 1.70 s), 13 ended (v shows)" in screen_text(app))
        await pilot.press("4")
        await until(pilot, lambda: "14 running · 3 queued (oldest 1.70 s)" in screen_text(app))


@pytest.mark.parametrize("size", [*SIZES, (160, 48)])
async def test_the_time_that_graphs_show_and_that_of_the_cursor_are_read_at_every_size(size: tuple[int, int]) -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=size) as pilot:
        graph = app.screen.query_one("#tokens", Graph)
        await until(pilot, lambda: graph.span_text(60) != "" and graph.span_text(60) in screen_text(app))
        await pilot.press("left_parenthesis", "left_parenthesis")
        await until(pilot, lambda: " s ago" in screen_text(app))


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (140, 40), (160, 48)])
async def test_kv_is_read_in_tokens_at_every_size(size: tuple[int, int]) -> None:
    assert "48.5k/65.5k" in await _seen(scenes.busy(), size)


async def test_f_opens_the_requests_of_this_client_alone() -> None:
    rows_of = [msgspec.structs.replace(row, client=f"client-{at % 2}") for at, row in enumerate(scenes.requests(6, 0))]
    app = EricApp(FakeLink(scenes.busy(requests=tuple(rows_of))))
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        await pilot.press("down", "f")
        await until(pilot, lambda: "Requests: client-0" in screen_text(app))
        assert "3 shown" in screen_text(app)


async def test_g_groups_the_requests_by_client() -> None:
    rows_of = [msgspec.structs.replace(row, client=f"client-{at % 2}") for at, row in enumerate(scenes.requests(6, 0))]
    app = EricApp(FakeLink(scenes.busy(requests=tuple(rows_of))))
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.pause()
        for _ in range(2):  # the same again, whatever Requests was grouped by
            await pilot.press("g")
            await until(pilot, lambda: "Requests: by client" in screen_text(app))
            assert "client-0" in screen_text(app)
            await pilot.press("g", "1")
            await until(pilot, lambda: app.current_mode == "dashboard")


async def _copied(link: FakeLink) -> tuple[str, list[str]]:
    """What `c` copies on the first request, and what is said."""
    app = EricApp(link)
    async with app.run_test(size=(140, 44), notifications=True) as pilot:
        await pilot.pause()
        await pilot.press("down", "c")
        await until(pilot, lambda: bool(toasts(app)))
        return app.clipboard, toasts(app)


async def test_a_copied_request_goes_only_to_a_dialect_that_is_on() -> None:
    link = FakeLink()
    openai, generate = link.api.report().dialects
    assert "/v1/completions" in (await _copied(link))[0]
    on, off = (msgspec.structs.replace(dialect, on=is_on) for dialect, is_on in ((generate, True), (openai, False)))
    link.api.change_report(dialects=(off, on))
    line, said = await _copied(link)
    assert "/generate" in line
    assert said == ["Copied a curl command for a sample request: the dialect with /v1/completions is off"]
    link.api.change_report(dialects=(off, generate))
    assert await _copied(link) == ("", ["All dialects are off. Switch one on first (d on the API screen)."])


def test_a_curl_command_has_the_parameters_that_are_kept_and_a_placeholder_for_the_prompt() -> None:
    body = curl_body(request_scenes.moved())
    assert body == {
        "model": "NeuralHermes-7B",
        "prompt": "YOUR PROMPT",
        "max_tokens": 512,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 42,
    }
    assert "max_prompts" in str(curl_body(request_scenes.with_text())["prompt"])


async def test_the_session_says_what_the_time_of_requests_went_into_and_which_knob_changes_it() -> None:
    seen = await _seen(scenes.busy(), (100, 30))
    assert "time      ....." in seen
    assert "Requests waited 48.2 s (62%) for a slot: raise" in seen
    assert "max prompts (now 8)." in seen


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (80, 50), (140, 24), (160, 48)])
@pytest.mark.parametrize("scene", [scenes.busy, scenes.eight_gpus])
@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("slot", "raise max prompts (now 8)"),
        ("pages", "raise KV cache tokens"),
        ("prompts", "lower step tokens (now 64)"),
    ],
)
async def test_the_knob_that_would_shorten_requests_is_read_at_every_size(
    size: tuple[int, int], scene: Callable[[], Snapshot], cause: Cause, change: str
) -> None:
    why = describe_all({cause: 48.2, "decode": 20.0}, {"max_prompts": 8, "step_tokens": 64})
    app = EricApp(FakeLink(scenes.changed(scene(), why=why)))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        session = app.screen.query_one(SessionPanel)
        has_room = session.display and session.size.height > 2
        assert change in (" ".join(session.render().plain.split()) if has_room else screen_text(app))


async def test_no_bar_of_time_is_shown_while_there_were_no_requests() -> None:
    assert "│ time " not in await _seen(scenes.cpu_idle(), (140, 40))


@pytest.mark.parametrize(
    ("size", "words"), [((80, 24), "limit ━ max prompts"), ((100, 30), " limit▕"), ((80, 50), " limit▕")]
)
async def test_what_limits_throughput_is_said_at_every_size(size: tuple[int, int], words: str) -> None:
    assert words in await _seen(scenes.busy(), size)


def test_the_limit_now_is_named_first_and_no_work_last() -> None:
    limits: list[StepLimit] = ["none"] * 40 + ["kv_pages"] * 15 + ["max_prompts"] * 5
    history = scenes.history(seconds=60)
    span = Span(tuple(msgspec.structs.replace(at, limit=limit) for at, limit in zip(history, limits, strict=True)))
    assert [each.plain.split(maxsplit=1)[1].strip() for each in limit_legend(span)] == [
        "max prompts",
        "KV pages",
        "no work",
    ]


async def test_keys_read_the_values_of_a_moment_in_every_graph() -> None:
    app = EricApp(FakeLink(scenes.busy()))
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause()
        await pilot.press("left_parenthesis", "left_parenthesis")
        await until(pilot, lambda: ", 1 s ago" in screen_text(app))
        await pilot.press("right_parenthesis", "right_parenthesis")
        await until(pilot, lambda: "s ago" not in screen_text(app))
        await pilot.press("left_parenthesis")
        await until(pilot, lambda: ", 0 s ago" in screen_text(app))
        await pilot.press("escape")
        await until(pilot, lambda: "s ago" not in screen_text(app))


async def test_the_cursor_names_the_limit_of_its_moment_and_the_strip_is_read_by_the_mouse() -> None:
    limits: list[StepLimit] = ["kv_pages"] * 50 + ["max_prompts"] * 10
    history = scenes.history(seconds=60)
    seconds = tuple(msgspec.structs.replace(at, limit=limit) for at, limit in zip(history, limits, strict=True))
    app = EricApp(FakeLink(scenes.busy(history=seconds, marks=())))
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause()
        graph, strip = app.screen.query_one("#tokens", Graph), app.screen.query_one(LimitStrip)
        await pilot.hover(strip, offset=(strip.size.width - 1, 0))
        assert graph.line(0).plain.rstrip().endswith("limit ━ max prompts")
        await pilot.hover(strip, offset=(strip.size.width - 20, 0))
        assert graph.line(0).plain.rstrip().endswith("limit ━ KV pages")
