"""Workers and their devices: where each lies, what became of it, and what an operator can do about it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from console.tui.app import EricApp
from console.tui.commands import entries
from console.tui.screens.dashboard.panels.requests import request_row
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.screens.worker.screen import WorkerScreen
from console.tui.widgets.tab_row import BREVITIES, KnobValues, knob_row
from console.tui.widgets.worker_text import crash_reason, difference, failure_text, placement_map
from engine.backends.base import BackendStats, KvTierStats, LoadProgress
from engine.errors import EngineError, ErrorInfo
from engine.requests.causes import describe_all
from engine.snapshot import Snapshot, WorkerReading
from tests.fakes import fleet_scenes, scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, shows, toasts

SIZES = [(80, 24), (100, 30), (120, 40)]


async def _seen(snapshot: Snapshot, size: tuple[int, int]) -> str:
    app = EricApp(FakeLink(snapshot))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        return screen_text(app)


def _worker(snapshot: Snapshot, worker: str, **changes: Any) -> Snapshot:
    """`snapshot` with one worker changed."""
    changed = (msgspec.structs.replace(each, **changes) if each.id == worker else each for each in snapshot.workers)
    return scenes.changed(snapshot, workers=tuple(changed))


async def _opened(pilot: Pilot[None], worker: int) -> str:
    """The worker's screen, over the dashboard."""
    await pilot.press("shift+tab", *["down"] * (worker + 1), "enter")
    await pilot.pause()
    assert isinstance(pilot.app.screen, WorkerScreen)
    return screen_text(pilot.app)


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
async def test_a_crash_its_reason_and_the_back_off_are_seen(size: tuple[int, int]) -> None:
    seen = await _seen(fleet_scenes.simulated(), size)
    assert "↻ restarting in 4 s: SIGKILL" in seen
    assert "✖ dead after 5 crashes: exit 139" in seen


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (fleet_scenes.crash("w1"), "SIGKILL"),
        (fleet_scenes.left_dead("w1"), "exit 139"),
        (ErrorInfo(code="worker_failed", message="...", details={"silent_s": 31.2}), "hung, silent for 31 s"),
        (ErrorInfo(code="load_failed", message="worker w1 found no weights"), "found no weights"),
        (
            ErrorInfo(
                code="worker_failed",
                message="worker w1 crashed 5 times in a row; not restarted. Last error: worker w1 was lost: no node",
                details={"deaths": 5},
            ),
            "was lost: no node",
        ),
        (None, ""),
    ],
)
def test_the_reason_of_a_death_is_short(error: ErrorInfo | None, said: str) -> None:
    assert crash_reason(WorkerReading(id="w1", state="restarting", last_error=error)) == said


def test_nothing_is_said_of_the_trouble_of_a_worker_that_is_well() -> None:
    worker = WorkerReading(id="w1", state="ready", last_error=fleet_scenes.crash("w1"), restarts=1)
    assert failure_text(worker) == ""
    assert failure_text(msgspec.structs.replace(worker, state="restarting")) == ": SIGKILL"


def test_a_request_that_took_too_long_says_so() -> None:
    row = msgspec.structs.replace(scenes.requests()[0], state="finished", finish="timeout")
    assert request_row(row).cells[2][0][0] == "◇ timeout"


async def test_a_load_says_how_long_it_still_takes() -> None:
    snapshot = scenes.busy()

    def loaded(gib: float) -> LoadProgress:
        return LoadProgress(phase="weights", done=int(gib * scenes.GIB), total=10 * scenes.GIB)

    link = FakeLink(_worker(snapshot, "w1", progress=loaded(2.0)))
    app = EricApp(link)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        assert "weights 2.0/10.0 GiB" in screen_text(app)
        link.show(scenes.changed(_worker(snapshot, "w1", progress=loaded(4.0)), at=scenes.NOW + 4))
        app.refresh_screen()
        await pilot.pause()
        assert "weights 4.0/10.0 GiB, 12 s left" in screen_text(app)
        await pilot.resize_terminal(100, 30)
        app.refresh_screen()
        await pilot.pause()
        assert "loading 40%, 12 s left" in screen_text(app)


