"""Devices on the screen: simulated ones, those of other nodes, and programs that hold their memory."""

from __future__ import annotations

import pytest

from console.text import device_name, devices_name
from console.tui.app import EricApp
from console.tui.screens.dashboard.panels.devices import (
    Panel,
    brief_rows,
    detailed_rows,
    paired_rows,
    table,
    title,
)
from console.tui.widgets.graph import Graph
from engine.snapshot import ProcessMemory, Second, Snapshot
from tests.fakes import fleet_scenes, scenes
from tests.fakes.link import FakeLink
from tests.ui.seen import rows, screen_text, until

SIZES = [(80, 24), (100, 30), (120, 40)]


async def _seen(snapshot: Snapshot, size: tuple[int, int]) -> str:
    app = EricApp(FakeLink(snapshot))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        return screen_text(app)


@pytest.mark.parametrize("size", SIZES)
async def test_simulated_is_written_at_every_size(size: tuple[int, int]) -> None:
    seen = await _seen(fleet_scenes.simulated(), size)
    assert "simulated" in seen.splitlines()[0]
    assert "Devices (simulated)" in seen
    assert all(name in seen for name in ("SIM0", "SIM1", "SIM0+1"))


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (140, 40)])
async def test_eight_simulated_devices_are_all_seen(size: tuple[int, int]) -> None:
    seen = await _seen(fleet_scenes.eight_simulated(), size)
    assert all(f"SIM{index}" in seen for index in range(8))
    assert "Devices (simulated)" in seen
    assert "decode" in seen


def test_every_form_names_simulated_devices_and_those_of_other_nodes() -> None:
    devices = (fleet_scenes.sim(0), scenes.gpu(1, id="node2/cuda:1", node="node2"))
    for form in (brief_rows, detailed_rows, paired_rows, table):
        drawn = "\n".join(line.plain for line in form(Panel(devices, 90)))
        assert "SIM0" in drawn
        assert "node2 GPU1" in drawn
    assert title(devices) == "Devices (1 of 2 simulated)"
    assert title((scenes.gpu(0), scenes.cpu())) == "Devices"
    assert title((fleet_scenes.sim(0), scenes.cpu())) == "Devices (simulated)"


@pytest.mark.parametrize("width", [46, 56, 66, 90, 108, 160])
def test_no_line_of_a_device_is_wider_than_the_panel(width: int) -> None:
    devices = (scenes.gpu(0), fleet_scenes.sim(1), scenes.gpu(2, id="node2/cuda:2", node="node2"), scenes.cpu())
    panel = Panel(devices, width, scenes.history(devices=4))
    lines = [*brief_rows(panel), *brief_rows(panel, numbers=True)]
    lines += [*(detailed_rows(panel) if width >= 56 else ()), *(paired_rows(panel) if width >= 72 else ())]
    lines += [*(table(panel) if width >= 90 else ()), *(table(panel, numbers=True) if width >= 108 else ())]
    assert [line.plain for line in lines if line.cell_length > width] == []


def test_each_of_many_devices_has_one_row_with_what_it_holds_in_columns() -> None:
    devices = tuple(scenes.gpu(index) for index in range(8))
    head, *rows = (line.plain for line in table(Panel(devices, 120, scenes.history(devices=8)), numbers=True))
    assert len(rows) == 8
    for word, number in (("weights", "9.4"), ("KV", "6.1"), ("work", "1.2"), ("others", "1.5"), ("free", "5.8")):
        end = head.index(word) + len(word)
        assert all(row[:end].endswith(number) for row in rows)


def test_what_was_is_drawn_against_the_whole_and_not_against_itself() -> None:
    steady = tuple(
        Second(at=scenes.NOW - 60 + index, device_utilisation=(0.5,), device_memory=(0.25,)) for index in range(60)
    )
    panel = Panel((scenes.gpu(0),), 60, steady)
    assert set(panel.utilisation(0, 12).plain.strip()) == {"▄"}
    assert set(panel.memory(0, 12).plain.strip()) == {"▂"}
    assert panel.utilisation(0, 12).plain.startswith("    "), "nothing was measured yet"


def test_the_processor_takes_one_row_beside_cards() -> None:
    lines = detailed_rows(Panel((scenes.gpu(0), scenes.cpu()), 66))
    assert [line.plain[:4] for line in lines[-2:]] == ["", "CPU "]
    assert len(detailed_rows(Panel((scenes.cpu(),), 66))) == 4


@pytest.mark.parametrize(
    ("devices", "shown"),
    [
        (("cuda:0",), "GPU0"),
        (("cpu",), "CPU"),
        (("sim:0", "sim:1"), "SIM0+1"),
        (("node2/cuda:0", "node2/cuda:3"), "node2 GPU0+3"),
        (("cuda:0", "sim:1"), "GPU0+SIM1"),
        ((), "–"),
    ],
)
def test_devices_have_short_names(devices: tuple[str, ...], shown: str) -> None:
    assert devices_name(devices) == shown


