"""The Requests screen: every order and filter, one request looked at closely, and cancelling."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from console.tui.app import EricApp
from console.tui.screens.dashboard.panels.requests import RequestsPanel
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.screens.requests.detail import NO_TIMELINE, NOT_ALLOWED, RequestScreen
from console.tui.screens.requests.table import RequestTable
from engine.requests.causes import describe
from engine.snapshot import Snapshot
from tests.fakes import request_scenes, scenes
from tests.fakes.link import FakeLink, story
from tests.ui.seen import rows, screen_text, shows, until


def _app(snapshot: Snapshot | None = None, **how: Any) -> EricApp:
    return EricApp(FakeLink(snapshot or request_scenes.busy()), start="requests", **how)


def _link(app: EricApp) -> FakeLink:
    assert isinstance(app.link, FakeLink)
    return app.link


def _table(app: EricApp) -> RequestTable:
    return app.screen.query_one(RequestTable)


async def _ready(pilot: Pilot[None]) -> RequestTable:
    await until(pilot, lambda: bool(pilot.app.screen.query(RequestTable)) and bool(screen_text(pilot.app).strip()))
    await pilot.pause()
    return pilot.app.screen.query_one(RequestTable)


def _first(app: EricApp, many: int = 3) -> list[str]:
    return [_table(app).rows[at].key.partition("#")[0] for at in range(many)]


# -- the table --------------------------------------------------------------------------------------------------------


async def test_live_and_ended_requests_are_seen_with_who_asked_and_how_they_ended() -> None:
    app = _app()
    async with app.run_test(size=(140, 48)) as pilot:
        await _ready(pilot)
        seen = screen_text(app)
        for words in ("when↓", "alice", "● decode", "◔ prefill", "◌ queued", "✓ done", "✖ error", "14:02:09"):
            assert words in seen, words
        assert "14 running · 3 queued (oldest 1.70 s) · 40 ended" in seen


async def test_requests_that_ended_long_ago_are_fetched_besides_the_last_fifty() -> None:
    app = _app()
    before = [msgspec.structs.replace(row, id=f"old-{row.id}") for row in scenes.requests(0, 13)]
    _link(app).requests.ended = before
    async with app.run_test(size=(120, 40)) as pilot:
        table = await _ready(pilot)
        assert len(table.rows) == 17 + 40 + 13


async def test_a_request_that_ends_stays_under_the_cursor() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        table = await _ready(pilot)
        await pilot.press("down", "down", "down")
        chosen = table.cursor_key
        assert chosen is not None and table.chosen is not None and table.chosen.state == "decode"
        await pilot.press("x")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("y")
        await until(pilot, lambda: table.chosen is not None and table.chosen.state == "finished")
        assert table.cursor_key == chosen
        assert _link(app).names() == ["cancel_request"]


async def test_s_sorts_by_the_next_column_that_is_seen_and_shift_s_turns_it_round() -> None:
    app = _app()
    async with app.run_test(size=(80, 24)) as pilot:
        await _ready(pilot)
        await pilot.press("s")
        assert "id↓" in rows(app)[3]
        await pilot.press("s")
        assert "state↓" in rows(app)[3]
        await pilot.press("s", "S")
        assert "in↑" in rows(app)[3]
        assert _first(app, 1) == ["req-00000000"]


async def test_a_click_on_a_title_sorts_by_it_and_another_turns_it_round() -> None:
    app = _app()
    async with app.run_test(size=(140, 40)) as pilot:
        await _ready(pilot)
        line = rows(app)[3]
        assert await pilot.click(offset=(line.index("TTFT") + 1, 3))
        await until(pilot, lambda: "TTFT↓" in rows(app)[3])
        slowest = _first(app, 1)
        assert await pilot.click(offset=(line.index("TTFT") + 1, 3))
        await until(pilot, lambda: "TTFT↑" in rows(app)[3])
        assert slowest == ["req-000cb44c"] and _first(app, 1) == ["req-00000000"]


async def test_a_word_filters_as_it_is_typed_and_escape_shows_all_again() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        table = await _ready(pilot)
        every = len(table.rows)
        await pilot.press("slash", *"alice")
        await until(pilot, lambda: 0 < len(table.rows) < every)
        assert all(row.cells[2][0][0] == "alice" for row in table.rows)
        assert f"{len(table.rows)} shown" in screen_text(app)
        await pilot.press("enter")
        assert table.has_focus
        await pilot.press("escape")
        await until(pilot, lambda: len(table.rows) == every)
        assert app.screen.query_one(Input).value == ""


async def test_v_shows_some_states_alone() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        table = await _ready(pilot)
        counts = []
        for _ in range(5):
            await pilot.press("v")
            counts.append(len(table.rows))
        assert counts == [17, 3, 40, 8, 57]


async def test_g_groups_by_client_then_by_key_and_enter_shows_the_requests_of_a_group() -> None:
    snapshot = request_scenes.busy()
    keyed = [
        msgspec.structs.replace(row, key_name="batch", address="10.0.0.5", program="curl/8.5.0")
        for row in snapshot.requests[:9]
    ]
    app = _app(msgspec.structs.replace(snapshot, requests=(*keyed, *snapshot.requests[9:])))
    async with app.run_test(size=(80, 24)) as pilot:
        table = await _ready(pilot)
        await pilot.press("g")
        await until(pilot, lambda: "Requests: by client" in screen_text(app))
        assert {row.key for row in table.rows} == {"batch@10.0.0.5 curl/8.5.0", "alice", "bob", "batch-7", "–"}
        for word in ("live", "waiting", "done", "errors", "tok/s", "out"):
            assert word in rows(app)[3], word
        assert "Copy" not in rows(app)[-1]
        await pilot.press("down", "enter")
        await until(pilot, lambda: "Requests: batch@10.0.0.5 curl/8.5.0" in screen_text(app))
        assert len(table.rows) == 9 and all(row.key_name for row in map(table.requests.__getitem__, range(9)))
        await pilot.press("escape")
        await until(pilot, lambda: "Requests: by client" in screen_text(app))
        await pilot.press("g")
        await until(pilot, lambda: "Requests: by key" in screen_text(app))
        assert [row.key for row in table.rows] == ["batch", "–"]
        await pilot.press("g")
        await until(pilot, lambda: len(table.rows) == 57)


async def test_x_cancels_all_live_requests_of_a_group_after_a_question() -> None:
    app = _app()
    async with app.run_test(size=(80, 24)) as pilot:
        table = await _ready(pilot)
        await pilot.press("g", "down", "x")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        group, live = table.cursor_key, [row.id for row in table.requests.live_of(table.cursor_key or "")]
        assert len(live) > 1 and f"Cancel {len(live)} requests of {group}?" in screen_text(app)
        await pilot.press("y")
        await until(pilot, lambda: len(_link(app).names()) == len(live))
        assert _link(app).commands == [("cancel_request", {"request_id": each}) for each in live]


async def test_escape_leaves_the_groups() -> None:
    app = _app()
    async with app.run_test(size=(100, 30)) as pilot:
        table = await _ready(pilot)
        await pilot.press("g", "escape")
        await until(pilot, lambda: len(table.rows) == 57)
        assert "by client" not in screen_text(app)


async def test_a_filter_that_nothing_passes_says_so() -> None:
    app = _app()
    async with app.run_test(size=(80, 24)) as pilot:
        await _ready(pilot)
        await pilot.press("slash", *"nobody")
        await until(pilot, lambda: "No request matches. Esc shows all." in screen_text(app))


async def test_rows_that_come_in_above_do_not_move_what_one_reads() -> None:
    app = _app(request_scenes.busy(0, 40))
    async with app.run_test(size=(120, 24)) as pilot:
        table = await _ready(pilot)
        await pilot.press(*["down"] * 30)
        chosen, line = table.cursor_key, 29 - round(table.scroll_offset.y)
        link = _link(app)
        newer = [
            msgspec.structs.replace(row, id=f"new-{row.id}", created_at=scenes.NOW + 1, order=5000 + at)
            for at, row in enumerate(scenes.requests(0, 13))
        ]
        link.requests.ended += newer
        app.refresh_screen()
        await until(pilot, lambda: table.cursor_key == chosen and round(table.scroll_offset.y) == 42 - line)
        assert table.rows[42].key == chosen


async def test_ten_thousand_requests_are_listed_and_only_those_seen_are_made_into_rows(monkeypatch: Any) -> None:
    from console.tui.screens.requests import table as request_table

    made, make = list[str](), request_table.table_row
    monkeypatch.setattr(request_table, "table_row", lambda row: made.append(row.id) or make(row))
    app = _app(request_scenes.busy(0, 0))
    _link(app).requests.ended = [
        msgspec.structs.replace(row, id=f"r{at}", order=at + 1, created_at=scenes.NOW - 10_000 + at)
        for at, row in enumerate(scenes.requests(0, 1) * 10_000)
    ]
    async with app.run_test(size=(120, 40)) as pilot:
        table = await _ready(pilot)
        assert len(table.rows) == 10_000
        await pilot.press("end")
        await until(pilot, lambda: table.chosen is not None and table.chosen.id == "r0")
        made.clear()
        app.refresh_screen()
        await pilot.pause()
        assert 0 < len(made) < 200


# -- one request ------------------------------------------------------------------------------------------------------


async def test_enter_opens_a_request_with_its_timeline_and_says_how_to_allow_texts() -> None:
    app = _app()
    async with app.run_test(size=(120, 48)) as pilot:
        await _ready(pilot)
        _link(app).requests.details["req-00000000"] = request_scenes.moved()
        await pilot.press("enter")
        await until(pilot, lambda: "first token 960 ms" in screen_text(app))
        seen = screen_text(app)
        assert "w0 crashed" in seen and "--show-prompts" in seen and "x Cancel" in seen
        assert NOT_ALLOWED.split(",")[0] in " ".join(seen.split())


async def test_text_that_is_allowed_is_shown_as_it_is() -> None:
    app = _app()
    async with app.run_test(size=(120, 60)) as pilot:
        await _ready(pilot)
        _link(app).requests.details["req-00000000"] = request_scenes.with_text()
        await pilot.press("enter")
        await until(pilot, lambda: "What is [b]max_prompts[/b]?" in screen_text(app))


async def test_an_open_request_goes_on_changing_until_it_ends() -> None:
    app = _app()
    async with app.run_test(size=(120, 48)) as pilot:
        await _ready(pilot)
        link = _link(app)
        await pilot.press("enter")
        await until(pilot, lambda: "400 of max 512 tokens" in screen_text(app))
        row = link.current.requests[0]
        done = msgspec.structs.replace(row, state="finished", finish="stop", output_tokens=411)
        link.requests.details[row.id] = story(done)
        app.refresh_screen()
        await until(pilot, lambda: " ended ─" in screen_text(app) and "x Cancel" not in rows(app)[-1])
        assert "411 of max 512 tokens" in screen_text(app)
        await pilot.press("x")
        assert "cancel_request" not in link.names()
        await pilot.press("escape")
        assert not isinstance(app.screen, RequestScreen)


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_mouse_and_keys_read_the_timeline_of_a_request(size: tuple[int, int]) -> None:
    app = _app()
    async with app.run_test(size=size) as pilot:
        await _opened(pilot)
        y, seen = next((y, row) for y, row in enumerate(rows(app)) if "first token" in row)
        start, end = seen.index("│ 0  ") + 2, seen.index("6.40 s") + len("6.40 s")
        await pilot.hover(offset=(start, y - 1))
        assert "Timeline  14:02:04  ◌ queued  420 ms (7%)" in screen_text(app)
        assert "▲ " in rows(app)[y]
        await pilot.hover(offset=(end - 1, y - 1))
        assert "● decode on w1  3.00 s (47%)" in screen_text(app)
        assert " tok/s" in screen_text(app).partition("● decode on w1  3.00 s (47%)")[2].partition("\n")[0]
        assert " ▲" in rows(app)[y]
        await pilot.hover(offset=(start, y + 1))
        assert "Timeline  tok/s and phases" in screen_text(app)
        await pilot.press("left_parenthesis")
        await until(pilot, lambda: "● decode on w1  3.00 s (47%)" in screen_text(app))
        await pilot.press(*["left_parenthesis"] * (end - start))
        await until(pilot, lambda: "◌ queued  420 ms (7%)" in screen_text(app))
        await pilot.press(*["right_parenthesis"] * (end - start))
        await until(pilot, lambda: "Timeline  tok/s and phases" in screen_text(app))


async def test_keys_to_read_a_timeline_are_offered_only_where_there_is_one() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        await _opened(pilot)
        assert "Read timeline" in rows(app)[-1]
        await pilot.press("escape")
        _link(app).requests.details["req-00000000"] = request_scenes.moved(timeline=False)
        await pilot.press("enter")
        await until(pilot, lambda: NO_TIMELINE in screen_text(app))
        assert "Read timeline" not in rows(app)[-1]


async def test_the_cause_under_the_mouse_is_highlighted_in_the_list_of_a_request() -> None:
    app = _app()
    async with app.run_test(size=(120, 48)) as pilot:
        await _ready(pilot)
        why = describe({"slot": 3.0, "decode": 1.0})
        _link(app).requests.details["req-00000000"] = request_scenes.moved(why=why)
        await pilot.press("enter")
        await until(pilot, lambda: "waiting for a slot" in screen_text(app))

        y = next(y for y, row in enumerate(rows(app)) if "waiting for a slot" in row) - 1
        bar = rows(app)[y]

        def highlighted() -> str:
            strips = app.screen._compositor.render_strips(app.size)[y : y + 3]
            return "".join(each.text for strip in strips for each in strip if each.style and each.style.reverse)

        await pilot.hover(offset=(bar.index("..."), y))
        assert highlighted().split() == ["waiting", "for", "a", "slot", "3.00", "s", "75%"]
        await pilot.hover(offset=(bar.rindex("━"), y))
        assert highlighted().split() == ["own", "decode", "1.00", "s", "25%"]
        await pilot.hover(offset=(bar.rindex("━"), y - 1))
        assert not highlighted().strip()


async def test_an_open_request_is_cancelled_after_a_question() -> None:
    app = _app()
    async with app.run_test(size=(120, 48)) as pilot:
        await _ready(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: "x Cancel" in rows(app)[-1])
        await pilot.press("x")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, RequestScreen))
        assert _link(app).names() == []
        await pilot.press("x")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("y")
        await until(pilot, lambda: _link(app).names() == ["cancel_request"])
        await until(pilot, lambda: "○ cancelled" in screen_text(app))


async def test_a_request_that_is_forgotten_says_so() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        screen = RequestScreen(msgspec.structs.replace(scenes.requests()[0], id="gone[1]"))
        app.push_screen(screen)
        await until(pilot, lambda: "unknown request gone[1]: neither running nor recent" in screen_text(app))
        assert "Request gone[1]" in screen_text(app)


# -- cancelling all that waits ----------------------------------------------------------------------------------------


async def test_cancelling_all_that_waits_asks_once() -> None:
    app = _app()
    async with app.run_test(size=(120, 40)) as pilot:
        await _ready(pilot)
        await pilot.press("X")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        assert "3 requests wait for a worker." in screen_text(app)
        await pilot.press("n")
        assert _link(app).names() == []
        await pilot.press("X", "y")
        await until(pilot, lambda: _link(app).names() == ["cancel_queued"])
        assert _link(app).current.queued == 0


async def test_nothing_is_asked_where_nothing_waits() -> None:
    app = _app(scenes.cpu_idle())
    async with app.run_test(size=(80, 24)) as pilot:
        await _ready(pilot)
        await pilot.press("X")
        await pilot.pause()
        assert not isinstance(app.screen, ConfirmScreen)


# -- pictures ---------------------------------------------------------------------------------------------------------


async def _opened(pilot: Pilot[None]) -> None:
    await _ready(pilot)
    link = _link(pilot.app)  # type: ignore[arg-type]
    link.requests.details["req-00000000"] = request_scenes.moved()
    await pilot.press("enter")
    await until(pilot, lambda: "first token" in screen_text(pilot.app) and "x Cancel" in rows(pilot.app)[-1])
    covered = pilot.app.size.height < 28  # else what lies behind is drawn too
    await until(pilot, lambda: covered or "14:02:11" in screen_text(pilot.app))
    await pilot.pause()


async def _filtered(pilot: Pilot[None]) -> None:
    await _ready(pilot)
    await pilot.press("v", "v", "v", "s", "slash", *"ali", "enter", "down")
    table = pilot.app.screen.query_one(RequestTable)
    await until(pilot, lambda: table.has_focus and table.cursor_key is not None and len(table.rows) == 10)
    await pilot.pause()


def test_requests_look_right(snap_compare: Any) -> None:
    assert snap_compare(_app(), terminal_size=(120, 40), run_before=_ready)


def test_requests_fit_a_small_terminal() -> None:
    words = (
        "Requests: finished",
        "when     id↓",
        "TTFT    ITL  tok/s   took",
        "req-f027     ✖ error",
        "req-f003     ○ cancelled",
        "ali",
    )
    assert shows(_app(), *words, "⏎ Open", terminal_size=(80, 24), run_before=_filtered)


def test_a_request_looks_right(snap_compare: Any) -> None:
    assert snap_compare(_app(), terminal_size=(120, 40), run_before=_opened)


def test_a_request_fits_a_small_terminal() -> None:
    phases = (
        "◌ queued  ",
        "◔ prefill on w0",
        "812 tokens, 256 of them cached",
        "● decode on w0",
        "✖ w0 crashed",
        "● decode on w1",
    )
    words = (
        "Request req-00000000",
        "● decode on w1",
        "Timeline",
        ".....──",
        "▏first token 960 ms",
        *phases,
        "longest pauses",
        "Numbers",
    )
    assert shows(_app(), *words, terminal_size=(80, 24), run_before=_opened)


async def test_a_request_can_be_opened_from_the_dashboard_too() -> None:
    app = EricApp(FakeLink(request_scenes.busy()))
    async with app.run_test(size=(120, 48)) as pilot:
        await until(pilot, lambda: bool(app.screen.query(RequestsPanel)))
        table = app.screen.query_one(RequestsPanel).table
        table.focus()
        await pilot.press("down", "enter")
        await until(pilot, lambda: "Request req-00000000" in screen_text(app))