# -- one worker -------------------------------------------------------------------------------------------------------


async def test_enter_opens_a_worker_with_its_placement() -> None:
    app = EricApp(FakeLink(fleet_scenes.simulated()))
    async with app.run_test(size=(100, 40)) as pilot:
        seen = await _opened(pilot, 0)
        for words in ("Worker w0", "SIM0+1 (simulated)", "planned", "16 on SIM0, 16 on SIM1", "31 ms", "pid 4100"):
            assert words in seen, words
        await pilot.press("escape")
        assert not isinstance(app.screen, WorkerScreen)


async def test_the_ranks_of_a_worker_say_their_part_of_each_layer() -> None:
    shares = tuple(msgspec.structs.replace(fleet_scenes.share(f"sim:{number}"), ranks=2) for number in range(2))
    app = EricApp(FakeLink(_worker(fleet_scenes.simulated(), "w0", planned=shares, used=shares)))
    async with app.run_test(size=(100, 40)) as pilot:
        assert "1/2 of 32 on SIM0, 1/2 of 32 on SIM1" in await _opened(pilot, 0)


async def test_a_dead_worker_shows_how_it_died_and_its_last_lines() -> None:
    app = EricApp(FakeLink(fleet_scenes.simulated()))
    async with app.run_test(size=(80, 40)) as pilot:
        seen = await _opened(pilot, 2)
        for words in (
            "dead after 5 crashes",
            "exit code 139",
            "▏ Fatal Python error: Segmentation fault",
            "crashes     5",
        ):
            assert words in seen, words


async def test_a_worker_that_is_open_goes_on_changing() -> None:
    snapshot = fleet_scenes.simulated()
    link = FakeLink(snapshot)
    app = EricApp(link)
    async with app.run_test(size=(100, 40)) as pilot:
        assert "restarting in 4 s" in await _opened(pilot, 1)
        progress = scenes.loading().status.progress
        link.show(_worker(snapshot, "w1", state="loading", progress=progress, retry_in_s=None))
        app.refresh_screen()
        await pilot.pause()
        assert "Read weights" in screen_text(app)
        link.show(scenes.changed(snapshot, workers=snapshot.workers[:1]))
        app.refresh_screen()
        await pilot.pause()
        assert "stopped" in screen_text(app)


async def test_a_click_selects_a_worker_and_two_open_it() -> None:
    app = EricApp(FakeLink(fleet_scenes.simulated()))
    async with app.run_test(size=(100, 40)) as pilot:
        await pilot.pause()
        line = next(at for at, row in enumerate(rows(app)) if "restarting in" in row)
        await pilot.click(offset=(10, line))
        assert not isinstance(app.screen, WorkerScreen)
        await pilot.click(offset=(10, line), times=2)
        await pilot.pause()
        assert "Worker w1" in screen_text(app)


async def test_r_starts_a_dead_worker_again_at_once() -> None:
    link = FakeLink(fleet_scenes.simulated())
    app = EricApp(link)
    async with app.run_test(size=(100, 40)) as pilot:
        await _opened(pilot, 2)
        await pilot.press("r")
        await app.workers.wait_for_complete()
    assert link.commands == [("restart_worker", {"worker_id": "w2"})]


async def test_r_asks_before_requests_have_to_move() -> None:
    link = FakeLink(fleet_scenes.simulated())
    app = EricApp(link)
    async with app.run_test(size=(100, 40)) as pilot:
        await _opened(pilot, 0)
        await pilot.press("r")
        assert isinstance(app.screen, ConfirmScreen)
        assert "w0 is running 7 requests" in screen_text(app)
        await pilot.press("n")
        assert link.commands == []
        await pilot.press("r", "y")
        await app.workers.wait_for_complete()
    assert link.commands == [("restart_worker", {"worker_id": "w0"})]


async def test_what_a_worker_said_last_is_shown_and_goes_on() -> None:
    link = FakeLink(fleet_scenes.simulated())
    link.log("compiled kernels in 1.2 s", source="w0")
    link.log("not of this worker", source="w1")
    app = EricApp(link)
    async with app.run_test(size=(100, 40)) as pilot:
        seen = await _opened(pilot, 0)
        assert "14:02:11 compiled kernels in 1.2 s" in seen
        assert "not of this worker" not in seen
        link.log("attention falls back to gathered", source="w0")
        app.refresh_screen()
        await pilot.pause()
        assert "attention falls back to gathered" in screen_text(app)