def test_a_node_with_a_long_name_keeps_the_device_in_sight() -> None:
    assert device_name("a-node-with-a-long-name/cuda:7") == "a-node-wi… GPU7"


async def test_programs_that_hold_memory_are_named() -> None:
    stranger = ProcessMemory(pid=2211, name="/usr/lib/xorg/Xorg", used_bytes=int(1.5 * scenes.GIB))
    seen = await _seen(scenes.busy(devices=(scenes.gpu(0, others=(stranger,)), scenes.gpu(1))), (100, 30))
    assert "others: Xorg (2211) 1.5 GiB on GPU0" in seen


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (100, 40), (120, 40), (200, 60)])
async def test_the_colours_of_many_devices_are_explained_at_every_size(size: tuple[int, int]) -> None:
    seen = await _seen(scenes.eight_gpus(), size)
    assert all(word in seen for word in ("weights", "KV", "work", "others", "free"))


async def test_cards_that_come_and_go_change_the_form() -> None:
    link = FakeLink(scenes.busy())
    app = EricApp(link)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "RTX 3090" in screen_text(app)
        link.show(scenes.eight_gpus())
        app.refresh_screen()
        await pilot.pause()
        assert "busy, 2 min" in screen_text(app)
        assert "GPU7" in screen_text(app)
        await pilot.resize_terminal(100, 30)
        await pilot.pause()
        assert "busy, 2 min" not in screen_text(app)
        assert "GPU7" in screen_text(app)
        link.show(scenes.busy())
        app.refresh_screen()
        await pilot.pause()
        assert "GPU2" not in screen_text(app)


def _half_full_since(back_s: int, devices: int) -> Snapshot:
    """Devices of 24 GiB, a quarter full and idle until `back_s` ago, then half full and busy; other numbers now."""
    seconds = tuple(
        Second(
            at=scenes.NOW - back,
            device_utilisation=(0.07 if back > back_s else 0.58,) * devices,
            device_memory=(0.25 if back > back_s else 0.5,) * devices,
        )
        for back in range(130, -1, -1)
    )
    return scenes.busy(devices=tuple(scenes.gpu(at) for at in range(devices)), history=seconds, marks=())


async def test_the_mouse_reads_the_small_graphs_of_a_device_at_one_moment() -> None:
    app = EricApp(FakeLink(_half_full_since(40, devices=2)))
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause()
        y = next(y for y, row in enumerate(rows(app)) if "18.2/24.0 GiB" in row)
        last = rows(app)[y].index("18.2/24.0") - 2
        await pilot.hover(offset=(last, y))
        assert "12.0/24.0 GiB" in rows(app)[y]
        assert " 58%" in rows(app)[y - 1]
        graph = app.screen.query_one("#tokens", Graph)
        assert "▲" in graph.line(graph.size.height - 1).plain
        await pilot.hover(offset=(last - 16, y))
        assert "6.0/24.0 GiB" in rows(app)[y]
        assert " 7%" in rows(app)[y - 1]
        ages = [row.rpartition(" s ago")[0].rpartition(", ")[2] for row in rows(app) if " s ago" in row]
        assert len(ages) == 2, "in the frames of Devices and Throughput"
        assert all(int(age) > 40 for age in ages)
        await pilot.hover("#request-table")
        assert "18.2/24.0 GiB" in rows(app)[y]
        assert "graphs: 0 to 100%, last 2 min" in screen_text(app)


@pytest.mark.parametrize(("size", "devices"), [((160, 48), 2), ((100, 30), 8), ((160, 48), 8)])
async def test_keys_read_the_small_graphs_of_every_device(size: tuple[int, int], devices: int) -> None:
    app = EricApp(FakeLink(_half_full_since(40, devices)))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        assert " 58%" not in screen_text(app)
        await pilot.press("left_parenthesis")
        await until(pilot, lambda: screen_text(app).count(" 58%") == devices)
        panel = app.screen.query_one("#many-devices" if devices > 2 else "#devices")
        assert ", 0 s ago" in f"{panel.border_title} {panel.border_subtitle}"
        await pilot.press("right_parenthesis")
        await until(pilot, lambda: " 58%" not in screen_text(app))


def test_a_moment_without_data_of_a_device_has_no_number() -> None:
    panel = Panel((scenes.gpu(0),), 60, _half_full_since(40, 1).history, cursor=scenes.NOW - 500)
    assert panel.busy(0, 12)[0] == "–"
    assert panel.used(0, 12)[0].strip() == "–/24.0"


async def test_nodes_stand_beside_this_machine() -> None:
    seen = await _seen(fleet_scenes.two_nodes(), (100, 30))
    assert seen.count("node2 GPU0") == 2