async def test_what_can_be_done_with_a_worker_can_be_clicked() -> None:
    app = EricApp(FakeLink(fleet_scenes.simulated()))
    async with app.run_test(size=(100, 40)) as pilot:
        for word, title in (("r Restart", "w0 is running 7 requests"), ("d Drain", "Drain w0?")):
            await pilot.press("i")
            await pilot.pause()
            line = next(at for at, row in enumerate(rows(app)) if word in row)
            await pilot.click(offset=(rows(app)[line].index(word) + 1, line))
            await pilot.pause()
            assert isinstance(app.screen, ConfirmScreen)
            assert title in screen_text(app)
            await pilot.press("n", "escape")


async def test_d_asks_once_and_drains() -> None:
    link = FakeLink(fleet_scenes.simulated())
    app = EricApp(link)
    async with app.run_test(size=(100, 40)) as pilot:
        await _opened(pilot, 0)
        await pilot.press("d")
        assert "It finishes 7 requests and then stops. The model runs with one worker fewer." in screen_text(app)
        await pilot.press("n")
        assert link.commands == []
        await pilot.press("d", "y")
        await app.workers.wait_for_complete()
    assert link.commands == [("drain_worker", {"worker_id": "w0"})]


async def test_a_worker_that_drains_is_not_asked_about_again() -> None:
    snapshot = _worker(fleet_scenes.simulated(), "w0", state="draining")
    app = EricApp(FakeLink(snapshot))
    async with app.run_test(size=(100, 40), notifications=True) as pilot:
        await _opened(pilot, 0)
        await pilot.press("d")
        await pilot.pause()
        assert "w0 is already draining." in toasts(app)


async def test_a_restart_that_is_refused_says_why() -> None:
    link = FakeLink(fleet_scenes.simulated())
    link.failures["restart_worker"] = EngineError("there is no worker w2")
    app = EricApp(link)
    async with app.run_test(size=(100, 40), notifications=True) as pilot:
        await _opened(pilot, 2)
        await pilot.press("r")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "there is no worker w2" in toasts(app)


async def test_the_palette_has_what_the_keys_of_workers_do() -> None:
    app = EricApp(FakeLink(fleet_scenes.simulated()))
    async with app.run_test(size=(100, 40)) as pilot:
        assert "Show the selected worker" in {entry.title for entry in entries(app.screen)}
        await pilot.press("i")
        await pilot.pause()
        does = "Drain this worker: it finishes its requests, then stops"
        assert {"Restart this worker", does, "Close the worker"} <= {entry.title for entry in entries(app.screen)}


async def test_a_worker_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "linux")
    app = EricApp(FakeLink(fleet_scenes.simulated()))
    async with app.run_test(size=(100, 40)) as pilot:
        await _opened(pilot, 2)
        drawn = rows(app)[:-1]
    assert [char for line in drawn for char in line if ord(char) > 126 and not char.isalnum()] == []


def test_planned_and_used_stand_beneath_each_other() -> None:
    share = fleet_scenes.share
    lines = [
        line.plain
        for line in placement_map((share("sim:0"),), (share("sim:0", scale=0.5),), {"sim:0": 24 * scenes.GIB}, 90)
    ]
    assert {len(line) for line in lines} == {len(lines[0])}
    assert lines[1].split()[-4:] == ["9.4", "6.1", "1.2", "16.7"]
    assert lines[2].split()[-4:] == ["4.7", "6.1", "1.2", "12.0"]
    assert difference((share("sim:0"),), (share("sim:0", scale=0.5),), "sim:0").plain.endswith("12.0 GiB, −28%")


# -- the knobs --------------------------------------------------------------------------------------------------------


async def test_the_knobs_show_the_limit_that_memory_set_and_workers_that_come() -> None:
    wide = (await _seen(fleet_scenes.memory_ran_out(), (160, 40))).splitlines()[1]
    assert "Workers  −  1→2  +   Max prompts  −  16, limited to 11 by memory  +" in wide
    narrow = (await _seen(fleet_scenes.memory_ran_out(), (128, 40))).splitlines()[1]
    assert "− 1→2 +  Max prompts − 16 (11) +" in narrow


def test_a_worker_that_comes_back_does_not_make_the_knob_move() -> None:
    assert KnobValues.of(scenes.busy()).now == 2
    assert KnobValues.of(fleet_scenes.simulated()).now == 3
    draining = scenes.busy(target_workers=1, workers=(scenes.worker(0), scenes.worker(1, state="draining")))
    assert knob_row(KnobValues.of(draining), 0).plain.startswith("Workers  −  2→1  +")


def test_each_form_of_the_knobs_is_narrower_than_the_one_before() -> None:
    knobs = KnobValues(workers=2, now=1, prompts=16, limit=11)
    widths = [knob_row(knobs, brevity).cell_length for brevity in range(BREVITIES)]
    assert widths == sorted(widths, reverse=True)


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_simulated_devices_and_dead_workers_are_marked() -> None:
    app = EricApp(FakeLink(fleet_scenes.simulated()))
    devices = "simulated", "Devices (simulated)", "SIM0 ", "■weights 9.4 ■KV 6.1 ■work 1.2 □free 7.3", "SIM1 "
    workers = (
        "w0  SIM0+1  ● busy",
        "w1  SIM0    ↻ restarting in 4 s: SIGKILL ↻2",
        "w2  SIM1    ✖ dead after 5 crashes: exit",
    )
    assert shows(app, *devices, "1 of 3 ready", *workers, "Session", "Requests", terminal_size=(100, 30))


def test_a_worker_looks_right(snap_compare: object) -> None:
    app = EricApp(FakeLink(fleet_scenes.simulated()))
    assert snap_compare(app, terminal_size=(120, 40), press=["i"])  # type: ignore[operator]


def test_a_dead_worker_fits_a_small_terminal() -> None:
    app = EricApp(FakeLink(fleet_scenes.simulated()))
    keys = ["shift+tab", "down", "down", "down", "enter"]
    crash = (
        "✖ dead after 5 crashes: exit 139  on SIM1 (simulated)",
        "Last crash",
        "not restarted",
        "Last lines:",
        "line 118 in forward",
    )
    placement = "Placement", "weights      KV    work     GiB", "planned", "used", "Work", "0 of 8"
    assert shows(app, "Worker w2", *crash, *placement, terminal_size=(80, 24), press=keys)


async def test_a_worker_says_what_the_time_of_its_requests_went_into() -> None:
    why = describe_all({"prompts": 30.0, "decode": 30.0}, {"step_tokens": 512})
    busy = scenes.busy()
    app = EricApp(FakeLink(_worker(busy, busy.workers[0].id, why=why)))
    async with app.run_test(size=(100, 50)) as pilot:
        seen = await _opened(pilot, 0)
    assert "Latency  by cause, last minute" in seen
    assert "▒ sharing steps with other prompts     30.0 s   50%" in seen
    assert "Requests shared steps with the prompts of other requests for 30.0 s (50%): lower" in seen
    assert "(now 512)." in seen


async def test_tiers_of_the_kv_cache_are_seen_with_what_is_wrong() -> None:
    tiers = (
        KvTierStats(name="host", used_bytes=3 << 29, limit_bytes=8 << 30, restored_pages=1234),
        KvTierStats(name="disk", limit_bytes=8 << 30, problem="KV pages are not kept in the disk tier: full"),
    )
    app = EricApp(
        FakeLink(scenes.changed(scenes.busy(), workers=(scenes.worker(0, stats=BackendStats(kv_tiers=tiers)),)))
    )
    async with app.run_test(size=(120, 50)) as pilot:
        await pilot.pause()
        seen = await _opened(pilot, 0)
    assert "KV host     ━━────────── 1.5 GiB of 8.0 GiB" in seen
    assert "read back   1,234 pages" in seen
    assert "KV disk     ──────────── 0 KiB of 8.0 GiB" in seen
    assert "KV pages are not kept in the disk tier: full" in seen
